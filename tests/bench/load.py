"""Loading the transformer beside diffusers: seconds, and the peak of anonymous memory over the weights' final bytes.

    python -m tests.bench.load --small    # a checkpoint of 1.2 GB on the CPU, two minutes
    python -m tests.bench.load            # the released size, 14 GB on disk

Each load runs in a process of its own; anonymous memory (RssAnon of /proc, Linux) leaves out the mapped file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZES = {"small": {"num_layers": 10, "num_attention_heads": 16}, "full": {"num_layers": 32, "num_attention_heads": 32}}
SHARD = 400_000_000  # bytes


def write_checkpoint(folder: Path, size: dict[str, int]) -> int:
    """A random bf16 transformer in the diffusers layout, in shards; returns its number of parameters."""
    from qwen21.checkpoint.load import module_of
    from qwen21.config.networks import DiTConfig

    config = DiTConfig.from_diffusers(size)
    weight_map, shard, count = {}, {}, 0
    parameters = list(module_of("dit", config).named_parameters())
    for i, (name, meta) in enumerate(parameters):
        shard[name] = torch.randn(meta.shape, dtype=torch.bfloat16) * 0.02
        count += meta.numel()
        if sum(t.nbytes for t in shard.values()) > SHARD or i == len(parameters) - 1:
            file = f"diffusion_pytorch_model-{len(set(weight_map.values())) + 1:05}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"_class_name": "QwenImage21Transformer2DModel", **size}))
    return count


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status; this benchmark needs Linux")


class Peak:
    """The highest RssAnon while it runs, sampled every 2 ms, above where it started."""

    def __enter__(self) -> Peak:
        self.start = self.highest = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self.highest = max(self.highest, anonymous_bytes())
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.highest - self.start


def measure(who: str, folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """Load once in this process."""
    if who == "diffusers":
        from diffusers import QwenImage21Transformer2DModel as Model

        def load():
            return Model.from_pretrained(folder, torch_dtype=dtype)
    else:
        from qwen21.checkpoint.load import find_dit
        from qwen21.checkpoint.load import load as load_component

        def load():
            return load_component(find_dit(folder), dtype)

    with Peak() as peak:
        started = time.perf_counter()
        model = load()
        seconds = time.perf_counter() - started
    final = sum(p.nbytes for p in model.parameters())
    return {"seconds": seconds, "peak_ratio": peak.bytes / final}


def in_process(who: str, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.load", "--measure", who, str(folder), dtype]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("WHO", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        who, folder, dtype = arguments.measure
        print(json.dumps(measure(who, Path(folder), getattr(torch, dtype))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_checkpoint(folder, SIZES["small" if arguments.small else "full"])
        print(f"{count / 1e9:.2f} billion parameters, {2 * count / 1e9:.2f} GB in bf16\n")
        print("| loaded as | diffusers, s | qwen21, s | diffusers, peak | qwen21, peak |\n|---|---|---|---|---|")
        for dtype in ("bfloat16", "float32"):
            runs = [(in_process("diffusers", folder, dtype), in_process("qwen21", folder, dtype)) for _ in range(3)]
            theirs, ours = (min((pair[i] for pair in runs), key=lambda r: r["seconds"]) for i in (0, 1))
            peaks = [max(pair[i]["peak_ratio"] for pair in runs) for i in (0, 1)]
            print(f"| {dtype} | {theirs['seconds']:.2f} | {ours['seconds']:.2f} | {peaks[0]:.3f} | {peaks[1]:.3f} |")


if __name__ == "__main__":
    main()
