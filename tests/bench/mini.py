"""How well the bundled miniature paints and edits what was kept from its training, and what each shortcut costs.

    python -m tests.bench.mini                    # 200 captions and 200 edits, every row; about 25 minutes on two cores
    python -m tests.bench.mini --count 40 --rows fp32 int8

Pictures are judged by `qwen21.mini.reader`, not by eye. PSNR is against the first row's pictures, from the same noise.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from qwen21.checkpoint.convert_gguf import convert_to_gguf
from qwen21.checkpoint.fp8_policy import Fp8
from qwen21.checkpoint.load import ModelFiles, find_dit, find_folder
from qwen21.cli.demo import request_of
from qwen21.inputs.images import from_vae_pixels
from qwen21.mini import WEIGHTS
from qwen21.mini.model import RESOLUTION
from qwen21.mini.reader import Verdict, judge
from qwen21.mini.world import EDITS, Task, draw, random_task
from qwen21.models import vae_tiling
from qwen21.pipeline import Pipeline
from qwen21.request import Request
from tests.support.tiny_quant import LAYOUTS, pack, write

TURBO = "turbo"
GROUP = 64  # channels that are rotated together: the miniature's width is no multiple of the usual 256


@dataclass(frozen=True)
class Row:
    """One way to run: how the pipeline is made, and what changes of a request."""

    name: str
    pipeline: Callable[[ModelFiles, Path], Pipeline] = lambda files, folder: Pipeline(files, keep_loaded=True)
    request: Callable[[Request], Request] = lambda request: request
    tile: int | None = None  # latent cells
    again: bool = False  # behind prefixes that a run from another seed has left


def _codec(codec: str) -> Callable[[ModelFiles, Path], Pipeline]:
    return lambda files, folder: Pipeline(files, codec=codec, keep_loaded=True)


def _packed(layout: str) -> Callable[[ModelFiles, Path], Pipeline]:
    """With the transformer's blocks in a layout of `tests/support/tiny_quant.py`."""

    def pipeline(files: ModelFiles, folder: Path) -> Pipeline:
        (source,) = files.dit.checkpoint.files
        tensors = {name: value.float() for name, value in load_file(source).items()}
        packed, metadata, _ = pack(tensors, LAYOUTS[layout], GROUP)
        write(folder / source.name, packed, metadata)
        shutil.copy(source.with_name("config.json"), folder)
        return Pipeline(replace(files, dit=find_dit(folder)), keep_loaded=True)

    return pipeline


def _gguf(kind: str) -> Callable[[ModelFiles, Path], Pipeline]:
    """With the transformer's blocks in blocks of GGUF."""

    def pipeline(files: ModelFiles, folder: Path) -> Pipeline:
        out = folder / f"{kind}.gguf"
        convert_to_gguf("dit", files.dit.checkpoint.path, kind, out)
        return Pipeline(replace(files, dit=find_dit(out)), keep_loaded=True)

    return pipeline


ROWS = (
    Row("fp32"),
    Row("Turbo's sigmas", request=lambda request: replace(request, steps=None, schedule=TURBO)),
    Row("CFG 2", request=lambda request: replace(request, cfg=2.0, negative=" ")),
    Row("K/V fp8", _codec("fp8")),
    Row("K/V fp8_v", _codec("fp8_v")),
    Row("K/V int8", _codec("int8")),
    Row("weights fp8", lambda files, _: Pipeline(files, fp8=Fp8(), keep_loaded=True)),
    Row("weights int8_convrot", _packed("int8_convrot")),
    *(Row(f"weights {name}", _packed(name)) for name in ("mxfp8", "w4a8", "nvfp4", "convrot_w4a4")),
    *(Row(f"weights {kind}", _gguf(kind)) for kind in ("Q8_0", "Q5_0", "Q4_0")),
    Row("prefix reuse", again=True),
    Row("VAE in tiles", tile=3),
    Row("bf16", lambda files, _: Pipeline(files, torch.bfloat16, keep_loaded=True)),
)


def held_out(kinds: Sequence[str], count: int, seed: int = 1) -> list[Task]:
    """`count` tasks that training has not seen, kinds in rope."""
    rng = Random(seed)
    return [random_task(rng, kinds[i % len(kinds)], held_out=True) for i in range(count)]


def paint(pipeline: Pipeline, tasks: Iterable[Task], row: Row) -> Iterator[Image.Image]:
    for seed, task in enumerate(tasks):
        request = row.request(request_of(task, seed))
        if row.again:
            pipeline.generate(replace(request, seed=seed + 10**6))
        result = pipeline.generate(request)
        if row.again:
            assert all(prefix.reuse.kind == "hit" for prefix in result.prefixes)
        picture = result.images[0]
        if row.tile:
            vae = pipeline.networks.get("vae")
            pixels = vae_tiling.decode_tiled(vae, vae.denormalise(result.latents), row.tile)
            (picture,) = from_vae_pixels(pixels)
        yield picture


def share(right: Iterable[bool]) -> float:
    values = list(right)
    return 100 * sum(values) / max(1, len(values))


def psnr(pictures: Sequence[Image.Image], others: Sequence[Image.Image]) -> float:
    """Of all pictures together, colours times alpha."""

    def seen(picture: Image.Image) -> np.ndarray:
        pixels = np.asarray(picture, float) / 255
        return np.concatenate([pixels[..., :3] * pixels[..., 3:], pixels[..., 3:]], axis=-1)

    error = np.mean([np.square(seen(a) - seen(b)).mean() for a, b in zip(pictures, others, strict=True)])
    return -10 * math.log10(error) if error else math.inf


def scores(tasks: Sequence[Task], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Shares in percent, as the issue of the miniature asks for them."""
    pairs = list(zip(tasks, verdicts, strict=True))
    painted = [v for t, v in pairs if t.kind == "paint"]
    edited = [v for t, v in pairs if t.kind != "paint"]
    return {
        "shape, colour": share(v.asked for v in painted),
        "position": share(v.placed for v in painted),
        "edit done": share(v.asked and v.placed for v in edited),
        "rest kept": share(v.kept for v in edited),
        "alpha": share(v.alpha for t, v in pairs if not t.result.ground),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="a miniature's folder; default the bundled one")
    parser.add_argument("--count", type=int, default=200, help="captions, and as many edits")
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS], choices=[row.name for row in ROWS])
    parser.add_argument("--kinds", action="store_true", help="the first row by kinds of edits")
    parser.add_argument("--sheet", type=Path, help="write the first pictures of the first row to this file")
    arguments = parser.parse_args()
    files = find_folder(arguments.model)
    tasks = held_out(["paint"], arguments.count) + held_out(list(EDITS), arguments.count)
    base: list[Image.Image] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if row.name not in arguments.rows:
                continue
            started = time.perf_counter()
            pipeline = row.pipeline(files, Path(folder))
            pictures = list(paint(pipeline, tasks, row))
            verdicts = [judge(task, picture) for task, picture in zip(tasks, pictures, strict=True)]
            found = scores(tasks, verdicts)
            if not base:
                base = pictures
                print(f"{'':22}" + "".join(f"{name:>15}" for name in found) + f"{'PSNR dB':>10}{'s':>7}")
                if arguments.sheet:
                    contact_sheet(tasks, pictures, verdicts).save(arguments.sheet)
                if arguments.kinds:
                    by_kind(tasks, verdicts)
            row_psnr = psnr(pictures, base)
            line = "".join(f"{value:15.1f}" for value in found.values())
            print(f"{row.name:22}{line}{row_psnr:10.1f}{time.perf_counter() - started:7.0f}", flush=True)


def by_kind(tasks: Sequence[Task], verdicts: Sequence[Verdict]) -> None:
    for kind in ("paint", *EDITS):
        of_kind = [v for t, v in zip(tasks, verdicts, strict=True) if t.kind == kind]
        parts = ", ".join(
            f"{part} {share(getattr(v, part) for v in of_kind):.0f}" for part in ("asked", "placed", "kept", "alpha")
        )
        print(f"  {kind:12} of {len(of_kind)}: {parts}")


def contact_sheet(tasks: Sequence[Task], pictures: Sequence[Image.Image], verdicts: Sequence[Verdict]) -> Image.Image:
    """Half captions, half edits behind their references; what is wrong has a red frame."""
    rows = []
    half = len(tasks) // 2
    for i in [*range(min(half, 32)), *range(half, half + min(half, 32))]:
        side = RESOLUTION
        cell = Image.new("RGBA", (3 * side + 8, side + 8), "white" if verdicts[i].right else "red")
        for x, picture in enumerate([*(draw(scene, side, side) for scene in tasks[i].references), pictures[i]]):
            checks = Image.new("RGBA", (side, side), (255, 0, 255, 255))
            checks.alpha_composite(picture)
            cell.paste(checks, (2 + x * (side + 2), 4))
        rows.append(cell)
    width, height = rows[0].size
    sheet = Image.new("RGBA", (4 * width, math.ceil(len(rows) / 4) * height))
    for i, cell in enumerate(rows):
        sheet.paste(cell, (i % 4 * width, i // 4 * height))
    return sheet


if __name__ == "__main__":
    main()
