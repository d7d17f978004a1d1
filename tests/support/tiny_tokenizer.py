"""A small tokenizer like Qwen's: byte-level BPE, Qwen's pre-tokenizer and special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added tokens that are not special
CORPUS = (
    "Comprehend and analyze the provided prompt.",
    "system\nuser\nassistant\n\n\n",
    "<image1> <image2> <image3> a cat sits on a red chair,  two  spaces, and the sign says 'open'",
    "ein Bär im Wald; una niña con un paraguas; 一只猫 坐在 椅子 上; café naïve",
)


def write_tokenizer(folder: str | Path, vocab_size: int = 512, special: bool = True) -> Path:
    """Write tokenizer.json, vocab.json, merges.txt and tokenizer_config.json; all ids are below `vocab_size`.

    Without `special` the files only hold the byte-pair vocabulary.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = SPECIAL + PLAIN if special else ()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL + PLAIN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=name in SPECIAL) for name in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    entry = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(name)): {"content": name, "special": name in SPECIAL, **entry} for name in added
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>" if special else None,
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>" if special else None,
        "split_special_tokens": False,
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return folder


class Processor:
    """Replaces transformers' Qwen3VLProcessor, whose video half needs torchvision, in what the pipeline calls.

    Nothing is resized. `images` and `inputs` are those of the last call.
    """

    def __init__(self, folder: str | Path):
        import transformers

        pil = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
        half = [0.5, 0.5, 0.5]
        self.image_processor = pil(do_resize=False, patch_size=16, merge_size=2, image_mean=half, image_std=half)
        self.tokenizer = transformers.Qwen2TokenizerFast.from_pretrained(str(folder))
        self.images, self.inputs = None, None

    def apply_chat_template(self, messages, tokenize=True, return_dict=False):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content'][0]['text']}<|im_end|>\n" for m in messages)
        return [self.tokenizer.encode(text)]

    def __call__(self, text, images=None, padding=True, padding_side="left", return_tensors="pt"):
        import transformers

        self.images, vision = images, {}
        if images is not None:
            vision = dict(self.image_processor(images=images, return_tensors=return_tensors))
            grids = iter(vision["image_grid_thw"])
            chunks = [one.split("<|image_pad|>") for one in text]
            text = [
                first + "".join("<|image_pad|>" * (int(next(grids).prod()) // 4) + chunk for chunk in rest)
                for first, *rest in chunks
            ]
        tokens = self.tokenizer(text, padding=padding, padding_side=padding_side, return_tensors=return_tensors)
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], **vision}
        if not transformers.__version__.startswith("4."):  # 4.57 recognises pictures by token ids
            self.inputs["mm_token_type_ids"] = (tokens["input_ids"] == pad).int()
        return transformers.BatchFeature(self.inputs)
