"""The paths of a model's parts, and of the tokenizer that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..choices import COMPONENT_FOLDERS
from ..errors import UserError
from ..inputs.tokenizer import find_tokenizer, tokenizer_beside
from .detect import SLOTS
from .paths import probe


@dataclass(frozen=True)
class Places:
    """Paths of a model: a whole-model `folder`, or single files and component folders, or both.

    A single path replaces the folder's part. `tokenizer` is a folder of its own, where the tokenizer lies elsewhere;
    `mmproj` the file of the vision tower of an encoder in GGUF, where it does not lie beside the encoder.
    """

    folder: Path | None = None
    dit: Path | None = None
    encoder: Path | None = None
    vae: Path | None = None
    tokenizer: Path | None = None
    mmproj: Path | None = None

    def of(self, slot: str) -> Path:
        """Path of the part `slot`."""
        given = getattr(self, slot)
        if given is None and self.folder is None:
            raise UserError(f"no model: {SLOTS[slot]} is missing; give a whole folder, or every part")
        return self.folder / COMPONENT_FOLDERS[slot] if given is None else given

    def find_tokenizer(self) -> Path:
        """Folder of the tokenizer: the given one, else that of the encoder, else that of the whole model."""
        if self.tokenizer is not None:
            probe(self.tokenizer)
            return find_tokenizer(self.tokenizer)
        if self.encoder is not None and (found := tokenizer_beside(self.encoder)):
            return found
        if self.folder is not None:
            return find_tokenizer(self.folder)
        raise UserError(
            "single files carry no tokenizer; give --tokenizer DIR, such as the diffusers folder's processor/ or "
            "ComfyUI's comfy/text_encoders/qwen25_tokenizer"
        )
