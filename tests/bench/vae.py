"""The VAE beside diffusers', released size, random weights: encode and decode, whole and in tiles.

python -m tests.bench.vae --small           # 256x256 in fp32 on the CPU, a minute
python -m tests.bench.vae                   # 1024x1024 and 2048x2048 in bf16, needs CUDA
python -m tests.bench.vae --channels-last   # with that memory order on the GPU too, to compare
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor

import qwen21.models.vae
from qwen21.config.networks import VAEConfig
from qwen21.models import vae_tiling
from qwen21.models.vae import VAE

from .pairs import compare
from .paths import peak

TILE = 32  # latent cells
HEADER = (
    "| | diffusers, ms | qwen21, ms | times faster | largest difference | diffusers, MiB | qwen21, MiB |\n"
    "|---|---|---|---|---|---|---|"
)


def both(device: str, dtype: torch.dtype) -> tuple[AutoencoderKLQwenImage21, VAE]:
    torch.manual_seed(0)
    with torch.device(device):
        theirs = AutoencoderKLQwenImage21().to(dtype).eval().requires_grad_(False)
    ours = VAE(VAEConfig.from_diffusers(theirs.config), dtype=dtype, device="meta").eval().requires_grad_(False)
    weights = {name: value for name, value in theirs.state_dict().items() if "time_conv" not in name}
    ours.load_state_dict(weights, assign=True)
    return theirs, ours


def their_encode(vae: AutoencoderKLQwenImage21, pixels: Tensor) -> Tensor:
    return vae.encode(pixels[:, :, None]).latent_dist.mode().squeeze(2)


def their_decode(vae: AutoencoderKLQwenImage21, latents: Tensor) -> Tensor:
    return vae.decode(latents[:, :, None]).sample.squeeze(2)


@torch.inference_mode()
def rows(device: str, dtype: torch.dtype, sides: list[int], pairs: int) -> Iterator[str]:
    theirs, ours = both(device, dtype)
    for side in sides:
        pixels = torch.rand(1, 4, side, side, device=device, dtype=dtype) * 2 - 1
        latents = torch.randn(1, 64, side // 16, side // 16, device=device, dtype=dtype)
        decode = partial(their_decode, theirs, latents)
        runs = {
            "encode": (partial(their_encode, theirs, pixels), partial(ours.encode, pixels)),
            "decode": (decode, partial(ours.decode, latents)),
            "decode in tiles": (decode, partial(vae_tiling.decode_tiled, ours, latents, TILE)),
        }
        for name, (reference, run) in runs.items():
            off = (reference().float() - run().float()).abs().max().item()
            row = compare(f"{name} {side}x{side}", reference, run, pairs)
            memory = f"{peak(reference, device)} | {peak(run, device)}"
            yield f"{str(row)[:-2]} | {off:.1e} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="256x256 in fp32 on the CPU")
    parser.add_argument("--channels-last", action="store_true", help="channels innermost on the GPU")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs a row")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        parser.error("the full size needs CUDA; use --small on a CPU")
    if arguments.channels_last:
        qwen21.models.vae.packed = lambda x: x.contiguous(memory_format=torch.channels_last)
    device, dtype, sides = ("cpu", torch.float32, [256]) if arguments.small else ("cuda", torch.bfloat16, [1024, 2048])
    print(HEADER)
    for row in rows(device, dtype, sides, arguments.pairs):
        print(row, flush=True)


if __name__ == "__main__":
    main()
