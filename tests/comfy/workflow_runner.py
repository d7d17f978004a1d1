"""Run workflows on the live server, and read what their probes saw."""

from __future__ import annotations

from typing import Any

import torch

from tests.comfy.graphs import Graph, shown
from tests.comfy.server import LiveServer, Result


class WorkflowRun:
    """A workflow that ended, in whatever way."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.outputs, self.executed, self.interrupted = result.outputs, result.executed, result.interrupted

    def shown(self, name: str = "out") -> Any:
        """What the ProbeShow `name` received."""
        return shown(self.outputs, name)

    @property
    def latent(self) -> torch.Tensor:
        return self.shown()["samples"]


class WorkflowRunner:
    """Runs workflows: `run` requires success, `error` failure."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.models = server, server.models
        self.version = tuple(int(part) for part in server.installation.version.split("."))

    def run(self, graph: Graph, **extra_data: Any) -> WorkflowRun:
        result = self.server.post(graph, **extra_data)
        assert not result.error and not result.interrupted, f"{result.error_node}: {result.error or 'interrupted'}"
        return WorkflowRun(result)

    def latent(self, graph: Graph) -> torch.Tensor:
        """Run a workflow and return the latent that its `out` shows."""
        return self.run(graph).latent

    def error(self, graph: Graph) -> tuple[str, str]:
        """Run a workflow that must fail or be refused; return (node, message)."""
        result = self.server.post(graph)
        assert result.error, f"no error: {result.outputs}"
        return result.error_node, result.error
