"""The command `plan`, and the checks of `generate` before it starts: memory plans from headers and sizes alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import torch

from ..checkpoint.fp8_policy import Fp8
from ..checkpoint.load import ModelFiles, check_keep
from ..checkpoint.quant_formats import name_of
from ..config.networks import LATENT_PIXELS
from ..errors import UserError
from ..inputs import images
from ..inputs.prompt import layout_tokens
from ..inputs.references import reference_size
from ..inputs.tokenizer import load_tokenizer
from ..lora.read import find_lora
from ..memory import estimate
from ..memory.choose import Misfit
from ..memory.plan import MemoryJob, MemoryPlan, plan_memory
from ..memory.show import draw, plan_report
from ..networks import dtypes, free_bytes, pick_device, require_prefill
from ..ops.attention_backends import require_attention as check_attention
from ..prefix.placement import ineffective_flags
from ..request import Request, ResolvedRequest, decide
from ..sampling import cuda_graph
from ..system_memory import GIB
from . import outputs
from .from_arguments import LARGEST_GIB, budget_of, fp8_of, inputs_of, opened_request
from .jobs import naming
from .pictures import Pictures, Unread

NARROWER = {"auto": ("fp8",), "fp32": ("bf16", "fp8"), "bf16": ("fp8",), "fp16": ("fp8",), "fp8": ()}  # to suggest


EXIT_MISFIT = 3


def run(a: argparse.Namespace, files: ModelFiles) -> int:
    """Print the plan, and write its picture if requested. Returns `EXIT_MISFIT` where the run does not fit."""
    inputs = [*inputs_of(a), *files.paths]
    outputs.check_outputs(a.out, a.save_latent, a.batch, inputs)
    outputs.check_outputs(a.picture, None, 1, inputs, (".png",))
    made, warnings = plan_of(a, files)
    for warning in warnings:
        print(f"qwen21: warning: {warning}", file=sys.stderr)
    print(plan_report(made), flush=True)
    if a.picture:
        images.save_png(draw(made), a.picture)
    return 0 if made.choice.fits else EXIT_MISFIT


def plan_of(a: argparse.Namespace, files: ModelFiles) -> tuple[MemoryPlan, tuple[str, ...]]:
    """Plan a run with these arguments; return the plan and the warnings of the run."""
    if a.session is not None or a.repeat != 1:
        raise UserError("a plan is of one run; leave --session and --repeat out, and give one job's flags")
    free = _free_bytes(a)
    gpu = free is not None
    device = torch.device("cuda" if gpu else "cpu")
    check_attention(a.attention, dtypes(a.dtype, device)[0], device)
    require_prefill(a.prefill, a.compile)
    planner = Planner(a, files, free)
    decided = decide(opened_request(a, Unread.of), files, planner.distilled)
    files.check(encodes=decided.request.encodes, reads=bool(decided.request.references))
    job = planner.job(a, decided)
    dtype, told = planner.dtype([job])
    made = planner.plan(job, dtype)
    outputs.check_size(a.out, decided.size)
    lines = [*outputs.lost(a.out), *decided.warnings, *(line for lora in planner.loras for line in lora.warnings)]
    lines += ineffective_flags(a.kv_device, gpu)
    if a.cuda_graph:
        lines += cuda_graph.ineffective_flags(gpu, decided.schedule.steps, a.prefix_cache == "on", a.attention)
    lines += [told] if told else []
    if not made.choice.fits and (other := planner.fitting(job)):
        lines.append(f"this run does not fit; --dtype {other} would")
    return made, tuple(lines)


def settle(
    a: argparse.Namespace, jobs: Sequence[argparse.Namespace], files: ModelFiles, first: Request, pictures: Pictures
) -> tuple[torch.dtype, str]:
    """Refuse any job that is invalid or does not fit, by headers alone, before the first is painted.

    Returns the dtype to compute in, and a line where memory decided it. `first` is the first job's request.
    """
    planner = Planner(a, files, free_bytes(pick_device(a.device)))
    decided = []
    for number, job in enumerate(jobs, 1):
        with naming(number, jobs):
            outputs.check_outputs(job.out, job.save_latent, 1, files.paths)
            request = opened_request(job, pictures.look) if number > 1 else first
            decided.append(decide(request, files, planner.distilled))
            outputs.check_size(job.out, decided[-1].size)
    requests = [plan.request for plan in decided]
    files.check(encodes=any(r.encodes for r in requests), reads=any(r.references for r in requests))
    numbers: dict[MemoryJob, int] = {}
    for number, (job, plan) in enumerate(zip(jobs, decided, strict=True), 1):
        with naming(number, jobs):
            numbers.setdefault(planner.job(job, plan), number)
    dtype, told = planner.dtype(numbers)
    for job, number in numbers.items():
        with naming(number, jobs):
            if not a.force:
                planner.require(job, dtype)
    return dtype, told


class Planner:
    """Makes memory plans of the jobs of one process: `a` holds the flags that they share, `files` the model's headers.

    `free`: free bytes of the GPU that computes, None where the CPU does.
    """

    def __init__(self, a: argparse.Namespace, files: ModelFiles, free: int | None) -> None:
        self.a = a
        self.files = files
        self.free = free
        self.ram = estimate.available_ram()
        self.device = torch.device("cpu" if free is None else "cuda")
        self.fp8 = fp8_of(a)
        if self.fp8:
            check_keep(self.fp8, (files.dit, files.encoder))
        self.loras = [find_lora(path, files.dit.config) for path, _ in a.lora]
        strengths = [strength for _, strength in a.lora]
        active = [lora.distilled for lora, strength in zip(self.loras, strengths, strict=True) if strength]
        self.distilled = [each for each in active if each]
        self.tokenizer = load_tokenizer(files.tokenizer)

    def job(self, a: argparse.Namespace, decided: ResolvedRequest) -> MemoryJob:
        """Describe a job in numbers, by its own flags `a` and the resolved request `decided`."""
        references = [
            reference_size(*picture.size, decided.request.resolution) for picture in decided.request.references
        ]
        grids = [(1, height // LATENT_PIXELS, width // LATENT_PIXELS) for width, height in references]
        prompts = [a.prompt or "", *([a.negative] if decided.guided else [])]
        return MemoryJob.of(
            [layout_tokens(prompt, self.tokenizer, grids) for prompt in prompts],
            references,
            decided.size,
            a.batch,
            start=a.init_image is not None,
            shared=a.prefix_cache == "on",
        )

    def plan(self, job: MemoryJob, dtype: torch.dtype, fp8: Fp8 | None = None) -> MemoryPlan:
        """Plan a job computed in `dtype`; `fp8` replaces the FP8 storage of the flags."""
        return plan_memory(
            {"dit": self.files.dit, "encoder": self.files.encoder, "vae": self.files.vae},
            job,
            dtype,
            free=self.free,
            ram=self.ram,
            placement=self.a.kv_device,
            codec=self.a.kv_storage,
            fp8=fp8 or self.fp8,
            lays_out=job.shared,
            fused=self.free is not None,
            beside=sum(lora.checkpoint.nbytes for lora in self.loras),
            budget=budget_of(self.a),
        )

    def dtype(self, jobs: Iterable[MemoryJob]) -> tuple[torch.dtype, str]:
        """The first of the requested dtypes in which all jobs fit, else the last; and a line if it is not the first."""
        first, *others = dtypes(self.a.dtype, self.device)
        if not others or (misfit := self._misfit(jobs, first)) is None:
            return first, ""
        return others[-1], f"computed in {name_of(others[-1])}, for in {name_of(first)} {misfit.fact}"

    def require(self, job: MemoryJob, dtype: torch.dtype) -> None:
        """Raise `UserError` for a job that does not fit; it names a dtype that would."""
        if (misfit := self._misfit([job], dtype)) is None:
            return
        other = self.fitting(job)
        remedy = f"take --dtype {other}, which fits" if other else misfit.remedy.rstrip(",")
        raise UserError(f"does not fit: computed in {name_of(dtype)}, {misfit.fact}; {remedy}, or try with --force")

    def fitting(self, job: MemoryJob) -> str | None:
        """Name of the widest dtype below the requested one in which a job fits; None if it fits in none."""
        for name in NARROWER[self.a.dtype]:
            fp8 = Fp8(tuple(self.a.keep)) if name == "fp8" else None
            if any(self._misfit([job], dtype, fp8) is None for dtype in dtypes(name, self.device)):
                return name
        return None

    def _misfit(self, jobs: Iterable[MemoryJob], dtype: torch.dtype, fp8: Fp8 | None = None) -> Misfit | None:
        """The first thing that does not fit; None if all fits."""
        found = (misfit for job in jobs for misfit in self.plan(job, dtype, fp8).choice.misfits)
        return next(found, None)


def _free_bytes(a: argparse.Namespace) -> int | None:
    """Free bytes of the GPU in question; None where the CPU is to compute."""
    if a.free is not None and not 0 < a.free < LARGEST_GIB:
        raise UserError(f"--free is {a.free:g}, expected the GiB that a device has free, such as 24")
    if a.device == "cpu" or (a.device == "auto" and a.free is None and not torch.cuda.is_available()):
        if a.free is not None:
            raise UserError("--free asks about a GPU's memory, but --device is cpu; leave one of them out")
        return None
    if a.free is not None:
        return int(a.free * GIB)
    return free_bytes(pick_device(a.device))
