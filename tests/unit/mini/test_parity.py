"""The bundled miniature through diffusers and through us, in fp32: trained weights, where random ones prove less."""

from random import Random

import numpy as np
import pytest
import torch

from qwen21 import mini
from qwen21.checkpoint.load import find_folder
from qwen21.mini.model import RESOLUTION
from qwen21.mini.world import draw, random_task
from qwen21.pipeline import Pipeline
from qwen21.request import Request
from tests.support.tiny import Opened

STEPS = 20


@pytest.fixture(scope="module")
def oracle():
    return Opened(mini.WEIGHTS).pipeline()


@pytest.mark.parametrize("kind", ["paint", "recolor", "cut out", "combine"])
def test_pictures_equal_those_of_diffusers(oracle, kind):
    task = random_task(Random(kind), kind, held_out=True)
    references = tuple(draw(scene, RESOLUTION, RESOLUTION) for scene in task.references)
    (expected,) = oracle(
        task.prompt,
        image=list(references) or None,
        output_resolution=RESOLUTION,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(3),
    ).images
    request = Request(
        task.prompt,
        references=references,
        steps=STEPS,
        resolution=RESOLUTION,
        seed=3,
        edit_noise="released",
    )
    (got,) = Pipeline(find_folder(mini.WEIGHTS)).generate(request).images
    assert np.abs(np.asarray(got, int) - np.asarray(expected, int)).max() <= 1
