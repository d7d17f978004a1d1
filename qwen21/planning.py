"""The command `plan`: from the arguments of `generate` to a memory plan, by headers and sizes alone."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from . import graph, images, memory, outputs
from .arguments import fp8_of, inputs_of, opened_request
from .backends import check as check_attention
from .checkpoint.load import ModelFiles, check_keep
from .checkpoint.lora import find_lora
from .config import LATENT_PIXELS
from .errors import UserError
from .memory_plan import Job, MemoryPlan, plan_memory
from .memory_show import describe, draw
from .prefix.placement import without_effect
from .prompt import layout_tokens, reference_size
from .ram import GIB
from .request import decide
from .tokenizer import load_tokenizer

SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ORIENTATION = 0x0112


def run(a: argparse.Namespace, files: ModelFiles) -> int:
    """Print the plan, and write its picture where one is asked for."""
    inputs = [*inputs_of(a), *files.paths]
    outputs.check_outputs(a.out, a.save_latent, a.batch, inputs)
    outputs.check_outputs(a.picture, None, 1, inputs, (".png",))
    made, warnings = plan_of(a, files)
    for warning in warnings:
        print(f"qwen21: warning: {warning}", file=sys.stderr)
    print(describe(made), flush=True)
    if a.picture:
        images.save_png(draw(made), a.picture)
    return 0


def plan_of(a: argparse.Namespace, files: ModelFiles) -> tuple[MemoryPlan, tuple[str, ...]]:
    """The plan of a run with these arguments, and what a run would warn of."""
    if a.session is not None or a.repeat != 1:
        raise UserError("a plan is of one run; leave --session and --repeat out, and give one job's flags")
    free = _free_bytes(a)
    device = torch.device("cpu" if free is None else "cuda")
    dtype = outputs.pick_dtype(a.dtype, device)
    check_attention(a.attention, dtype, device)
    decided = decide(opened_request(a, Unread.of), files)
    files.check(encodes=decided.request.encodes)
    references = [reference_size(*picture.size, decided.request.resolution) for picture in decided.request.references]
    tokenizer = load_tokenizer(files.tokenizer)
    grids = [(1, height // LATENT_PIXELS, width // LATENT_PIXELS) for width, height in references]
    prompts = [a.prompt or "", *([a.negative] if decided.guided else [])]
    job = Job.of(
        [layout_tokens(prompt, tokenizer, grids) for prompt in prompts],
        references,
        decided.size,
        a.batch,
        start=a.init_image is not None,
        shared=a.prefix_cache == "on",
    )
    fp8 = fp8_of(a)
    if fp8:
        check_keep(fp8, (files.dit, files.encoder))
    loras = [find_lora(path, files.dit.config) for path, _ in a.lora]
    made = plan_memory(
        {"dit": files.dit, "encoder": files.encoder, "vae": files.vae},
        job,
        dtype,
        free=free,
        ram=memory.available_ram(),
        placement=a.kv_device,
        codec=a.kv_storage,
        fp8=fp8,
        lays_out=a.prefix_cache == "on",
        fused=free is not None,
        beside=sum(lora.checkpoint.nbytes for lora in loras),
    )
    outputs.check_size(a.out, decided.size)
    told = [*outputs.lost(a.out), *decided.warnings, *(line for lora in loras for line in lora.warnings)]
    gpu = free is not None
    told += without_effect(a.kv_device, gpu)
    if a.cuda_graph:
        told += graph.without_effect(gpu, decided.schedule.steps, a.prefix_cache == "on", a.attention)
    return made, tuple(told)


@dataclass(frozen=True)
class Unread:
    """A picture of which the header alone was read."""

    size: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> Unread:
        return cls(picture_size(path))


def _free_bytes(a: argparse.Namespace) -> int | None:
    """Free memory of the GPU that is asked about; None where the CPU is to compute."""
    if a.free is not None and not 0 < a.free < 2**20:
        raise UserError(f"--free is {a.free:g}, expected the GiB that a device has free, such as 24")
    if a.device == "cpu" or (a.device == "auto" and a.free is None and not torch.cuda.is_available()):
        if a.free is not None:
            raise UserError("--free asks about a GPU's memory, but --device is cpu; leave one of them out")
        return None
    if a.free is not None:
        return int(a.free * GIB)
    return torch.cuda.mem_get_info(outputs.pick_device(a.device))[0]


def picture_size(path: Path) -> tuple[int, int]:
    """(width, height) of a picture as `images.open_image` opens it, from its header. `UserError` as there."""
    try:
        if not path.is_file():
            raise FileNotFoundError
        Image.init()  # or a format that this Pillow was built without would be a KeyError
        with Image.open(path, formats=[name for name in images.FORMATS if name in Image.OPEN]) as image:
            sideways = image.getexif().get(ORIENTATION) in SIDEWAYS
            return (image.height, image.width) if sideways else image.size
    except Exception:  # decoders raise nearly anything; opening it says in words what is wrong, or that nothing is
        return images.open_image(path).size
