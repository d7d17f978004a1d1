"""The command line: generate, run, inspect, demo. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .config import MAX_REFERENCES
from .errors import UserError
from .options import CANVASES, EDIT_NOISES, SCHEDULES

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
LATER = {
    "kv_storage": lambda value: value != "native",
    "dtype": lambda value: value == "fp8",
    "lora": bool,
    "keep": bool,
    "repeat": lambda value: value != 1,
    "session": bool,
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    try:
        arguments = build_parser().parse_args(argv)
        return arguments.run(arguments)
    except UserError as error:
        print(f"qwen21: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("qwen21: interrupted, nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> Parser:
    parser = Parser(prog="python -m qwen21", description="Qwen-Image 2.1 without ComfyUI.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="paint a picture, or edit some", allow_abbrev=False))
    run_help = "run a workflow in API format on a running ComfyUI"
    _add_run(commands.add_parser("run", help=run_help, allow_abbrev=False))
    inspect = commands.add_parser("inspect", help="say what a checkpoint file or folder is", allow_abbrev=False)
    inspect.add_argument("path", metavar="FILE|FOLDER", type=Path)
    inspect.set_defaults(run=run_inspect)
    demo = commands.add_parser("demo", help="text to image and an edit on an embedded tiny model", allow_abbrev=False)
    demo.add_argument("--out", metavar="DIR", type=Path, default=Path("demo_out"), help="folder for the pictures")
    demo.set_defaults(run=run_demo)
    return parser


def _add_generate(p: argparse.ArgumentParser) -> None:
    p.set_defaults(run=run_generate)
    model = p.add_argument_group("model")
    model.add_argument("--model", metavar="FOLDER", type=Path, help="a whole-model diffusers folder")
    model.add_argument("--dit", metavar="FILE", type=Path, help="transformer: single file or component folder")
    model.add_argument("--encoder", metavar="FILE", type=Path, help="text encoder: single file or component folder")
    model.add_argument("--vae", metavar="FILE", type=Path, help="VAE: single file or component folder")
    model.add_argument("--tokenizer", metavar="DIR", type=Path, help="tokenizer folder; single files need it")
    model.add_argument(
        "--dtype", choices=("auto", "fp32", "bf16", "fp16", "fp8"), default="auto", help="auto: bf16 on CUDA, else fp32"
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    model.add_argument("--lora", metavar="F[:strength]", nargs="+", action="extend", default=[], help="not yet")
    model.add_argument("--keep", metavar="PATTERN", nargs="+", action="extend", default=[], help="not yet")

    picture = p.add_argument_group("picture")
    picture.add_argument("--prompt", metavar="P", required=True)
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
        "--size", metavar="WxH", type=_size, help="output size in pixels, rounded down to multiples of 32"
    )
    picture.add_argument(
        "--resolution",
        metavar="R",
        type=int,
        default=1024,
        help="references and default output have about R x R pixels",
    )
    picture.add_argument("--canvas", choices=CANVASES, default="last", help="which reference the output size follows")
    picture.add_argument("--batch", metavar="N", type=int, default=1, help="pictures per run")
    picture.add_argument("--init-image", metavar="F", type=Path, help="start from this picture instead of pure noise")
    picture.add_argument(
        "--mask", metavar="F", type=Path, help="white where --init-image may change, black where it stays"
    )
    picture.add_argument(
        "--denoise", metavar="D", type=float, default=1.0, help="how much of --init-image is redone, above 0 to 1"
    )

    sampling = p.add_argument_group("sampling")
    sampling.add_argument("--seed", metavar="N", type=int, default=0)
    sampling.add_argument("--steps", metavar="N", type=int, help="default 40; Turbo always runs 8")
    sampling.add_argument("--schedule", choices=SCHEDULES, default="auto", help="auto: Turbo for Turbo checkpoints")
    sampling.add_argument(
        "--sigmas", metavar="S,S,...", type=_sigmas, help="a grid of your own, strictly falling within 1 and 0"
    )
    sampling.add_argument(
        "--cfg", metavar="C", type=float, default=1.0, help="guides above 1, and only with --negative"
    )
    sampling.add_argument(
        "--cfg-range",
        metavar="A:B:CFG",
        type=_cfg_range,
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
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="off computes the prefix again at every step, to check",
    )
    sampling.add_argument(
        "--kv-storage", choices=("native", "fp8", "fp8_v", "int8"), default="native", help="only native yet"
    )
    sampling.add_argument(
        "--kv-device", choices=("auto", "gpu", "cpu"), default="auto", help="where the prefix is kept"
    )

    output = p.add_argument_group("output")
    output.add_argument(
        "--out", metavar="FILE.png", type=Path, required=True, help="with --batch N: FILE-1.png to FILE-N.png"
    )
    output.add_argument("--save-latent", metavar="FILE.safetensors", type=Path)
    output.add_argument("--repeat", metavar="N", type=int, default=1, help="not yet")
    output.add_argument("--session", metavar="JOBS.json", type=Path, help="not yet")


def _add_run(p: argparse.ArgumentParser) -> None:
    p.set_defaults(run=run_workflow)
    p.add_argument("file", metavar="FILE", type=Path, help="workflow in API format: in ComfyUI, File > Export (API)")
    p.add_argument("--server", metavar="URL", default="http://127.0.0.1:8188", help="default %(default)s")
    several = {"nargs": "+", "action": "extend", "default": []}
    node = "NODE is a node's id, class or title"
    p.add_argument("--set", metavar="NODE.INPUT=VALUE", **several, help=f"{node}; VALUE is JSON, or else a string")
    picture = "upload a picture into an input; NODE alone means its input `image`, which LoadImage has"
    p.add_argument("--image", metavar="NODE.INPUT=FILE", **several, help=picture)
    p.add_argument("--out", metavar="DIR", type=Path, default=Path("."), help="folder for the outputs, default here")
    p.add_argument("--verbose", action="store_true", help="show the texts of nodes, and tracebacks, on stderr")


def _size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected WIDTHxHEIGHT such as 1024x768") from None
    return width, height


def _sigmas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sigmas, expected such as 1,0.7,0.3,0") from None


def _cfg_range(text: str):
    from .sampler import GuidanceRange

    try:
        first, last, cfg = text.split(":")
        return GuidanceRange(int(first), int(last), float(cfg))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no CFG range, expected A:B:CFG such as 1:10:4.0") from None


def run_generate(a: argparse.Namespace) -> int:
    _refuse_later(a)
    _check_outputs(a)
    from . import outputs
    from .images import open_image
    from .pipeline import Pipeline, Request, Watch

    request = Request(
        prompts=a.prompt,
        negative=a.negative,
        references=tuple(open_image(path) for path in _at_most_ten(a.image)),
        cfg=a.cfg,
        cfg_ranges=tuple(a.cfg_range),
        steps=a.steps,
        schedule=a.schedule,
        sigmas=a.sigmas,
        seed=a.seed,
        size=a.size,
        resolution=a.resolution,
        canvas=a.canvas,
        batch=a.batch,
        edit_noise=a.edit_noise,
        init_image=open_image(a.init_image) if a.init_image else None,
        mask=open_image(a.mask) if a.mask else None,
        denoise=a.denoise,
        prefix_cache=a.prefix_cache == "on",
    )
    device = outputs.pick_device(a.device)
    pipeline = Pipeline(find_model(a), outputs.pick_dtype(a.dtype, device), device, a.kv_device)
    with ProgressBar() as bar:
        result = pipeline.generate(request, Watch(on_step=bar.step, on_stage=bar.stage))
    for warning in result.manifest["warnings"]:
        print(f"qwen21: warning: {warning}", file=sys.stderr)
    outputs.write(result, outputs.names(a.out, len(result.images)), a.save_latent)
    return 0


def find_model(a: argparse.Namespace):
    """The model's files from --model, or from --dit, --encoder and --vae."""
    from .checkpoint.load import find_files, find_folder

    parts = {"--dit": a.dit, "--encoder": a.encoder, "--vae": a.vae}
    given = [name for name, value in parts.items() if value is not None]
    if a.model is not None:
        if given:
            raise UserError(f"got --model and {', '.join(given)}; give a whole folder or single parts, not both")
        return find_folder(a.model, a.tokenizer)
    if len(given) < len(parts):
        missing = ", ".join(name for name in parts if name not in given)
        raise UserError(f"no model: give --model FOLDER, or --dit, --encoder and --vae ({missing} not given)")
    return find_files(a.dit, a.encoder, a.vae, a.tokenizer)


def _at_most_ten(paths: list[Path]) -> list[Path]:
    if len(paths) > MAX_REFERENCES:
        raise UserError(f"got {len(paths)} references, at most {MAX_REFERENCES} are possible; leave some out")
    return paths


def _refuse_later(a: argparse.Namespace) -> None:
    for name, asked in LATER.items():
        value = getattr(a, name)
        if asked(value):
            shown = f" {value}" if isinstance(value, str) else ""
            raise UserError(f"--{name.replace('_', '-')}{shown} does not work yet; leave it out")


def _check_outputs(a: argparse.Namespace) -> None:
    """Refuse an output path that cannot be written before any work is done."""
    for path, suffix in ((a.out, ".png"), (a.save_latent, ".safetensors")):
        if path is None:
            continue
        if path.suffix.lower() != suffix:
            raise UserError(f"{path}: the output's name must end in {suffix}")
        if path.is_dir():
            raise UserError(f"{path}: this is a folder, expected a file name ending in {suffix}")
        if not path.parent.is_dir():
            raise UserError(f"{path.parent}: no such folder; make it first, or write elsewhere")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"{path.parent}: this folder cannot be written to; write elsewhere")


class ProgressBar:
    """Steps on one line of stderr; on a terminal the stages before and after them too. Use it as a context."""

    WIDTH = 24

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._length = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the cursor at the start of an empty line, whatever happened."""
        if self._terminal:
            self._show("")
            self._show("")
        elif self._length:
            print(file=sys.stderr, flush=True)

    def stage(self, name: str) -> None:
        self._started = time.monotonic()
        if self._terminal:
            self._show(name)

    def step(self, done: int, steps: int, _latent: object) -> None:
        filled = self.WIDTH * done // steps
        rate = (time.monotonic() - self._started) / done
        self._show(f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {done}/{steps}  {rate:.2f} s/step")

    def _show(self, text: str) -> None:
        print("\r" + text.ljust(self._length), end="", file=sys.stderr, flush=True)
        self._length = len(text)


def run_workflow(a: argparse.Namespace) -> int:
    from .comfy_client.run import Job, run

    return run(Job(a.file, a.server, tuple(a.set), tuple(a.image), a.out, a.verbose), ProgressBar)


def run_inspect(a: argparse.Namespace) -> int:
    from .checkpoint.report import describe

    print(describe(a.path))
    return 0


def run_demo(a: argparse.Namespace) -> int:
    from .mini.demo import NOTE, run

    try:
        a.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{a.out}: cannot be made ({error.strerror}); choose another folder with --out") from error
    for path in run(a.out, ProgressBar):
        print(path)
    print(NOTE)
    return 0
