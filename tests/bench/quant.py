"""What each storage format costs in accuracy and saves in bytes, by group of layers; and memory while loading.

    python -m tests.bench.quant           # a random transformer of 6 blocks, under a minute on a CPU
    python -m tests.bench.quant --load    # peak memory of fp8, convert and quantized files, 2 GB on disk

The weights are random with heavy tails, rows and input channels of unequal size and a few channels that stand out, as
trained ones have. So the table tells how formats and groups compare; what the released weights lose, it does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from qwen21.checkpoint.load import module_of
from qwen21.choices import GGUF_TYPES
from qwen21.config.networks import DiTConfig
from qwen21.models.dit import DiT
from tests.support.tiny_quant import LAYOUTS, Layout

from .load import Peak, write_checkpoint

FORMATS = (
    *("int8_convrot", "int8 by rows", "int8 by tensor", "fp8 by rows", "fp8 by tensor", "fp8 plain"),
    *("mxfp8", "w4a8", "nvfp4", "convrot_w4a4", *GGUF_TYPES),
)


def _gguf(kind: str) -> Layout:
    of = gguf.GGMLQuantizationType[kind]
    return Layout(
        lambda weight, _: {"weight": torch.from_numpy(gguf.quants.quantize(weight.numpy(), of))},
        lambda pieces, _: torch.from_numpy(np.array(gguf.quants.dequantize(pieces["weight"].numpy(), of))),
    )


ALL = LAYOUTS | {kind: _gguf(kind) for kind in GGUF_TYPES}
GROUPS: dict[str, Callable[[str], bool]] = {
    "QKV": lambda name: name.endswith((".to_q.weight", ".to_k.weight", ".to_v.weight")),
    "attention output": lambda name: ".to_out." in name,
    "MLP gate and up": lambda name: name.endswith((".gate_layer.weight", ".proj.weight")),
    "MLP out": lambda name: name.endswith(".img_mlp.out.weight"),
    "whole attention": lambda name: ".attn.to_" in name,
    "whole MLP": lambda name: ".img_mlp." in name,
    "all of the blocks": lambda name: ".attn.to_" in name or ".img_mlp." in name,
    "what stays: img_in, txt_in, modulation, ...": lambda name: not name.startswith("transformer_blocks."),
}
CONFIG = DiTConfig(layers=6, heads=8, text_width=512)
LOADED = {"num_layers": 17, "num_attention_heads": 16}  # 2 GB in bf16


def trained_like(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Student's t with five degrees of freedom; rows and columns spread by e^0.3 and e^0.5; one column in 200 is 8
    times larger. Columns are normalised, so that outputs keep unit size."""
    normal = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return normal
    chi = torch.randn(5, *shape, generator=generator).square().mean(0).sqrt()
    weight = normal / chi
    weight *= torch.exp(0.3 * torch.randn(shape[0], 1, generator=generator))
    columns = torch.exp(0.5 * torch.randn(shape[1], generator=generator))
    columns[torch.rand(shape[1], generator=generator) < 0.005] *= 8
    weight *= columns
    return weight / (weight.square().mean().sqrt() * shape[1] ** 0.5)


def transformer(config: DiTConfig) -> tuple[DiT, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    dit = module_of("dit", config)
    state = {}
    for name, meta in dit.named_parameters():
        value = trained_like(tuple(meta.shape), generator)
        if meta.ndim == 1:
            value = 0.2 * value + (0.0 if "text_norm" in name else 1.0)
        state[name] = value
    return dit.eval(), state


class Probe:
    """One velocity behind a prefix of text and a reference, and how far it moves with other weights."""

    def __init__(self, dit: DiT, state: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        config = dit.config
        self.dit, self.state = dit, state
        self.text = torch.randn(32, config.text_width, generator=generator)
        self.reference = torch.randn(config.in_channels, 8, 8, generator=generator)
        self.target = torch.randn(1, config.in_channels, 16, 16, generator=generator)
        self.exact = self.velocity({})

    @torch.inference_mode()
    def velocity(self, changed: dict[str, Tensor]) -> Tensor:
        self.dit.load_state_dict(self.state | changed, assign=True)
        return self.dit.denoise(self.target, 0.7, self.dit.prefill(self.text, [self.reference], [16]))

    def error(self, changed: dict[str, Tensor]) -> float:
        return relative(self.velocity(changed), self.exact)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def row(probe: Probe, layout: Layout, chosen: Callable[[str], bool]) -> tuple[float, float, float]:
    """Relative errors of the weights (mean over layers) and of the velocity, and bytes by those of bf16."""
    changed, errors, packed, plain = {}, [], 0, 0
    for name, weight in probe.state.items():
        if not chosen(name) or weight.ndim != 2:
            continue
        group = 256 if weight.shape[1] % 256 == 0 else 64
        pieces = layout.pack(weight, group)
        changed[name] = layout.unpack(pieces, group)
        errors.append(relative(changed[name], weight))
        packed += sum(piece.nbytes for piece in pieces.values())
        plain += 2 * weight.numel()
    return sum(errors) / len(errors), probe.error(changed), packed / plain


def table() -> None:
    probe = Probe(*transformer(CONFIG))
    rounded = {name: value.bfloat16().float() for name, value in probe.state.items()}
    print(f"bf16 weights move the velocity by {100 * probe.error(rounded):.3f} %\n")
    print("| format | layers | weights off by, % | velocity off by, % | bytes of bf16's |\n|---|---|---|---|---|")
    for name in FORMATS:
        for group, chosen in GROUPS.items():
            weights, velocity, size = row(probe, ALL[name], chosen)
            print(f"| {name} | {group} | {100 * weights:.2f} | {100 * velocity:.2f} | {size:.3f} |", flush=True)


# --- memory --------------------------------------------------------------------------------------------------------


def measure(what: str, source: Path, out: Path) -> dict[str, float]:
    """Peak of anonymous memory in this process, beside the bytes that stay and the largest tensor read."""
    from qwen21.checkpoint.convert import convert
    from qwen21.checkpoint.fp8_policy import Fp8
    from qwen21.checkpoint.load import find_dit, load

    part = find_dit(source)
    largest = max(info.nbytes for info in part.checkpoint.tensors.values())
    with Peak() as peak:
        if what == "convert":
            convert("dit", source, Fp8(), out)
            final = 0
        else:
            model = load(part, torch.bfloat16, fp8=Fp8() if what == "fp8" else None)
            final = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return {"final": final, "largest": largest, "peak": peak.bytes}


def memory() -> None:
    print("| | stays, MB | largest tensor, MB | peak, MB | (peak - stays) / largest |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "bf16", Path(name) / "fp8.safetensors"
        folder.mkdir()
        write_checkpoint(folder, LOADED)
        for what, source in (("bf16", folder), ("fp8", folder), ("convert", folder), ("fp8 file", out)):
            command = [sys.executable, "-m", "tests.bench.quant", "--measure", what, str(source), str(out)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            got = json.loads(run.stdout.splitlines()[-1])
            over = (got["peak"] - got["final"]) / got["largest"]
            sizes = " | ".join(f"{got[key] / 1e6:.0f}" for key in ("final", "largest", "peak"))
            print(f"| {what} | {sizes} | {over:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("WHAT", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what, source, out = arguments.measure
        print(json.dumps(measure(what, Path(source), Path(out))))
    elif arguments.load:
        memory()
    else:
        table()


if __name__ == "__main__":
    main()
