"""What training runs is what sampling runs, and a training that was stopped goes on as if it had not been."""

from random import Random

import pytest
import torch

from qwen21.checkpoint.load import module_of
from qwen21.inputs.prompt import layout_tokens
from qwen21.inputs.references import Reference, vision_patches
from qwen21.inputs.tokenizer import load_tokenizer
from qwen21.mini import model
from qwen21.mini.training import dit as train_dit
from qwen21.mini.training import joint_pass
from qwen21.mini.training import vae as train_vae
from qwen21.mini.training.loop import Plan, Training
from qwen21.mini.world import draw, random_task
from tests.support.tiny import randomise


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    model.write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def networks():
    return [
        randomise(module_of(slot, config).to_empty(device="cpu"), 3)
        for slot, config in (("dit", model.DIT), ("encoder", model.ENCODER))
    ]


@pytest.mark.parametrize("kind", ["paint", "recolor", "combine"])
@torch.no_grad()
def test_joint_pass_equals_what_samples(networks, tokenizer, kind):
    dit, encoder = networks
    rng, tasks = Random(1), []
    while len(tasks) < 3:
        task = random_task(rng, kind)
        length = len(tokenizer.encode(task.prompt))
        if not tasks or length == len(tokenizer.encode(tasks[0].prompt)):
            tasks.append(task)
    prepared = [[Reference.prepare(draw(scene, 96, 64), 78) for scene in task.references] for task in tasks]
    layouts = [layout_tokens(task.prompt, tokenizer, [(1, 4, 6)] * len(task.references)) for task in tasks]
    patches = [
        torch.cat([vision_patches(reference.over_white)[0] for reference in column])
        for column in zip(*prepared, strict=True)
    ]
    ids = torch.tensor([layout.ids for layout in layouts])
    states = joint_pass.text_states(encoder, ids, layouts[0], patches)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(3, 64, 3, 4, generator=generator)
    references = [torch.randn(3, 64, 4, 6, generator=generator) for _ in prepared[0]]
    sigma = torch.tensor([0.2, 0.5, 0.9])
    got = joint_pass.velocity(dit, states, references, layouts[0].image_slots, target, sigma)
    for i, task in enumerate(tasks):
        alone = encoder.encode(tokenizer, task.prompt, prepared[i])
        torch.testing.assert_close(states[i], alone.states, rtol=0, atol=2e-5)
        prefix = dit.prefill(alone.states, [r[i] for r in references], alone.image_slots)
        expected = dit.denoise(target[i : i + 1], sigma[i], prefix)
        assert expected.std() > 0.1
        torch.testing.assert_close(got[i : i + 1], expected, rtol=0, atol=5e-5)


@torch.no_grad()
def test_slots_alone_tell_two_references_apart(tokenizer, monkeypatch):
    """Where the encoder sees them exchanged, the transformer's slots keep their order."""
    vae = randomise(module_of("vae", model.VAE).to_empty(device="cpu"), 3)
    monkeypatch.setattr(train_dit, "KINDS", {"combine": 1})
    batches = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(train_dit, "EXCHANGED", share)
        batches.append(train_dit.make_batch(vae, tokenizer, Random(1)))
    plain, exchanged = batches
    assert [torch.equal(a, b) for a, b in zip(plain.patches, exchanged.patches[::-1], strict=True)] == [True, True]
    assert not torch.equal(*plain.patches)
    assert all(torch.equal(a, b) for a, b in zip(plain.references, exchanged.references, strict=True))
    assert torch.equal(plain.target, exchanged.target) and torch.equal(plain.ids, exchanged.ids)


def test_every_word_of_the_world_is_one_token(tokenizer):
    from qwen21.mini.world import COLORS, GROUNDS, KINDS, PLACES, SIZES

    words = {word for names in (COLORS, GROUNDS, KINDS, PLACES, SIZES) for name in names for word in name.split()}
    assert [word for word in words if len(tokenizer.encode(" " + word)) != 1] == []
    assert max(tokenizer.special.values()) < model.VOCABULARY


def test_folded_vae_gives_latents_near_the_released_range():
    config = model.VAE
    torch.manual_seed(0)
    network = train_vae.VAETrainer(config).vae.eval()
    pixels = train_vae.pixels(Random(0), 48, 2)
    with torch.no_grad():
        plain = network.encode_coarse(network.encoder.fine(pixels))
        decoded = network.decode(plain)
        train_vae.fold(network)
        raw = network.encode(pixels)
        torch.testing.assert_close(network.normalise(raw), plain, rtol=0, atol=1e-4)
        torch.testing.assert_close(network.decode(raw), decoded, rtol=0, atol=1e-4)


def test_training_goes_on_where_it_stopped(tmp_path):
    plan = Plan(steps=12, rate=1e-2, hidden=lambda name, value: value.ndim == 2)

    def run(file, stops):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = torch.nn.Linear(3, 2)

        def loss(step, rng, generator):
            x = torch.randn(4, 3, generator=generator)
            return (network(x) - rng.random()).square().mean()

        for stop in (*stops, plan.steps):
            training = Training(network, plan, file)
            while training.step < stop:
                training.advance(loss)
            training.save()
        return training.use_mean().weight.detach()

    assert torch.equal(run(tmp_path / "a.safetensors", []), run(tmp_path / "b.safetensors", [3, 7]))
