"""The text encoder against transformers' Qwen3-VL, run the way diffusers' pipeline runs it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from diffusers import QwenImage21Pipeline
from PIL import Image

from qwen21.config.networks import EncoderConfig, TextConfig, VisionConfig
from qwen21.errors import Cancelled, UserError
from qwen21.inputs.prompt import layout_tokens
from qwen21.inputs.references import Reference, vision_patches
from qwen21.inputs.tokenizer import load_tokenizer
from qwen21.models import text_encoder as encoder_module
from qwen21.models.text_encoder import UNUSED_WEIGHTS, TextEncoder
from qwen21.ops import linear as layers
from tests.support.tiny_tokenizer import Processor, write_tokenizer

RELEASED_STYLE = {  # a released config.json, narrow: keys as transformers 4.57 wrote them
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "out_hidden_size": 64,
    },
}
CONFIG = EncoderConfig.from_transformers(RELEASED_STYLE)
RESOLUTION = 96
PROMPT = "\n a cat from <image1>, ein Bär in <image2>"


def weights(names_and_shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for name, shape in sorted(names_and_shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            filled[name] = 1 + 0.2 * noise
        elif name.endswith("bias"):
            filled[name] = 0.1 * noise
        else:
            filled[name] = noise * (0.5 if "embed" in name and len(shape) == 2 else noise[0].numel() ** -0.5)
    return filled


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(tokenizer):
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.special[f"<|{token}|>"] for name, token in names.items()}
    model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**RELEASED_STYLE, **ids)).eval()
    model.load_state_dict(weights({name: tensor.shape for name, tensor in model.state_dict().items()}))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def pipeline(folder, theirs):
    parts = {"scheduler": None, "vae": None, "transformer": None}
    return QwenImage21Pipeline(text_encoder=theirs, processor=Processor(folder), **parts)


@pytest.fixture(scope="module")
def state(theirs):
    named = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
    return {name: tensor for name, tensor in named.items() if name not in UNUSED_WEIGHTS}


@pytest.fixture(scope="module")
def ours(state):
    encoder = TextEncoder(CONFIG)
    encoder.load_state_dict(state)
    return encoder


@pytest.fixture(scope="module")
def references():
    sizes = [(107, 71), (33, 130), (90, 90)]
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (height, width, 4), dtype=np.uint8) for width, height in sizes]
    return [Reference.prepare(Image.fromarray(one), RESOLUTION) for one in pixels]


@torch.no_grad()
def released(pipeline, prompt, references):
    """States [S', width] and image_pad mask [S'] of the pipeline, behind the system turn."""
    states, mask, pads = pipeline.encode_prompt(prompt, image=[one.image for one in references] or None)
    assert mask is None
    return states[0], pads[0]


@pytest.mark.parametrize("n", range(4))
def test_states_equal_the_pipelines(pipeline, ours, tokenizer, references, n):
    want, pads = released(pipeline, PROMPT, references[:n])
    got = ours.encode(tokenizer, PROMPT, references[:n])
    assert got.states.dtype == torch.float32 and got.states.shape == want[~pads].shape
    assert want.abs().max() > 1
    assert (got.states - want[~pads]).abs().max() < 1e-5
    starts = [i for i in range(len(pads)) if pads[i] and not pads[i - 1]]
    assert got.image_slots == tuple(int((~pads[:start]).sum()) for start in starts) and len(starts) == n
    assert got.digests == tuple(one.digest for one in references[:n])

    kept = ours.encode(tokenizer, PROMPT, references[:n], keep_image_pads=True)
    assert kept.states.shape == want.shape and (kept.states - want).abs().max() < 1e-5
    assert kept.image_slots == tuple(starts)


@pytest.mark.parametrize("prompt", ["", " ", "one", "a long prompt, " * 150])
def test_prompts_equal_the_pipelines(pipeline, ours, tokenizer, prompt):
    want, _ = released(pipeline, prompt, [])
    assert (ours.encode(tokenizer, prompt).states - want).abs().max() < 1e-5


def test_references_matter(ours, tokenizer, references):
    one = ours.encode(tokenizer, PROMPT, references[:1]).states
    darker = references[0].image.point([value // 2 for value in range(256)] * 4)
    assert (one - ours.encode(tokenizer, PROMPT, [Reference.prepare(darker, RESOLUTION)]).states).abs().max() > 1e-2


def test_positions_equal_transformers(pipeline, theirs, tokenizer, references):
    for chosen in (references, references[::-1], references[1:2] * 2):
        released(pipeline, PROMPT, chosen)
        inputs = dict(pipeline.processor.inputs)
        inputs.pop("pixel_values")
        want, _ = theirs.model.get_rope_index(**inputs)
        layout = layout_tokens(PROMPT, tokenizer, [(1, one.height, one.width) for one in chosen])
        assert torch.equal(layout.positions(), want[:, 0])


@torch.no_grad()
def test_one_picture_alone_equals_the_joint_call(theirs, ours, references):
    patches = [vision_patches(one.over_white) for one in references]
    grids = torch.tensor([grid for _, grid in patches])
    output = theirs.model.visual(torch.cat([one for one, _ in patches]), grid_thw=grids)
    if isinstance(output, tuple):  # 4.57
        embeds, deepstack = output
    else:
        embeds, deepstack = output.pooler_output, output.deepstack_features
    got = [ours.encode_vision(one, grid) for one, grid in patches]
    assert len(deepstack) == len(got[0].deepstack) == 3
    assert (torch.cat([one.embeds for one in got]) - embeds).abs().max() < 1e-5
    for i, want in enumerate(deepstack):
        assert (torch.cat([one.deepstack[i] for one in got]) - want).abs().max() < 1e-5


def test_features_are_shared_between_prompts(ours, tokenizer, references, monkeypatch):
    want = ours.encode(tokenizer, "other", references)
    calls = []
    look = ours.encode_vision
    monkeypatch.setattr(ours, "encode_vision", lambda *args, **kwargs: calls.append(1) or look(*args, **kwargs))
    features = {}
    ours.encode(tokenizer, PROMPT, [*references, references[0]], features=features)
    assert len(calls) == 3 and set(features) == {one.digest for one in references}
    assert torch.equal(ours.encode(tokenizer, "other", references, features=features).states, want.states)
    assert len(calls) == 3


def test_a_head_serves_every_prompt_behind_its_references(ours, tokenizer, references, monkeypatch):
    """Bit-equal to reading all anew, and of all tokens only the prompt's pass through the layers."""
    wanted = [ours.encode(tokenizer, prompt, references).states for prompt in (PROMPT, "other")]
    contexts = {}
    assert torch.equal(ours.encode(tokenizer, PROMPT, references, contexts=contexts).states, wanted[0])
    digests, context = tuple(one.digest for one in references), contexts[references[0].digest,]
    assert list(contexts) == [digests[:i] for i in range(1, len(digests) + 1)]
    read = []
    embed = ours.language_model.embed_tokens.forward
    monkeypatch.setattr(
        ours.language_model.embed_tokens, "forward", lambda ids: read.append(ids.shape[1]) or embed(ids)
    )
    monkeypatch.setattr(ours, "encode_vision", None)
    got = ours.encode(tokenizer, "other", references, contexts=contexts)
    assert torch.equal(got.states, wanted[1])
    assert read == [len(got.layout.ids) - got.layout.images[-1].stop] and read[0] < 12
    layers = [(2, CONFIG.text.kv_heads, len(context.states), CONFIG.text.head_dim)] * CONFIG.text.layers
    assert [(len(kv), *kv[0].shape[1:]) for kv in context.layers] == layers
    assert context.nbytes == 4 * len(context.states) * (
        CONFIG.text.width + 2 * layers[0][1] * layers[0][3] * len(layers)
    )


def test_other_references_have_another_head(ours, tokenizer, references):
    contexts = {}
    ours.encode(tokenizer, PROMPT, references, contexts=contexts)
    got = ours.encode(tokenizer, PROMPT, references[::-1], contexts=contexts)
    assert torch.equal(got.states, ours.encode(tokenizer, PROMPT, references[::-1]).states)
    assert len(contexts) == 2 * len(references)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_a_reference_changes_no_bit_before_it(state, tokenizer, dtype):
    """Products round by the number of their rows: at these sizes a context read in one differs from one read alone."""
    encoder = TextEncoder(CONFIG, dtype=dtype)
    encoder.load_state_dict(state)
    pixels = np.random.default_rng(1).integers(0, 256, (3, 256, 256, 4), dtype=np.uint8)
    references = [Reference.prepare(Image.fromarray(one), 256) for one in pixels]
    contexts, alone = {}, {}
    more = encoder.encode(tokenizer, PROMPT, references, contexts=contexts)
    for count in (1, 2):
        fewer = encoder.encode(tokenizer, "other", references[:count], contexts=alone)
        end = fewer.image_slots[-1]
        assert torch.equal(fewer.states[:end], more.states[:end])
    assert torch.equal(encoder.encode(tokenizer, PROMPT, references, contexts=alone).states, more.states)


@torch.no_grad()
def test_bf16_is_as_close_to_fp32_as_transformers(pipeline, theirs, state, ours, tokenizer, references):
    want = ours.encode(tokenizer, PROMPT, references).states
    half = TextEncoder(CONFIG, dtype=torch.bfloat16)
    half.load_state_dict(state)
    got = half.encode(tokenizer, PROMPT, references).states
    assert got.dtype == torch.bfloat16
    theirs.to(torch.bfloat16)
    try:
        states, pads = released(pipeline, PROMPT, references)
    finally:
        theirs.float().load_state_dict({**theirs.state_dict(), **{f"model.{name}": one for name, one in state.items()}})
    error, their_error = ((one.float() - want).norm() / want.norm() for one in (got, states[~pads]))
    assert error < 1.2 * their_error and error < 0.1


# --- injected layers -----------------------------------------------------------------------------------------------


def _elsewhere(base):
    """A layer whose weights lie on the meta device in float64, save while it runs: a host that keeps them away."""

    class Layer(base):
        def forward(self, x):
            offloaded, self._parameters = self._parameters, self.real
            try:
                return super().forward(x)
            finally:
                self._parameters = offloaded

    return Layer


LAYERS = ("Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv3d")
ELSEWHERE = SimpleNamespace(**{name: _elsewhere(getattr(layers, name)) for name in LAYERS})


def test_every_parameter_sits_in_an_injected_layer_and_is_only_read_there(ours, state, tokenizer, references):
    encoder = TextEncoder(CONFIG, operations=ELSEWHERE, dtype=torch.float64, device="meta", compute_dtype=torch.float32)
    kinds = tuple(vars(ELSEWHERE).values())
    assert list(encoder.buffers()) == []
    for name, module in encoder.named_modules():
        if own := dict(module.named_parameters(recurse=False)):
            assert isinstance(module, kinds), name
            assert {(one.dtype, one.device.type) for one in own.values()} == {(torch.float64, "meta")}
            module.real = {key: state.get(f"{name}.{key}") for key in module._parameters}
    got = encoder.encode(tokenizer, PROMPT, references)
    assert torch.equal(got.states, ours.encode(tokenizer, PROMPT, references).states)


def test_names_and_sizes_are_those_of_checkpoints(state):
    encoder = TextEncoder(CONFIG, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    read = EncoderConfig.from_shapes(shapes)
    assert read == CONFIG
    assert {type(module).__name__ for module in encoder.modules()} & {"Qwen3VLTextModel", "Qwen3VLVisionModel"} == set()


def test_released_sizes():
    encoder = TextEncoder(device="meta", dtype=torch.bfloat16)
    numbers = {name: sum(one.numel() for one in part.parameters()) for name, part in encoder.named_children()}
    layer = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert numbers["language_model"] == 151936 * 4096 + 36 * layer
    assert encoder.language_model.layers[0].self_attn.config._attn_implementation == "sdpa"
    assert encoder.visual.blocks[0].attn.config._attn_implementation == "sdpa"


# --- limits --------------------------------------------------------------------------------------------------------


def test_cancel_is_asked_before_every_layer(ours, tokenizer, references):
    calls = []
    ours.encode(tokenizer, PROMPT, references[:2], check_cancel=lambda: calls.append(1))
    assert len(calls) == 2 * 27 + 3 * 4  # the language model reads each reference, then the prompt

    def stop():
        calls.append(1)
        if len(calls) == 30:
            raise Cancelled

    calls.clear()
    features = {}
    with pytest.raises(Cancelled):
        ours.encode(tokenizer, PROMPT, references[:2], features=features, check_cancel=stop)
    assert set(features) == {references[0].digest}
    got = ours.encode(tokenizer, PROMPT, references[:2], features=features)
    assert torch.equal(got.states, ours.encode(tokenizer, PROMPT, references[:2]).states)


def test_too_many_tokens_are_refused_before_anything_runs(tokenizer, references, monkeypatch):
    encoder = TextEncoder(CONFIG, device="meta")  # cannot run
    with pytest.raises(UserError, match=r"make 3\d{5} tokens.* at most 262144; shorten"):
        encoder.encode(tokenizer, "1" * 300000, references)
    length = len(layout_tokens("x", tokenizer).ids)
    monkeypatch.setattr(encoder_module, "MAX_TOKENS", length)
    with pytest.raises(RuntimeError):
        encoder.encode(tokenizer, "x")
    monkeypatch.setattr(encoder_module, "MAX_TOKENS", length - 1)
    with pytest.raises(UserError, match=f"make {length} tokens"):
        encoder.encode(tokenizer, "x")


def test_tokenizer_of_another_model(tokenizer):
    small = EncoderConfig(TextConfig(64, 96, 1, 4, 2, vocabulary=300), CONFIG.vision)
    with pytest.raises(UserError, match="knows only 300"):
        TextEncoder(small, device="meta").encode(tokenizer, "x")


def test_vision_tower_of_another_model():
    with pytest.raises(UserError, match=r"\(14, 2, 2\), expected \(16, 2, 2\)"):
        TextEncoder(EncoderConfig(vision=VisionConfig(patch=14)), device="meta")
