"""LoKr and LoHa beside the weights: as torch.kron and products entry by entry, merged in fp64, say."""

import copy
import random

import pytest
import torch

from qwen21.cli.inspect import inspect_report
from qwen21.errors import UserError
from qwen21.lora.apply import apply_loras
from qwen21.lora.read import read_lora
from tests.support import loras
from tests.support.lycoris import FORMS, STYLES, difference, lokr, normal, write

LAYER = "transformer_blocks.1.img_mlp.out"  # [256, 768]
FUSED = "transformer_blocks.0.img_mlp.gate_up"  # [1536, 256]
SHAPES = {LAYER: (256, 768), FUSED: (1536, 256), "transformer_blocks.0.attn.to_q": (256, 256)}


def merged(changes, strength, magnitudes=None):
    """The network with differences merged in fp64; `gate_up` changes gate_layer and proj."""
    dit = copy.deepcopy(loras.network())
    for layer, delta in changes.items():
        owners = [layer] if layer in dict(dit.named_modules()) else [
            layer.replace("gate_up", name) for name in ("gate_layer", "proj")
        ]  # fmt: skip
        magnitude = (None,) * 2 if magnitudes is None else magnitudes[layer].double().chunk(len(owners))
        for owner, part, length in zip(owners, delta.chunk(len(owners)), magnitude, strict=False):
            parameter = dit.get_submodule(owner).weight
            plain = parameter.detach().double()
            whole = plain + part
            if length is not None:
                whole = whole * (length.reshape(-1, 1) / whole.norm(dim=1, keepdim=True))
            parameter.data = (plain + strength * (whole - plain)).float()
    return dit


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def moved(path, strength=1.0):
    dit = loras.network()
    applied = apply_loras(dit, [(read_lora(path, loras.CONFIG), strength)])
    got = loras.velocity(dit)
    applied.remove()
    assert torch.equal(loras.velocity(dit), loras.velocity(loras.network()))
    return got


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("alpha", "strength"), [(None, 1.0), (1.5, 1.0), (4, -0.7)])
def test_beside_the_weights_is_as_merged(tmp_path, form, alpha, strength):
    patches = {layer: FORMS[form](*shape) for layer, shape in SHAPES.items()}
    path = write(tmp_path / "x.safetensors", patches, alpha=alpha)
    changes = {layer: difference(parts, alpha) for layer, parts in patches.items()}
    expected = loras.velocity(merged(changes, strength))
    assert relative(moved(path, strength), expected) < 1e-5
    assert relative(expected, loras.velocity(loras.network())) > 1e-3


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("form", ["LoHa", "LoKr, second low-rank"])
def test_every_style_of_keys(tmp_path, form, style):
    patches = {LAYER: FORMS[form](*SHAPES[LAYER])}
    got = moved(write(tmp_path / "x.safetensors", patches, style))
    assert torch.equal(got, moved(write(tmp_path / "y.safetensors", patches)))


@pytest.mark.parametrize("form", FORMS)
def test_with_dora(tmp_path, form):
    patches = {layer: FORMS[form](*shape) for layer, shape in SHAPES.items()}
    lengths = {layer: (1 + normal(rows, 1, seed=5)).abs() for layer, (rows, _) in SHAPES.items()}
    path = write(tmp_path / "x.safetensors", patches, magnitudes=lengths)
    changes = {layer: difference(parts, None) for layer, parts in patches.items()}
    assert relative(moved(path, 0.8), loras.velocity(merged(changes, 0.8, lengths))) < 1e-5


def test_a_stack_of_all_kinds(tmp_path):
    plain = loras.make(3, [LAYER])
    both = {name: {LAYER: FORMS[name](*SHAPES[LAYER])} for name in ("LoHa", "LoKr of whole matrices")}
    files = [write(tmp_path / f"{i}.safetensors", patches) for i, patches in enumerate(both.values())]
    files.append(loras.write(tmp_path / "lora.safetensors", plain))
    dit = loras.network()
    apply_loras(dit, list(zip([read_lora(file, loras.CONFIG) for file in files], (1, 0.5, -1), strict=True)))
    change = sum(s * difference(p[LAYER], None) for p, s in zip(both.values(), (1, 0.5), strict=True))
    expected = merged({LAYER: change - plain[LAYER].delta}, 1.0)
    assert relative(loras.velocity(dit), loras.velocity(expected)) < 1e-5


def test_inspect_names_the_kind(tmp_path):
    told_of = {"LoHa": "rank 3, LoHa", "LoKr, second low-rank": "rank 2, LoKr", "LoKr of whole matrices": "LoKr"}
    for form, told in told_of.items():
        path = write(tmp_path / "x.safetensors", {LAYER: FORMS[form](4096, 12288)})  # of the released transformer
        assert f"1 layers (1 mlp), {told}" in inspect_report(path)


def test_a_lokr_that_cannot_be_halved(tmp_path):
    path = write(tmp_path / "x.safetensors", {FUSED: {"lokr_w1": normal(3, 1), "lokr_w2": normal(512, 256)}})
    with pytest.raises(UserError, match="3 blocks of rows, which cannot be halved"):
        read_lora(path, loras.CONFIG)
    one = {"lokr_w1": normal(1, 1), "lokr_w2": normal(1536, 256)}
    assert (
        relative(moved(write(path, {FUSED: one})), loras.velocity(merged({FUSED: difference(one, None)}, 1.0))) < 1e-5
    )


BROKEN = {
    "half": (lambda p: p.pop("lokr_w2"), "no counterpart"),
    "convolution": (lambda p: p.update(lokr_t2=torch.ones(2, 2, 3, 3)), "is of a convolution"),
    "wrong size": (lambda p: p.update(lokr_w1=torch.ones(3, 4)), "do not fit the layer"),
    "three axes": (lambda p: p.update(lokr_w2=torch.ones(64, 192, 1)), "do not fit the layer"),
    "NaN": (lambda p: p["lokr_w1"].fill_(float("nan")), "NaN or infinity"),
    "zero": (lambda p: p["lokr_w1"].zero_(), "changes nothing"),
    "integers": (lambda p: p.update(lokr_w1=torch.ones(4, 4, dtype=torch.int32)), "expected floating-point"),
}


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_files(tmp_path, damage, words):
    parts = lokr(*SHAPES[LAYER])
    damage(parts)
    with pytest.raises(UserError, match=words) as caught:
        read_lora(write(tmp_path / "x.safetensors", {LAYER: parts}), loras.CONFIG)
    assert "\n" not in str(caught.value)


def test_damaged_files_are_refused_in_one_line(tmp_path):
    """Any part missing, of another shape, or renamed: read, or refused in one line."""
    for seed in range(60):
        rng = random.Random(seed)
        parts = rng.choice(list(FORMS.values()))(*SHAPES[LAYER])
        for _ in range(rng.randint(1, 2)):
            name = rng.choice(list(parts))
            change = rng.randrange(4)
            if change == 0 and len(parts) > 1:
                del parts[name]
            elif change == 1:
                parts[name] = torch.ones(rng.choice([(1,), (2, 3), (4, 4, 1), (256, 768)]))
            elif change == 2:
                parts[rng.choice(["lokr_w1", "lokr_w2_a", "hada_w1_b", "hada_t1", "x"])] = parts.pop(name)
            else:
                parts[name] = parts[name].T.contiguous()
        try:
            read_lora(write(tmp_path / "x.safetensors", {LAYER: parts}), loras.CONFIG)
        except UserError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 700
