"""References whose resolution nobody chose."""

import numpy as np
import pytest
from PIL import Image

from qwen21.inputs.references import AUTO, Reference, following, settled


def noise(width=300, height=200):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels)


def chained(*asked):
    chain = []
    for resolution, fit in asked:
        chain.append(following(chain, noise(), resolution, fit))
    return chain


def digests(chain):
    return [each.digest for each in chain]


@pytest.mark.parametrize("resolution", [64, 512, 0])
@pytest.mark.parametrize("fit", ["resize", "mirror"])
def test_a_resolution_is_that_of_the_reference_before(resolution, fit):
    chain = chained((resolution, "resize"), (AUTO, fit), (AUTO, "resize"))
    wanted = [Reference.prepare(noise(), resolution, each) for each in ("resize", fit, "resize")]
    assert digests(chain) == digests(settled(chain, (96, 128))) == digests(wanted)


def test_the_first_is_as_the_model_has_it():
    chain = chained((AUTO, "resize"), (AUTO, "resize"), (256, "resize"), (AUTO, "resize"))
    for known, resolutions in ((None, (1024, 1024, 256, 256)), ((96, 128), (96, 96, 256, 256))):
        assert digests(settled(chain, known)) == [Reference.prepare(noise(), each).digest for each in resolutions]


def test_what_was_padded_stays_as_it_was_told():
    (reference,) = settled(chained((AUTO, "mirror")), (96, 128))
    told = Reference.prepare(noise(), 1024, "mirror")
    assert (reference.crop, reference.digest) == (told.crop, told.digest)
