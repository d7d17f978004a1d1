"""Run several jobs in one process, where each reuses what earlier ones cached: `--repeat N`, `--session JOBS.json`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.validate import printable, short
from ..errors import UserError

MAX_JOBS = 10_000
# Flags of the whole process, which a single job cannot change.
SHARED = ("model", "dit", "encoder", "vae", "tokenizer", "mmproj", "dtype", "device", "lora", "keep", "kv_storage",
          "kv_device", "kv_budget", "force", "compile", "prefill", "cuda_graph", "attention", "repeat",
          "session")  # fmt: skip

NO_FLAGS = ("command", "run", "free", "picture", "done")  # what else the arguments of a command hold

EXAMPLE = '{"prompt": "a cat", "out": "cat.png"}'

Parse = Callable[[Sequence[str]], argparse.Namespace]


def expand(a: argparse.Namespace, parse: Parse) -> list[argparse.Namespace]:
    """Expand a command line to its jobs, each as the arguments of a `generate` of its own.

    A session's job is a table of flags without leading dashes, whose values replace those of the command line. Each
    repeat adds one to the seed and numbers the outputs. `parse` reads flags as the command line does.
    """
    jobs = [a] if a.session is None else [_merged(a, job, i, parse) for i, job in enumerate(_read(a.session), 1)]
    for i, job in enumerate(jobs, 1):
        for flag in ("prompt", "out"):
            if getattr(job, flag) is None:
                where = "" if a.session is None else f"{a.session}: job {i}: "
                raise UserError(f"{where}--{flag} is missing; see python -m qwen21 generate --help")
    if not 1 <= a.repeat <= MAX_JOBS // len(jobs):
        raise UserError(f"--repeat is {a.repeat}, expected 1 to {MAX_JOBS // len(jobs)}")
    if a.repeat > 1:
        jobs = [_repeated(job, i) for job in jobs for i in range(a.repeat)]
    _require_own_files(jobs)
    return jobs


@contextmanager
def naming(number: int, jobs: Sequence[argparse.Namespace], written: bool = False) -> Iterator[None]:
    """Name the job in the errors of one job of several; with `written`, also say that earlier jobs are written."""
    try:
        yield
    except UserError as error:
        if len(jobs) == 1:
            raise
        kept = f" (the files of the {number - 1} before it stay)" if written and number > 1 else ""
        name = printable(jobs[number - 1].out.name)
        raise UserError(f"job {number} of {len(jobs)}, {name}: {error}{kept}") from error


def _read(path: Path) -> list[Any]:
    try:
        jobs = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); expected a list of jobs") from error
    if not isinstance(jobs, list) or not 1 <= len(jobs) <= MAX_JOBS:
        raise UserError(f"{path}: expected a list of 1 to {MAX_JOBS} jobs, such as [{EXAMPLE}]")
    return jobs


def _merged(a: argparse.Namespace, job: Any, number: int, parse: Parse) -> argparse.Namespace:
    if not isinstance(job, dict):
        raise UserError(f"{a.session}: job {number} is {short(job)}, expected a table such as {EXAMPLE}")
    merged = argparse.Namespace(**vars(a))
    for key, value in job.items():
        name = key.replace("-", "_")
        if name in SHARED:
            raise UserError(f"{a.session}: job {number}: {short(key)} holds for all jobs; leave it to the command line")
        if not hasattr(a, name) or name in NO_FLAGS:
            raise UserError(f"{a.session}: job {number}: there is no flag {short(key)}; see generate --help")
        try:
            setattr(merged, name, _read_value(name, value, parse))
        except UserError as error:
            raise UserError(f"{a.session}: job {number}: {short(key)}: {error}") from error
    return merged


def _read_value(name: str, value: Any, parse: Parse) -> Any:
    """Reads a job's `value` as its flag holds it: null gives the flag's default, [] an empty list."""
    from ..request.options import read_option

    if value is None:
        return getattr(parse([]), name)
    if name in ("out", "save_latent"):
        if not isinstance(value, str):
            raise UserError(f"got {short(value)}, expected a file's name")
        return Path(value)
    if name == "prompt" and isinstance(value, list):
        raise UserError(f"got {short(value)}, expected one value")
    read = read_option(name, value)
    if name == "image":
        return [Path(path) for path in read]
    if name in ("init_image", "mask"):
        return Path(read)
    return ("on" if read else "off") if name == "prefix_cache" else read


def _repeated(job: argparse.Namespace, i: int) -> argparse.Namespace:
    from ..request import SEEDS, require_seed
    from .outputs import numbered

    require_seed(job.seed)  # check the given seed; later ones wrap around at SEEDS
    latent = job.save_latent and numbered(job.save_latent, i + 1)
    changes = {"seed": (job.seed + i) % SEEDS, "out": numbered(job.out, i + 1), "save_latent": latent}
    return argparse.Namespace(**(vars(job) | changes))


def _require_own_files(jobs: Sequence[argparse.Namespace]) -> None:
    from .outputs import names

    taken: dict[str, int] = {}
    for number, job in enumerate(jobs, 1):
        written = dict.fromkeys(names(job.out, job.batch), "an --out")
        if job.save_latent:
            written[job.save_latent] = "a --save-latent"
        for path, flag in written.items():
            other = taken.setdefault(_real(path), number)
            if other != number:
                raise UserError(f"jobs {other} and {number} both write {str(path)!r}; give each {flag} of its own")


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # not a valid file name, which `check_outputs` refuses
        return str(path)
