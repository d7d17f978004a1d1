"""Networks of which only a part fits the card: whatever stays behind must be cast at use."""

import pytest

# The only holders of parameters that are no layers of ComfyUI's; their weights are moved where they are used.
CAST_AT_USE = {"dit": ["ZeroCentredRMSNorm"], "encoder": [], "vae": ["RMSNorm"]}
CAST_AT_USE |= {f"{kind} {name}": CAST_AT_USE[name] for kind in ("quantized", "gguf") for name in ("dit", "encoder")}


@pytest.mark.parametrize("room", ["half", "none"])
@pytest.mark.parametrize("network", CAST_AT_USE)
def test_no_layer_is_left_behind(inside, network, room):
    """On a meta device, which refuses to compute with weights of another device."""
    found = inside[network][room]
    assert "error" not in found, found["error"]
    assert found["devices"] == ["meta"] and found["shapes"] == inside[network]["expected"]
    if room == "none":
        assert found["there"] == 0
    else:
        assert 5 < found["there"] < inside[network]["parameters"] - 5


@pytest.mark.parametrize("network", CAST_AT_USE)
def test_every_holder_of_parameters_is_a_layer_of_comfyuis(inside, network):
    assert inside[network]["plain"] == CAST_AT_USE[network]
    leaves = {name.rpartition(".")[2] for name in inside[network]["buffers"]}
    assert leaves == ({"weight_scale", "rotation"} if "quantized" in network else set())


def test_a_vae_in_fp16_computes_again_what_overflows(inside):
    """NaN compares as false, so neither error may be one."""
    found = inside["half vae"]
    assert found["dtype"] == "torch.float16"
    assert 0 < found["usual"] < 0.02
    assert found["overflowing"] < 0.02


def test_a_batch_is_decoded_picture_by_picture(inside):
    one, four = inside["batch decode"]
    assert 0 < four <= 1.01 * one
