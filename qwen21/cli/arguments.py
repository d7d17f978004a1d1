"""Define the flags of the command line, and read their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choices import ATTENTIONS, CANVASES, EDIT_NOISES, GGUF_TYPES, KV_DEVICES, KV_STORAGES, PREFILLS, SCHEDULES
from ..config.networks import MAX_REFERENCES
from ..errors import UserError

if TYPE_CHECKING:
    pass


def add_generate(p: argparse.ArgumentParser) -> None:
    """Add the flags of `generate` to the parser `p`."""
    model = p.add_argument_group("model")
    model.add_argument(
        "--model", metavar="FOLDER", type=Path, help="a whole-model diffusers folder, or qwen21-mini, the bundled one"
    )
    model.add_argument(
        "--dit",
        metavar="FILE",
        type=Path,
        help="transformer: single file or component folder; this and the next two are in place of --model's part, or "
        "without a --model; qwen21-mini is its own",
    )
    model.add_argument("--encoder", metavar="FILE", type=Path, help="text encoder: single file or component folder")
    model.add_argument(
        "--mmproj",
        metavar="FILE.gguf",
        type=Path,
        help="vision tower of an encoder in GGUF, where it does not lie beside the encoder; references need it",
    )
    model.add_argument("--vae", metavar="FILE", type=Path, help="VAE: single file or component folder")
    model.add_argument(
        "--tokenizer", metavar="DIR", type=Path, help="tokenizer folder, where none lies with the encoder"
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16", "fp8"),
        default="auto",
        help="auto: bf16 on CUDA, else fp32, or bf16 where that does not fit in RAM; fp8: as auto, with the blocks' "
        "weights in fp8",
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    model.add_argument("--force", action="store_true", help="run what the memory plan says does not fit")
    model.add_argument(
        "--lora",
        metavar="F[:strength]",
        type=_lora,
        nargs="+",
        action="extend",
        default=[],
        help="LoRAs beside the transformer's weights, each at its strength (1)",
    )
    _add_keep(model)
    model.add_argument(
        "--compile",
        action="store_true",
        help="compile what lies between the transformer's matrix products, on a CPU its attention too: seconds once, "
        "then faster steps; needs a C++ compiler, for a GPU Triton",
    )
    model.add_argument(
        "--cuda-graph",
        action="store_true",
        help="on a GPU: record a step and replay it, where launching its kernels takes longer than running them, as "
        "with small pictures; from 12 steps on",
    )

    picture = p.add_argument_group("picture")
    picture.add_argument("--prompt", metavar="P", help="what to paint or to change")
    picture.add_argument("--negative", metavar="P", help="negative prompt; needs --cfg above 1")
    picture.add_argument(
        "--image",
        metavar="F",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        help=f"references, up to {MAX_REFERENCES}, in order; the prompt may call them <image1>, <image2>, ...",
    )
    picture.add_argument(
        "--size", metavar="WxH", type=_option("size"), help="output size in pixels, rounded down to multiples of 32"
    )
    picture.add_argument(
        "--resolution",
        metavar="R",
        type=int,
        help="references and default output have about R x R pixels, 0: each reference keeps its own size, on the "
        "grid of 32; default 1024, for the miniature 96",
    )
    picture.add_argument("--canvas", choices=CANVASES, default="last", help="which reference the output size follows")
    picture.add_argument("--batch", metavar="N", type=int, default=1, help="pictures per run")
    picture.add_argument(
        "--init-image",
        metavar="F",
        type=Path,
        help="start from this picture instead of pure noise, in its shape unless --size or --image give another",
    )
    picture.add_argument(
        "--mask",
        metavar="F",
        type=Path,
        help="white where --init-image may change, black where every pixel stays; grey blends",
    )
    picture.add_argument(
        "--denoise", metavar="D", type=float, default=1.0, help="how much of --init-image is redone, above 0 to 1"
    )

    sampling = p.add_argument_group("sampling")
    sampling.add_argument("--seed", metavar="N", type=int, default=0)
    sampling.add_argument("--steps", metavar="N", type=int, help="default 40; Turbo always runs 8")
    sampling.add_argument("--schedule", choices=SCHEDULES, default="auto", help="auto: Turbo for Turbo checkpoints")
    sampling.add_argument(
        "--sigmas",
        metavar="S,S,...",
        type=_option("sigmas"),
        help="a grid of your own, strictly falling within 1 and 0, taken as it is; end it with 0",
    )
    sampling.add_argument(
        "--shift",
        metavar="MU|dynamic",
        type=_option("shift"),
        help="shift --sigmas: by e^MU, or as the released schedule does at this size, but without its terminal sigma",
    )
    sampling.add_argument("--cfg", metavar="C", type=float, default=1.0, help="guides above 1, which needs --negative")
    sampling.add_argument(
        "--cfg-range",
        metavar="A:B:CFG",
        type=_option("cfg_range"),
        nargs="+",
        action="extend",
        default=[],
        help="another CFG for steps A to B, counted from 1",
    )
    sampling.add_argument(
        "--edit-noise",
        choices=EDIT_NOISES,
        default="decorrelated",
        help="noise of edits: from a moved seed, or the released pipeline's",
    )
    sampling.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="auto",
        help="auto: the fastest exact kernel of the GPU, by a measurement; sage is faster and not exact; "
        "compiled: for fp32 on a CPU, by a C++ compiler, which auto counts with --compile",
    )
    sampling.add_argument(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="off computes the prefix again at every step, to check",
    )
    sampling.add_argument(
        "--prefill",
        choices=PREFILLS,
        default="segments",
        help="flex: the whole prefix in one pass of FlexAttention, with --compile alone; takes the memory of all its "
        "tokens at once, which plan does not count",
    )
    sampling.add_argument(
        "--kv-storage",
        choices=KV_STORAGES,
        default="auto",
        help="how the prefix is kept: native is exact, int8 takes half and loses least; auto: native while it fits",
    )
    sampling.add_argument("--kv-device", choices=KV_DEVICES, default="auto", help="where the prefix is kept")
    sampling.add_argument(
        "--kv-budget",
        metavar="GIB",
        type=float,
        help="how much prefixes may keep between the runs of one process, 0 for nothing; default a quarter of the RAM",
    )

    output = p.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="FILE.png",
        type=Path,
        help="a .png, lossless .webp, or .jpg over white; with --batch N or --repeat N: FILE-1.png to FILE-N.png",
    )
    output.add_argument("--save-latent", metavar="FILE.safetensors", type=Path)
    output.add_argument("--repeat", metavar="N", type=int, default=1, help="N runs, the seed one higher each time")
    output.add_argument(
        "--session",
        metavar="JOBS.json",
        type=Path,
        help='jobs for one process: a list of tables such as {"prompt": "a cat", "out": "cat.png"}',
    )


def add_plan(p: argparse.ArgumentParser) -> None:
    """Add the flags of `plan` to the parser `p`: those of `generate`, whose plan it shows, and a few more."""
    add_generate(p)
    plan = p.add_argument_group("plan")
    plan.add_argument(
        "--free", metavar="GIB", type=float, help="plan for a GPU with so much memory free, default: this machine"
    )
    plan.add_argument("--picture", metavar="FILE.png", type=Path, help="write the plan as a picture too")


def _add_keep(p: argparse._ActionsContainer) -> None:
    p.add_argument(
        "--keep",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        default=[],
        help="layers that --dtype fp8 leaves alone, such as img_mlp, blocks.3.attn, to_?",
    )


def add_convert(p: argparse.ArgumentParser) -> None:
    """Add the flags of `convert` to the parser `p`."""
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--dit", metavar="F", type=Path, help="transformer: single file or component folder")
    source.add_argument("--encoder", metavar="F", type=Path, help="text encoder: single file or component folder")
    kinds = ("fp8", *(kind.lower() for kind in GGUF_TYPES))
    p.add_argument(
        "--dtype", choices=kinds, required=True, help="what the blocks' weights become; all but fp8 are GGUF"
    )
    p.add_argument(
        "--scales",
        choices=("tensor", "row"),
        default="tensor",
        help="tensor: what ComfyUI's own loaders read; row: what --dtype fp8 makes, for this pack alone",
    )
    _add_keep(p)
    p.add_argument("--out", metavar="FILE", type=Path, required=True, help="a .safetensors file for fp8, else .gguf")


def add_run(p: argparse.ArgumentParser) -> None:
    """Add the flags of `run` to the parser `p`."""
    p.add_argument("file", metavar="FILE", type=Path, help="workflow in API format: in ComfyUI, File > Export (API)")
    p.add_argument("--server", metavar="URL", default="http://127.0.0.1:8188", help="default %(default)s")
    several = {"nargs": "+", "action": "extend", "default": []}
    node = "NODE is a node's id, class or title"
    p.add_argument("--set", metavar="NODE.INPUT=VALUE", **several, help=f"{node}; VALUE is JSON, or else a string")
    picture = "upload a picture into an input; NODE alone means its input `image`, which LoadImage has"
    p.add_argument("--image", metavar="NODE.INPUT=FILE", **several, help=picture)
    p.add_argument("--out", metavar="DIR", type=Path, default=Path("."), help="folder for the outputs, default here")
    p.add_argument("--verbose", action="store_true", help="show the texts of nodes, and tracebacks, on stderr")


def _option(name: str) -> Callable[[str], Any]:
    """Reads the text of a flag as `Request.from_dict` reads the option of that name."""

    def read(text: str) -> Any:
        from ..request.options import read_cfg_range, read_option

        try:
            return read_cfg_range(text) if name == "cfg_range" else read_option(name, text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _lora(text: str) -> tuple[Path, float]:
    """Split FILE:STRENGTH. No number follows the colon of a Windows drive, so it stays part of the path."""
    from ..lora.apply import LARGEST_STRENGTH

    path, _, end = text.rpartition(":")
    if not path:
        return Path(text), 1.0
    try:
        strength = float(end)
    except ValueError:
        if path.lower().endswith(".safetensors"):
            raise argparse.ArgumentTypeError(f"{end!r} is no strength, expected F:0.8 or a file alone") from None
        return Path(text), 1.0
    if not abs(strength) <= LARGEST_STRENGTH:
        limits = f"-{LARGEST_STRENGTH:g} to {LARGEST_STRENGTH:g}"
        raise argparse.ArgumentTypeError(f"{text!r} has strength {strength:g}, expected {limits}")
    return Path(path), strength
