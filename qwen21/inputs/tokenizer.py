"""The Qwen tokenizer, loaded from local files only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from .prompt import RESERVED_TOKENS

# Special tokens in the order of their ids, which follow the byte-pair vocabulary of the released tokenizer.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
RELEASED_VOCABULARY = 151643  # byte-pair tokens without special ones
WHERE = "take the diffusers folder's processor/, or comfy/text_encoders/qwen25_tokenizer of ComfyUI"


class PromptTokenizer:
    """A tokenizer that treats all input as plain text. `special` maps the template's special tokens to their ids."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.special = {name: tokenizer.convert_tokens_to_ids(name) for name in RESERVED_TOKENS}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def load_tokenizer(folder: str | Path) -> PromptTokenizer:
    """The tokenizer in `folder`, which holds `tokenizer.json`, or `vocab.json` and `merges.txt`, itself or in its
    `processor/` or `tokenizer/`. `UserError` if files are missing, unreadable or another model's.
    """
    folder = find_tokenizer(folder)
    try:
        from transformers import Qwen2TokenizerFast
    except ImportError as error:
        raise UserError(f"the tokenizer needs the package transformers, 4.57 or newer ({error}); install it") from error
    try:
        tokenizer = Qwen2TokenizerFast.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=10**9,  # the encoder refuses too many tokens; here they would only print a warning
        )
    except Exception as error:  # broken JSON, broken merges: each version raises something else
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer in {str(folder)!r} cannot be read ({reason}); {WHERE}") from error
    _complete(tokenizer, folder)
    return PromptTokenizer(tokenizer)


def find_tokenizer(folder: str | Path) -> Path:
    """The folder that holds the tokenizer's files: the given one, its `processor/` or its `tokenizer/`."""
    folder = Path(folder)
    for candidate in (folder, folder / "processor", folder / "tokenizer"):
        names = [("tokenizer.json",), ("vocab.json", "merges.txt")]
        if any(all((candidate / name).is_file() for name in group) for group in names):
            return candidate
    raise UserError(f"{str(folder)!r} holds no tokenizer.json, and no vocab.json with merges.txt; {WHERE}")


def tokenizer_beside(encoder: Path) -> Path | None:
    """The tokenizer's folder for the encoder file or folder `encoder`: in the folder around it, or in a folder with its
    name without suffix; None where there is none."""
    for folder in (encoder.parent, encoder.with_suffix("")):
        with suppress(UserError):
            return find_tokenizer(folder)
    return None


def _complete(tokenizer: Any, folder: Path) -> None:
    """Add the special tokens that the files lack; `UserError` if they do not get the released ids."""
    known = tokenizer.get_vocab()
    if all(name in known for name in RESERVED_TOKENS):
        return
    released = {name: RELEASED_VOCABULARY + i for i, name in enumerate(SPECIAL_TOKENS)}
    tokenizer.add_tokens([name for name in SPECIAL_TOKENS if name not in known], special_tokens=True)
    wrong = [name for name in RESERVED_TOKENS if tokenizer.convert_tokens_to_ids(name) != released[name]]
    if wrong:
        raise UserError(
            f"the tokenizer in {str(folder)!r} lacks {wrong[0]} and has {len(known)} tokens, expected the Qwen "
            f"vocabulary of {RELEASED_VOCABULARY}; {WHERE}"
        )
