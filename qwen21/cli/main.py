"""The command line, one function per command. A user's mistake gives one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from .. import mini
from ..choices import COMPONENT_FOLDERS
from ..errors import UserError
from . import arguments, from_arguments

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
LONGEST_LINE = 700
SAME_INTERRUPT = 1.0  # seconds; another Ctrl-C within this time counts as the same one


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Report unknown arguments as an error of the command at hand, which names that command's help."""
        found, strange = super().parse_known_args(args, namespace)
        if strange:
            words = "" if strange[0].startswith("-") else "; put a value of several words in quotes"
            self.error(f"unrecognized arguments: {' '.join(strange)}{words}")
        return found, strange

    def error(self, message: str) -> NoReturn:
        flag = re.fullmatch(r"argument (--[\w-]+): expected (one|at least one) argument", message)
        remedy = f"; write a value that begins with a dash as {flag[1]}=-VALUE" if flag else ""
        raise UserError(f"{message}{remedy}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code. Nothing that a user can cause ends in a traceback."""
    interrupted: list[float] = []
    chosen = argparse.Namespace()
    try:
        with _interruptible(interrupted):
            chosen = build_parser().parse_args(argv)
            return chosen.run(chosen)
    except (KeyboardInterrupt, Exception) as error:
        if interrupted or isinstance(error, KeyboardInterrupt):
            done = getattr(chosen, "done", 0)
            kept = f"the files of {done} finished job{'s' * (done > 1)} stay" if done else "nothing was written"
            return _end(f"interrupted, {kept}", EXIT_INTERRUPTED)
        message = _explain(error)
        if message is None:
            raise
        return _end(message, EXIT_USER_ERROR)


@contextmanager
def _interruptible(interrupted: list[float]) -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt and note the time: libraries may swallow the exception or replace it."""

    def stop(*_: object) -> None:
        if interrupted and time.monotonic() - interrupted[-1] < SAME_INTERRUPT:
            return  # let the cleanup finish
        interrupted.append(time.monotonic())
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _explain(error: Exception) -> str | None:
    """Describe an error that the user can fix; None for a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it stays open), or the interpreter complains once more when it ends
        return "nobody reads the output any more"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}; check the path, its permissions and the disk"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _is_out_of_memory(error)):
        return "out of memory; choose a smaller --size, --resolution or --batch, fewer references, or --dtype bf16"
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    from ..models.vae_tiling import is_out_of_memory

    return is_out_of_memory(error)


def _end(message: str, code: int) -> int:
    """Print a message as one line, whatever paths and names it contains, and return `code`."""
    line = " ".join(message.split())
    print("qwen21: " + (line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + " ..."), file=sys.stderr)
    return code


def build_parser() -> Parser:
    parser = Parser(prog="python -m qwen21", description="Qwen-Image 2.1 without ComfyUI.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="paint a picture, or edit some", allow_abbrev=False)
    arguments.add_generate(generate)
    generate.set_defaults(run=run_generate)
    plan = commands.add_parser("plan", help="the memory that a generate would need", allow_abbrev=False)
    arguments.add_plan(plan)
    plan.set_defaults(run=run_plan)
    run = commands.add_parser("run", help="run a workflow in API format on a running ComfyUI", allow_abbrev=False)
    arguments.add_run(run)
    run.set_defaults(run=run_workflow)
    inspect = commands.add_parser("inspect", help="say what a checkpoint file or folder is", allow_abbrev=False)
    inspect.add_argument("path", metavar="FILE|FOLDER", type=Path)
    inspect.set_defaults(run=run_inspect)
    convert = commands.add_parser("convert", help="write a transformer or encoder as fp8", allow_abbrev=False)
    arguments.add_convert(convert)
    convert.set_defaults(run=run_convert)
    demo = commands.add_parser("demo", help="six prompts and four edits on the bundled miniature", allow_abbrev=False)
    demo.add_argument("--out", metavar="DIR", type=Path, default=Path("demo_out"), help="folder for the pictures")
    demo.set_defaults(run=run_demo)
    return parser


def run_generate(a: argparse.Namespace) -> int:
    from ..lora.read import read_lora
    from ..memory.estimate import store_budget
    from ..networks import fit_together, pick_device, require_prefill
    from ..ops.attention_backends import require_attention as check_attention
    from ..ops.pointwise import CompiledKernels
    from ..pipeline import Pipeline, Watch
    from ..prefix import Store
    from . import jobs as session
    from . import outputs
    from .pictures import Pictures
    from .plan import settle

    jobs = session.expand(a, lambda words: build_parser().parse_args(["generate", *words]))
    inputs = [path for job in jobs for path in from_arguments.inputs_of(job)]
    for number, job in enumerate(jobs, 1):
        with session.naming(number, jobs):
            outputs.check_outputs(job.out, job.save_latent, job.batch, inputs)
    device = pick_device(a.device)
    pictures = Pictures(jobs)
    with session.naming(1, jobs):
        first = from_arguments.opened_request(jobs[0], pictures.open)
    files = find_model(a)
    dtype, told = settle(a, jobs, files, first, pictures)
    fp8, budget = from_arguments.fp8_of(a), from_arguments.budget_of(a)
    loras = tuple((read_lora(path, files.dit.config), strength) for path, strength in a.lora)
    check_attention(a.attention, dtype, device)
    require_prefill(a.prefill, a.compile)
    pipeline = Pipeline(
        files,
        dtype,
        device,
        a.kv_device,
        a.kv_storage,
        keep_loaded=len(jobs) > 1 and fit_together(files, dtype, device, fp8),
        loras=loras,
        fp8=fp8,
        kernels=CompiledKernels() if a.compile else None,
        attention=a.attention,
        prefill=a.prefill,
        cuda_graph=a.cuda_graph,
        notes=(told,) if told else (),
        store=Store(store_budget() if budget is None else budget),
    )
    for number, job in enumerate(jobs, 1):
        a.done = number - 1
        with session.naming(number, jobs, written=True):
            request = first if number == 1 else from_arguments.opened_request(job, pictures.open)
            with ProgressBar() as bar:
                for line in outputs.lost(job.out):
                    bar.warn(line)
                result = pipeline.generate(request, Watch(on_step=bar.step, on_stage=bar.stage, on_warning=bar.warn))
            outputs.write({job.out: result}, job.save_latent)
        if number == 1 and a.compile:
            print(f"qwen21: compiled in {pipeline.kernels.seconds:.1f} s", file=sys.stderr)
        if len(jobs) > 1:
            reuse = "; negative prefix ".join(str(prefix.reuse) for prefix in result.prefixes)
            print(f"qwen21: {number} of {len(jobs)}, {job.out.name}: prefix {reuse}", file=sys.stderr)
    return 0


def find_model(a: argparse.Namespace):
    """Find the model's files: those of --model, except the parts that --dit, --encoder and --vae replace."""
    from ..checkpoint.load import Places
    from ..checkpoint.load import find_model as find

    given = {slot: getattr(a, slot) for slot in COMPONENT_FOLDERS}
    missing = [f"--{slot}" for slot, path in given.items() if path is None]
    if a.model is None and missing:
        raise UserError(
            f"no model: give --model FOLDER, or --dit, --encoder and --vae ({', '.join(missing)} not given)"
        )
    parts = {slot: mini.located(path, slot) for slot, path in given.items() if path is not None}
    folder, tokenizer = (path and mini.located(path) for path in (a.model, a.tokenizer))
    return find(Places(folder, tokenizer=tokenizer, mmproj=a.mmproj, **parts))


class ProgressBar:
    """Show stages and steps on one line of stderr: live on a terminal, once at the end elsewhere. A context manager."""

    WIDTH = 24

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._length = 0
        self._last = ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Clear the line. Without a terminal, print the last state, unless an error's line follows."""
        if self._terminal:
            self._show("")
            print("\r", end="", file=sys.stderr, flush=True)
        elif self._last and kind is None:
            print(self._last, file=sys.stderr, flush=True)

    def stage(self, name: str) -> None:
        self._started = time.monotonic()
        self._show(name)

    def step(self, done: int, steps: int, _latent: object) -> None:
        filled = self.WIDTH * done // steps
        rate = (time.monotonic() - self._started) / done
        self._last = f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {done}/{steps}  {rate:.2f} s/step"
        self._show(self._last)

    def warn(self, warning: str) -> None:
        self._show("")
        print(("\r" if self._terminal else "") + f"qwen21: warning: {warning}", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        if self._terminal:
            print("\r" + text.ljust(self._length), end="", file=sys.stderr, flush=True)
            self._length = len(text)


def run_workflow(a: argparse.Namespace) -> int:
    from ..clients.comfyui.run import WorkflowJob, run

    return run(WorkflowJob(a.file, a.server, tuple(a.set), tuple(a.image), a.out, a.verbose), ProgressBar)


def run_plan(a: argparse.Namespace) -> int:
    from .plan import run

    return run(a, find_model(a))


def run_inspect(a: argparse.Namespace) -> int:
    from .inspect import inspect_report

    print(inspect_report(mini.located(a.path)), flush=True)
    return 0


def run_convert(a: argparse.Namespace) -> int:
    slot, path = ("dit", a.dit) if a.dit else ("encoder", a.encoder)
    path = mini.located(path, slot)
    if a.dtype == "fp8":
        from ..checkpoint.convert import convert

        print(convert(slot, path, from_arguments.fp8_of(a), a.out, a.scales), flush=True)
    else:
        from ..checkpoint.convert_gguf import convert_to_gguf

        from_arguments.fp8_of(a)  # refuses --keep
        print(convert_to_gguf(slot, path, a.dtype.upper(), a.out), flush=True)
    return 0


def run_demo(a: argparse.Namespace) -> int:
    from .demo import NOTE, run

    try:
        a.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{a.out}: cannot be made ({error.strerror}); choose another folder with --out") from error
    for path in run(a.out, ProgressBar):
        print(path)
    print(NOTE)
    return 0
