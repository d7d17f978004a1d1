"""Run a workflow with the prefix store beside one without, and read the sampler's report on it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import torch

from tests.comfy.graphs import Graph, against_fresh, loaders, node, prompt, sampler, two_references
from tests.comfy.models import DIT
from tests.comfy.workflow_runner import WorkflowRun, WorkflowRunner

PARTIAL = 1e-5  # of the largest value: text states of the same start round differently before another end
SEEDS = itertools.count(10_000)  # a new seed for every run, so that ComfyUI never answers from its cache


@dataclass(frozen=True)
class ReportedRun:
    ran: WorkflowRun
    latent: torch.Tensor
    fresh: torch.Tensor
    report: dict[str, Any]

    def reuse(self, side: str = "positive") -> dict[str, Any]:
        """The report's facts about the prefix of a guidance branch."""
        (facts,) = self.report["prefix"][side]
        return facts

    def tokens_up_to(self, references: int) -> int:
        """Number of tokens up to the end of the first `references` references, from the prompt's own report."""
        if not references:
            return 0
        seen = self.report["positive"]["references"][:references]
        return seen[-1]["slot"] + sum(reference["tokens"] for reference in seen)

    def is_right(self) -> bool:
        """Whether the latent equals the one without a store: exactly if nothing was reused, else within `PARTIAL`."""
        kinds = {facts["kind"] for side in ("positive", "negative") for facts in self.report["prefix"].get(side, [])}
        if not kinds & {"partial", "hit"}:
            return torch.equal(self.latent, self.fresh)
        return bool((self.latent - self.fresh).abs().max() <= PARTIAL * self.fresh.abs().max())


def run_beside_fresh(comfy: WorkflowRunner, graph: Graph, fresh_model: str = "") -> ReportedRun:
    """Run a workflow that samples in the node `sample`, beside a sampler without a store.

    `fresh_model` is the MODEL of the other sampler, if it has its own.
    """
    ran = comfy.run(against_fresh(graph, fresh_model))
    reported = ReportedRun(ran, ran.latent, ran.shown("fresh_out")["samples"], json.loads(ran.shown("report")))
    assert {"sample", "fresh"} <= set(ran.executed)
    return reported


def edit(make=sampler, cleared: bool = False, **nodes: Any) -> Graph:
    """A workflow that edits two references with a new seed.

    `cleared` empties the store first; arguments that are not nodes go to the sampler.
    """
    inputs = {key: nodes.pop(key) for key in list(nodes) if not isinstance(nodes[key], dict)}
    if cleared:
        nodes["press"] = node("ProbePress", model=inputs.get("model", ["dit", 0]), how="clear")
        inputs["model"] = ["press", 0]
    return two_references(**nodes) | {"sample": make(**({"seed": next(SEEDS)} | inputs))}


def look(model: str = "dit", after: str = "sample") -> dict[str, Any]:
    """A node that reads the facts of a MODEL's store after the node `after`."""
    return node("ProbeStore", model=[model, 0], after=[after, 0])


def loader(file: str = DIT, dtype: str = "default") -> dict[str, Any]:
    return node("Qwen21LoadDiT", file=file, dtype=dtype)


def encode(text: str = "put <image1> on <image2>", references: str = "refs", **inputs: Any) -> dict[str, Any]:
    """The node Qwen21EncodePrompt for a chain of references, with the VAE."""
    return prompt(text, references=[references, 0], vae=["vae", 0], **inputs)


def add(image: str, references: str = "", resolution: int = 64, **inputs: Any) -> dict[str, Any]:
    """The node Qwen21AddReference."""
    before = {"references": [references, 0]} if references else {}
    return node("Qwen21AddReference", image=[image, 0], resolution=resolution, fit="resize", **before, **inputs)


def picture(offset: int, width: int = 64, channels: int = 4) -> dict[str, Any]:
    return node("ProbeImage", n=1, height=64, width=width, channels=channels, offset=offset)


def run_and_report(
    comfy: WorkflowRunner, kind: str, references: int = 0, reason: str = "", **nodes: Any
) -> ReportedRun:
    """Run an edit; check its latent, and the report's `kind`, reused `references` and `reason`."""
    reported = run_beside_fresh(comfy, edit(**nodes))
    facts = reported.reuse()
    assert reported.is_right(), facts
    reused = facts["tokens"] if kind == "hit" else reported.tokens_up_to(references)
    assert (facts["kind"], facts["reused"]) == (kind, reused), facts
    assert reason in facts["reason"] and bool(facts["reason"]) == (kind != "hit"), facts
    return reported


def free(comfy: WorkflowRunner, **what: bool) -> dict[str, Any]:
    """POST /free; return the store's facts once the server has done it."""
    assert comfy.server.api.request("POST", "/free", json.dumps(what).encode())[0] == 200
    for _ in range(2):  # the server frees memory after the running workflow, which may be the first of the two
        ran = comfy.run(loaders() | {"look": look(after="dit")})
    return ran.shown("look")
