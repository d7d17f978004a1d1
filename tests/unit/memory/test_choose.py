"""What is chosen from bytes: where the prefix lies, its codec, the VAE's tiles, and what is said of it."""

from dataclasses import replace

import pytest

from qwen21.choices import KV_STORAGES
from qwen21.memory.choose import Needs, choose_placement, size
from qwen21.models.dit import PREFILL_CHUNK
from qwen21.prefix import CODECS, FIDELITY, fitting_codec

GIB = 2**30
CODEC_BYTES = {"native": 40, "int8": 21, "fp8_v": 30, "fp8": 21}
IN_ORDER = {"native": 40, "int8": 30, "fp8_v": 25, "fp8": 24}  # each codec has amounts of memory that lead to it
NEEDS = Needs(
    weights={"dit": 100, "encoder": 120, "vae": 10},
    reading=10,
    prefix=CODEC_BYTES,
    prefill=dict.fromkeys(CODEC_BYTES, 20),
    step=dict.fromkeys(CODEC_BYTES, 10),
    offloaded_prefill=dict.fromkeys(CODEC_BYTES, 30),
    offloaded_step=dict.fromkeys(CODEC_BYTES, 10),
    decode={None: 80, 32: 40, 16: 20},
    encode={None: 40, 32: 20},
)


# --- the decision --------------------------------------------------------------------------------------------------
# The transformer, the VAE that waits to decode, the prefix, and activations with a tenth on top: 100 + 10 + 40 + 22 is
# 172 native; 100 + 10 + 33 with the prefix in RAM.


@pytest.mark.parametrize(
    ("free", "ram", "expected"),
    [
        (172, 0, ("gpu", "native", True)),
        (171, 80, ("cpu", "native", True)),
        (171, 79, ("gpu", "fp8_v", True)),  # made the most faithful here, so that the order decides
        (161, 79, ("gpu", "int8", True)),
        (152, 79, ("cpu", "fp8_v", True)),
        (152, 59, ("cpu", "int8", True)),
        (152, 41, ("cpu", "fp8", False)),
        (142, 80, ("cpu", "native", False)),
        (99, 10**6, ("cpu", "native", False)),
    ],
)
def test_where_and_how_the_prefix_is_kept(free, ram, expected):
    ordered = replace(NEEDS, prefix={name: CODEC_BYTES[name] for name in ("native", "fp8_v", "int8", "fp8")})
    ordered = replace(ordered, weights=NEEDS.weights | {"encoder": 1})
    choice = choose_placement(ordered, free, ram)
    assert (choice.placement, choice.codec, choice.fits) == expected


@pytest.mark.parametrize(
    ("ram", "codec", "fits"),
    [(190, "native", True), (189, "int8", True), (153, "int8", True), (152, "int8", False), (151, "fp8", False)],
)
def test_on_the_cpu_everything_is_ram(ram, codec, fits):
    """Half of what weights leave of it may hold the prefix, and activations need the other. Where these do not fit, it
    is the most faithful codec that the half holds, else the last."""
    choice = choose_placement(replace(NEEDS, weights=NEEDS.weights | {"encoder": 1}), 10**6, ram, gpu=False)
    assert (choice.placement, choice.codec, choice.fits) == ("cpu", codec, fits)


@pytest.mark.parametrize("codec", ["native", "fp8"])
@pytest.mark.parametrize("placement", ["gpu", "cpu"])
def test_what_is_asked_for_is_kept(codec, placement):
    choice = choose_placement(NEEDS, 1000, 1000, placement=placement, codec=codec)
    assert (choice.placement, choice.codec) == (placement, codec)


@pytest.mark.parametrize(("free", "decode", "encode"), [(110, None, None), (109, 32, None), (59, 16, 32), (34, 16, 32)])
def test_tiles_are_the_largest_that_fit(free, decode, encode):
    """Beside 10 of weights, with a quarter on top."""
    choice = choose_placement(NEEDS, free, 10**6)
    assert (choice.tile_decode, choice.tile_encode) == (decode, encode)
    assert choose_placement(replace(NEEDS, encode={}), free, 10**6).tile_encode is None


@pytest.mark.parametrize(("free", "together"), [(377, True), (376, False), (369, False)])
def test_what_is_laid_out_must_fit_beside_all_networks(free, together):
    """230 of weights, 40 of prefix, and 22 of activations beside 85 laid out."""
    assert choose_placement(replace(NEEDS, contiguous=(85,)), free, 10**6).keep_loaded is together


@pytest.mark.parametrize(("free", "together"), [(370, True), (369, False)])
def test_all_networks_stay_where_they_fit_together(free, together):
    """230 of weights, 40 of prefix and the fullest stage: 80 and a quarter."""
    assert choose_placement(NEEDS, free, 10**6).keep_loaded is together


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"weights": {"dit": 10**6, "encoder": 1, "vae": 1}}, ["transformer's weights", "smaller file"]),
        ({"weights": {"dit": 1, "encoder": 10**6, "vae": 1}}, ["text encoder", "smaller file"]),
        ({"offloaded_prefill": dict.fromkeys(CODEC_BYTES, 9999), "prefill": dict.fromkeys(CODEC_BYTES, 9999)},
         ["transformer's stages", "fewer references"]),
        ({"prefix": dict.fromkeys(CODEC_BYTES, 10**4)}, ["half", "fewer references"]),
        ({"decode": {None: 9999, 8: 9998}}, ["VAE decodes", "smaller resolution"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_what_to_change(changed, words):
    choice = choose_placement(replace(NEEDS, **changed), 1000, 1000)
    misfits = [reason for reason in choice.reasons if reason.startswith("does not fit: ")]
    assert choice.fits is (not words) and len(misfits) == bool(words)
    assert all(word in misfits[0] for word in words)
    assert choice.chunk == PREFILL_CHUNK


def test_every_codec_has_its_place():
    assert {"auto", *FIDELITY} == {"auto", *CODECS} == set(KV_STORAGES)


@pytest.mark.parametrize(
    ("free", "codecs"),
    [
        (132, set(IN_ORDER)),  # nothing fits beside the transformer: half of the RAM decides
        (158, {"native", "fp8_v"}),  # 26 are left, and native goes to RAM
        (162, {"native", "int8"}),
        (172, {"native"}),
        (None, set(IN_ORDER)),
    ],
)
def test_a_run_chooses_the_same_codec(free, codecs):
    """A run decides when the transformer is loaded, from what is then left, less the activations. `codecs` are those
    that some amount of RAM below 300 leads to."""
    needs = replace(NEEDS, prefix=IN_ORDER, offloaded_prefill=NEEDS.prefill, offloaded_step=NEEDS.step)
    needs, gpu, chosen = replace(needs, weights=NEEDS.weights | {"encoder": 1}), free is not None, set()
    left = free - 110 - 22 if gpu else None
    for ram in range(300):
        choice = choose_placement(needs, free or 0, ram, gpu=gpu)
        if choice.fits:
            chosen.add(choice.codec)
            assert choice.codec == fitting_codec(IN_ORDER, left, ram if gpu else ram - 110)
    assert chosen == codecs


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2 * GIB, "2.00 GiB"), (123 * GIB, "123.0 GiB")],
)
def test_bytes_for_people(nbytes, shown):
    assert size(nbytes) == shown
