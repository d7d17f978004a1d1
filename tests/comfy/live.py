"""Workflows on the live server, and what probes in them saw."""

from __future__ import annotations

from typing import Any

import torch

from tests.comfy.graphs import Graph, shown
from tests.comfy.server import LiveServer, Result


class Ran:
    """A workflow that ran to its end, whatever that was."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.outputs, self.executed, self.interrupted = result.outputs, result.executed, result.interrupted

    def shown(self, name: str = "out") -> Any:
        """What the ProbeShow `name` saw."""
        return shown(self.outputs, name)

    @property
    def latent(self) -> torch.Tensor:
        return self.shown()["samples"]


class Live:
    """`run` insists on success, `error` on failure."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.models = server, server.models
        self.version = tuple(int(part) for part in server.installation.version.split("."))

    def run(self, graph: Graph, **extra_data: Any) -> Ran:
        result = self.server.post(graph, **extra_data)
        assert not result.error and not result.interrupted, f"{result.error_node}: {result.error or 'interrupted'}"
        return Ran(result)

    def latent(self, graph: Graph) -> torch.Tensor:
        """The latent that the workflow's `out` shows."""
        return self.run(graph).latent

    def error(self, graph: Graph) -> tuple[str, str]:
        """(node, message) of the node that fails or is refused."""
        result = self.server.post(graph)
        assert result.error, f"no error: {result.outputs}"
        return result.error_node, result.error
