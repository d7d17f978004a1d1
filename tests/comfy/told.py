"""A run by way of the prefix store beside a fresh one, and what the sampler's report tells of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import torch

from tests.comfy.graphs import Graph, against_fresh, loaders, node, prompt, sampler, two_references
from tests.comfy.live import Live, Ran
from tests.comfy.models import DIT

PARTIAL = 1e-5  # of the largest value: text states of the same head round differently behind another tail
SEEDS = itertools.count(10_000)  # another one for every run, so that ComfyUI's cache has nothing to say


@dataclass(frozen=True)
class Told:
    ran: Ran
    latent: torch.Tensor
    fresh: torch.Tensor
    report: dict[str, Any]

    def reuse(self, side: str = "positive") -> dict[str, Any]:
        """What the report says of a side's prefix."""
        (facts,) = self.report["prefix"][side]
        return facts

    def head(self, references: int) -> int:
        """Tokens up to the end of so many references, counted from the prompt's own report."""
        if not references:
            return 0
        seen = self.report["positive"]["references"][:references]
        return seen[-1]["slot"] + sum(reference["tokens"] for reference in seen)

    def is_right(self) -> bool:
        """As the fresh one: bit for bit where nothing was reused."""
        kinds = {facts["kind"] for side in ("positive", "negative") for facts in self.report["prefix"].get(side, [])}
        if not kinds & {"partial", "hit"}:
            return torch.equal(self.latent, self.fresh)
        return bool((self.latent - self.fresh).abs().max() <= PARTIAL * self.fresh.abs().max())


def tell(comfy: Live, graph: Graph, fresh_model: str = "") -> Told:
    """Run a workflow that samples by `sample`, beside a sampler that uses no store (on another MODEL if named)."""
    ran = comfy.run(against_fresh(graph, fresh_model))
    told = Told(ran, ran.latent, ran.shown("fresh_out")["samples"], json.loads(ran.shown("report")))
    assert {"sample", "fresh"} <= set(ran.executed)
    return told


def edit(make=sampler, cleared: bool = False, **nodes: Any) -> Graph:
    """An edit of two references with a new seed. `cleared` empties the store before; inputs go to the sampler."""
    inputs = {key: nodes.pop(key) for key in list(nodes) if not isinstance(nodes[key], dict)}
    if cleared:
        nodes["press"] = node("ProbePress", model=inputs.get("model", ["dit", 0]), how="clear")
        inputs["model"] = ["press", 0]
    return two_references(**nodes) | {"sample": make(**({"seed": next(SEEDS)} | inputs))}


def look(model: str = "dit", after: str = "sample") -> dict[str, Any]:
    """The facts of a MODEL's store after a node."""
    return node("ProbeStore", model=[model, 0], after=[after, 0])


def loader(file: str = DIT, dtype: str = "default") -> dict[str, Any]:
    return node("Qwen21LoadDiT", file=file, dtype=dtype)


def encode(text: str = "put <image1> on <image2>", references: str = "refs", **inputs: Any) -> dict[str, Any]:
    """Qwen21EncodePrompt of a chain of references, with the VAE."""
    return prompt(text, references=[references, 0], vae=["vae", 0], **inputs)


def add(image: str, references: str = "", resolution: int = 64, **inputs: Any) -> dict[str, Any]:
    """Qwen21AddReference."""
    before = {"references": [references, 0]} if references else {}
    return node("Qwen21AddReference", image=[image, 0], resolution=resolution, fit="resize", **before, **inputs)


def picture(offset: int, width: int = 64, channels: int = 4) -> dict[str, Any]:
    return node("ProbeImage", n=1, height=64, width=width, channels=channels, offset=offset)


def run_and_report(comfy: Live, kind: str, references: int = 0, reason: str = "", **nodes: Any) -> Told:
    """A run whose picture is right and whose report says so: `kind`, the references reused, and why no more."""
    told = tell(comfy, edit(**nodes))
    facts = told.reuse()
    assert told.is_right(), facts
    reused = facts["tokens"] if kind == "hit" else told.head(references)
    assert (facts["kind"], facts["reused"]) == (kind, reused), facts
    assert reason in facts["reason"] and bool(facts["reason"]) == (kind != "hit"), facts
    return told


def free(comfy: Live, **what: bool) -> dict[str, Any]:
    """POST /free; returns the store's facts once the server has done it."""
    assert comfy.server.api.request("POST", "/free", json.dumps(what).encode())[0] == 200
    for _ in range(2):  # orders are carried out after the workflow that runs, if one came first
        ran = comfy.run(loaders() | {"look": look(after="dit")})
    return ran.shown("look")
