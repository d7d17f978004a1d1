"""Trains the bundled miniature: `python -m qwen21.mini.train --work DIR`, in about six hours on two CPU cores.

Stopped, it goes on where it was when started again with the same folder. The folder gets the loss curves; the finished
model replaces `qwen21/mini/weights`.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.load import find_dit, find_encoder, find_vae, load
from ..inputs.tokenizer import load_tokenizer
from ..models.vae import VAE as VAENetwork
from .model import DIT, ENCODER, VAE, write_model, write_tokenizer
from .training.dit import DIT_PLAN, DiTTrainer
from .training.loop import Training
from .training.vae import DECODER_PLAN, VAE_PLAN, DecoderTrainer, VAETrainer, fold


def train_vae(work: Path, minutes: float) -> bool:
    """Train the VAE and write it, folded, into `work/model`; return whether it is finished."""
    trainer = VAETrainer(VAE)
    training = Training(trainer, VAE_PLAN, work / "vae.safetensors")
    done = training.run(trainer.loss, minutes)
    training.use_mean()
    write_model(work / "model", {"vae": (VAE, vae_tensors(fold(trainer.vae)))})
    return done


def train_decoder(work: Path, minutes: float) -> bool:
    """Train the decoder of the VAE in `work/model` further, and write it there; return whether it is finished."""
    trainer = DecoderTrainer(load(find_vae(work / "model" / "vae"), torch.float32))
    training = Training(trainer, DECODER_PLAN, work / "decoder.safetensors")
    done = training.run(trainer.loss, minutes)
    training.use_mean()
    write_model(work / "model", {"vae": (VAE, vae_tensors(trainer.vae))})
    return done


def vae_tensors(vae: VAENetwork) -> Mapping[str, Tensor]:
    """The VAE's weights, and zeros for the layers of videos, which other loaders expect."""
    tensors = dict(vae.state_dict())
    widths = [VAE.base_width * m for m in VAE.multipliers]
    heights = [VAE.decoder_base_width * m for m in VAE.multipliers[::-1]]
    for i, slots in enumerate(VAE.slots):
        if slots == 2:
            name, width = f"encoder.down_blocks.{i}.downsampler.time_conv", widths[i]
            tensors |= {f"{name}.weight": torch.zeros(width, width, 1, 1), f"{name}.bias": torch.zeros(width)}
    for i, slots in enumerate(VAE.slots[::-1]):
        if slots == 2:
            name, width = f"decoder.up_blocks.{i}.upsampler.time_conv", heights[i]
            tensors |= {f"{name}.weight": torch.zeros(2 * width, width, 1, 1), f"{name}.bias": torch.zeros(2 * width)}
    return tensors


def train_dit(work: Path, minutes: float, start: Path | None = None, compiled: bool = False) -> bool:
    """Train transformer and encoder on the latents of the VAE in `work/model`, and write them there too.

    `start` is a model whose VAE is kept and whose transformer is trained further, where `work` is still empty.
    """
    if start and not (work / "model" / "vae").exists():
        shutil.copytree(start / "vae", work / "model" / "vae")
    write_tokenizer(work / "model" / "processor")
    vae = load(find_vae(work / "model" / "vae"), torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(DIT_PLAN.seed)
        trainer = DiTTrainer(compiled)
    if start:
        trainer.dit.load_state_dict(load(find_dit(start / "transformer"), torch.float32).state_dict())
        trainer.encoder.load_state_dict(load(find_encoder(start / "text_encoder"), torch.float32).state_dict())
    training = Training(trainer, DIT_PLAN, work / "dit.safetensors")
    batches = trainer.batches(vae, load_tokenizer(work / "model"), training.step)
    done = training.run(lambda step, rng, generator: trainer.loss(next(batches), generator), minutes)
    training.use_mean()
    unused = {"language_model.norm.weight": torch.ones(ENCODER.text.width)}
    encoder = dict(trainer.encoder.state_dict()) | unused
    write_model(work / "model", {"dit": (DIT, trainer.dit.state_dict()), "encoder": (ENCODER, encoder)})
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for what a later run goes on from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after about so long, and write the model")
    parser.add_argument("--part", choices=("vae", "decoder", "dit"), help="this part only")
    parser.add_argument("--start", type=Path, help="a model whose VAE stays and whose transformer learns on")
    parser.add_argument("--compile", action="store_true", help="a third faster; needs a C++ compiler")
    arguments = parser.parse_args()
    for part, learn in (("vae", train_vae), ("decoder", train_decoder)):
        chosen = arguments.part == part or (arguments.part is None and not arguments.start)
        if chosen and not learn(arguments.work, arguments.minutes):
            return
    if arguments.part in (None, "dit"):
        train_dit(arguments.work, arguments.minutes, arguments.start, arguments.compile)


if __name__ == "__main__":
    main()
