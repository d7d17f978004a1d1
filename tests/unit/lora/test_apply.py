"""LoRAs beside the weights against the merged model, whose weights are computed in fp64 by the definition."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qwen21.errors import UserError
from qwen21.lora.adapters import Adapter, fuse
from qwen21.lora.apply import LoraHook, apply_loras
from qwen21.lora.read import read_lora
from tests.support import loras


@pytest.fixture(scope="module")
def dit():
    return loras.network()


@pytest.fixture
def saved(tmp_path):
    """Writes patches as a file and reads them again."""

    def save(patches, style="diffusers", name="l.safetensors", settings=None):
        return read_lora(loras.write(tmp_path / name, patches, style, settings), loras.CONFIG)

    save.folder = tmp_path
    return save


def with_loras(dit, *stack):
    applied = apply_loras(dit, stack)
    try:
        return loras.velocity(dit)
    finally:
        applied.remove()


def close(got, expected):
    return (got - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
@pytest.mark.parametrize("style", loras.STYLES)
def test_every_style_equals_the_merged_model(dit, saved, style, dora):
    patches = loras.fusable(loras.make(2, alpha=3, dora=dora))
    lora = saved(patches, style)
    assert lora.matched == {"attention": 8, "mlp": 6, "other": 8}
    assert (lora.unmatched, lora.warnings) == ((), ())
    expected = loras.velocity(loras.merge(dit, (patches, 0.8)))
    assert not close(loras.velocity(dit), expected)
    assert close(with_loras(dit, (lora, 0.8)), expected)


@pytest.mark.parametrize("layer", loras.LAYERS)
@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_every_layer_has_its_part(dit, saved, layer, dora):
    patches = loras.make(3, [layer], dora=dora)
    expected = loras.velocity(loras.merge(dit, (patches, 1.0)))
    assert (loras.velocity(dit) - expected).abs().max() > 1e-3
    assert close(with_loras(dit, (saved(patches), 1.0)), expected)


@pytest.mark.parametrize("strength", [-1.5, 0.25, 1.0, 3.0])
def test_strengths(dit, saved, strength):
    patches = loras.make(4, alpha=2) | loras.make(5, loras.MLP, dora=True)
    assert close(with_loras(dit, (saved(patches), strength)), loras.velocity(loras.merge(dit, (patches, strength))))


def test_strength_zero_and_undo_are_exact(dit, saved):
    lora, before = saved(loras.make(6, dora=True)), loras.velocity(dit)
    applied = apply_loras(dit, [(lora, 0.0)])
    assert torch.equal(loras.velocity(dit), before)
    assert (applied.identity, applied.handles) == ("", ())
    applied.remove()
    applied = apply_loras(dit, [(lora, 1.0)])
    assert not torch.equal(loras.velocity(dit), before)
    applied.remove()
    assert torch.equal(loras.velocity(dit), before)
    assert not any(module._forward_hooks for module in dit.modules())
    applied.remove()


def test_stacks_of_loras_in_any_order(dit, saved):
    kinds = ({"alpha": 5.0}, {"layers": loras.ATTENTION}, {"dora": True}, {"dora": True, "layers": loras.MLP})
    patches = [loras.make(7 + i, **kind) for i, kind in enumerate(kinds)]
    stack = [(saved(p, name=f"{i}.safetensors"), 0.3 + 0.2 * i) for i, p in enumerate(patches)]
    expected = loras.velocity(loras.merge(dit, *[(p, s) for p, (_, s) in zip(patches, stack, strict=True)]))
    got = with_loras(dit, *stack)
    assert close(got, expected)
    assert torch.equal(with_loras(dit, *stack[::-1]), got)
    applied, other = apply_loras(dit, stack), {}
    layer = dit.transformer_blocks[0].attn.to_q
    assert [type(hook) for hook in layer._forward_hooks.values()] == [LoraHook]
    assert all(len(module._forward_hooks) <= 1 for module in dit.modules())
    with pytest.raises(UserError, match="remove them first"):
        apply_loras(dit, stack)
    applied.remove()
    for name, changed in {
        "same": stack[::-1],
        "strength": [*stack[:3], (stack[3][0], 0.1)],
        "fewer": stack[:3],
    }.items():
        other[name] = apply_loras(dit, changed)
        other[name].remove()
    assert [other[name].identity == applied.identity for name in other] == [True, False, False]


def test_the_same_file_twice_adds_its_strengths(dit, saved):
    patches = loras.make(11)
    lora = saved(patches)
    got = with_loras(dit, (lora, 0.75), (lora, -0.5))
    assert close(got, loras.velocity(loras.merge(dit, (patches, 0.25))))


class Rounded(nn.Module):
    """A layer that is called as a linear layer and has no floating-point weight."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("grid", (linear.weight.detach() * 64).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.grid.to(x.dtype) / 64).T


def test_layers_without_a_weight(saved):
    """As quantized layers are: what the LoRA adds does not pass through their grid."""
    dit, plain = loras.network(), loras.network()
    for name in loras.ATTENTION:
        owner, _, leaf = name.rpartition(".")
        setattr(dit.get_submodule(owner), leaf, Rounded(plain.get_submodule(name)))
        plain.get_submodule(name).weight.data = dit.get_submodule(name).grid / 64
    patches = loras.make(12, loras.ATTENTION)
    assert close(with_loras(dit, (saved(patches), 1.0)), loras.velocity(loras.merge(plain, (patches, 1.0))))


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_dtypes_change_under_the_hook(saved, dora):
    dit, name = loras.network(), "transformer_blocks.1.attn.to_v"
    patches = loras.make(13, [name], dora=dora)
    layer, x = dit.get_submodule(name), torch.randn(2, 3, 256)
    apply_loras(dit, [(saved(patches), 1.0)])
    expected = x.double() @ patches[name].merged(layer.weight.detach().double(), 1.0).T
    with torch.inference_mode():
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
            got = layer.to(dtype)(x.to(dtype))
            assert got.dtype == dtype
            assert (got - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_gradients_after_inference(saved, dora):
    """What was stacked under inference mode must not be stuck there."""
    dit, name = loras.network(), "transformer_blocks.1.attn.to_v"
    patches = loras.make(13, [name], dora=dora)
    layer, x = dit.get_submodule(name), torch.randn(3, 256)
    apply_loras(dit, [(saved(patches), 1.0)])
    with torch.inference_mode():
        layer(x)
    layer(x.requires_grad_()).sum().backward()
    merged = patches[name].merged(layer.weight.detach().double(), 1.0)
    assert close(x.grad, merged.sum(0).expand(3, -1))


# --- alpha ---------------------------------------------------------------------------------------------------------


def scales(lora):
    return {name: adapter.scale for name, adapter in lora.adapters.items()}


def test_alpha(saved):
    layers = loras.ATTENTION[:3]  # of ranks 1, 2, 3
    assert list(scales(saved(loras.make(1, layers))).values()) == [1, 1, 1]
    assert list(scales(saved(loras.make(1, layers, alpha=6))).values()) == [6, 3, 2]


def test_alpha_in_the_header(saved):
    q, k, v = loras.ATTENTION[:3]
    patches = loras.make(1, [q, k, v])
    settings = {
        "r": 2,
        "lora_alpha": 6,
        "alpha_pattern": {"o_q": 9, "to_v": 12, "0.attn.to_k": 1},
        "rank_pattern": {"to_q": 1},
    }
    expected = {q: 6.0, k: 0.5, v: 4.0}
    assert scales(saved(patches, settings=settings)) == expected
    prefixed = {f"transformer.{key}": value for key, value in settings.items()}
    assert scales(saved(patches, settings=prefixed)) == expected
    stable = saved(patches, settings=settings | {"use_rslora": True})
    assert scales(stable) == {q: 6.0, k: 1 / math.sqrt(2), v: 12 / math.sqrt(3)}
    beside = {**patches, k: loras.Patch(patches[k].a, patches[k].b, alpha=8)}
    assert scales(saved(beside, settings=settings)) == expected | {k: 4.0}  # the file's own tensor comes first


def test_alpha_of_a_peft_folder(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    file = loras.write(folder / "adapter_model.safetensors", loras.make(1, loras.ATTENTION[:1]), "PEFT")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 16}))
    assert [*scales(read_lora(folder, loras.CONFIG)).values()] == [16.0]
    assert [*scales(read_lora(file, loras.CONFIG)).values()] == [16.0]
    other = file.rename(folder / "style.safetensors")  # a config beside some other file is not its own
    assert [*scales(read_lora(other, loras.CONFIG)).values()] == [1.0]


@pytest.mark.parametrize(
    "settings",
    [7, [], {"lora_alpha": "8"}, {"lora_alpha": True}, {"lora_alpha": 1e9}, {"alpha_pattern": 3}, {"use_rslora": 1},
     {"alpha_pattern": {"to_q": None}}, {"alpha_pattern": {"(a+)+$": 1}}, {"lora_alpha": float("nan")}],
)  # fmt: skip
def test_headers_that_make_no_sense(saved, settings):
    with pytest.raises(UserError, match=r"l\.safetensors: .*(expected|is not)"):
        saved(loras.make(1, loras.ATTENTION[:1]), settings=settings)


def test_metadata_that_is_not_json(tmp_path):
    path = tmp_path / "l.safetensors"
    for text in ("", "{", "[" * 100_000):
        save_file(loras.tensors(loras.make(1, ["proj_out"])), path, {"lora_adapter_metadata": text})
        with pytest.raises(UserError, match="is not JSON"):
            read_lora(path, loras.CONFIG)


# --- contents ------------------------------------------------------------------------------------------------------


def test_the_digest_names_contents(saved, tmp_path):
    patches = loras.fusable(loras.make(2, alpha=3, dora=True))
    digests = {saved(patches, style).digest for style in loras.STYLES}
    shuffled = dict(reversed(patches.items()))
    digests.add(saved(shuffled).digest)
    assert len(digests) == 1
    half = {key: value.bfloat16() for key, value in loras.tensors(patches).items()}
    for name, tensors in {"bf16": half, "fp32": {key: value.float() for key, value in half.items()}}.items():
        save_file(tensors, tmp_path / name)
    assert read_lora(tmp_path / "bf16", loras.CONFIG).digest == read_lora(tmp_path / "fp32", loras.CONFIG).digest
    changed = [
        loras.make(2),
        loras.make(2, alpha=3),
        loras.make(2, dora=True),
        loras.make(3),
        loras.make(2, ["img_in"]),
    ]
    changed.append({"img_in": loras.make(2, alpha=2)["img_in"]})
    last = patches["proj_out"]
    changed.append(patches | {"proj_out": loras.Patch(last.a, last.b, last.alpha, last.magnitude * 1.01)})
    digests |= {saved(other).digest for other in changed}
    assert len(digests) == 1 + len(changed)


def test_split_and_fuse(saved):
    fused = Adapter(torch.randn(3, 8), torch.randn(10, 3), 0.5, torch.randn(10))
    gate, proj = fused.halves()
    assert torch.equal(torch.cat([gate.delta(), proj.delta()]), fused.delta())
    assert torch.equal(torch.cat([gate.magnitude, proj.magnitude]), fused.magnitude)
    back = fuse(gate, proj)
    assert all(torch.equal(getattr(back, part), getattr(fused, part)) for part in ("down", "up", "magnitude"))
    assert back.scale == fused.scale
    for rank, scale in ((2, 0.5), (2, 2.0), (3, 0.5)):
        proj = Adapter(torch.randn(rank, 8), torch.randn(5, rank), scale, torch.randn(5))
        back = fuse(gate, proj)
        assert back.rank == 3 + rank
        assert torch.allclose(back.delta(), torch.cat([gate.delta(), proj.delta()]), atol=1e-6)
        assert torch.equal(back.magnitude, torch.cat([gate.magnitude, proj.magnitude]))
    with pytest.raises(UserError, match="cannot be fused"):
        fuse(gate, Adapter(torch.randn(2, 8), torch.randn(5, 2), 1.0))


def test_files_do_not_stay_mapped(saved):
    """A file that changes later must not change, or crash, what was read."""
    lora = saved(loras.make(1, ["img_in"]))
    before = lora.adapters["img_in"].up.clone()
    path = saved.folder / "l.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(lora.adapters["img_in"].up, before)


def test_partial_matches_warn_by_kind_and_name(saved):
    patches = loras.make(1, [*loras.ATTENTION[:3], "img_in"])
    tensors = loras.tensors(patches)
    tensors |= {"transformer.transformer_blocks.0.attn.odd.lora_A.weight": torch.zeros(1, 256), "note": torch.ones(1)}
    path = saved.folder / "style.safetensors"
    save_file(tensors, path)
    lora = read_lora(path, loras.CONFIG)
    assert lora.unmatched == ("transformer.transformer_blocks.0.attn.odd", "note")
    (warning,) = lora.warnings
    assert warning == (
        "LoRA style.safetensors: only part of it is used; matched layers: 3 attention, 0 mlp, 1 other; not matched: 2 "
        "(transformer.transformer_blocks.0.attn.odd, note)"
    )
    applied = apply_loras(loras.network(), [(lora, 0.5)])
    assert applied.report == [
        {
            "file": "style.safetensors",
            "digest": lora.digest,
            "strength": 0.5,
            "matched": {"attention": 3, "mlp": 0, "other": 1},
            "unmatched": list(lora.unmatched),
        }
    ]


@pytest.mark.parametrize("strength", [math.nan, math.inf, -101.0])
def test_strengths_out_of_range(dit, saved, strength):
    with pytest.raises(UserError, match="expected -100 to 100"):
        apply_loras(dit, [(saved(loras.make(1, ["img_in"])), strength)])
    assert not dit.img_in._forward_hooks


def change(path, key, value):
    tensors = load_file(path)
    save_file(tensors | {key: value}, path)
    return path


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight", "alpha", "lora_magnitude_vector"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite(saved, part, value):
    path = loras.write(saved.folder / "l.safetensors", loras.make(1, ["img_in", "proj_out"], alpha=1, dora=True))
    key = f"transformer.proj_out.{part}"
    tensor = load_file(path)[key].clone()
    tensor.view(-1)[-1] = value
    with pytest.raises(UserError, match=f"l.safetensors: {key} holds NaN or infinity"):
        read_lora(change(path, key, tensor), loras.CONFIG)


def test_loras_that_change_nothing(saved):
    patches = loras.make(1, ["img_in", "proj_out"])
    zero = {name: loras.Patch(p.a, torch.zeros_like(p.b)) for name, p in patches.items()}
    assert saved(zero | {"img_in": patches["img_in"]}).matched["other"] == 2
    with pytest.raises(UserError, match="every lora_B is zero"):
        saved(zero)
    with pytest.raises(UserError, match="every alpha is zero"):
        saved(loras.make(1, ["img_in", "proj_out"], alpha=0))
