"""Waiting for a workflow: by the server's messages where they come, by asking where they do not."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from ...errors import UserError
from .messages import Closed, Messages
from .server import Server, ServerError
from .workflow import Workflow

TICK = 0.5  # seconds; how long one wait lasts
SILENCE = 5.0  # after so long without a message the server is asked
LOST = 60.0  # after so long without any answer it is given up
WARNINGS = "qwen21.warnings"  # the message in which our nodes send what is to be heeded, before the work
KEPT_WARNINGS = "qwen21_warnings"  # the same among what a node put out, which a server gives from its cache too


class Bar(Protocol):
    """What shows the progress: the command line's `ProgressBar`."""

    def stage(self, name: str) -> None: ...

    def step(self, done: int, steps: int, _latent: object) -> None: ...

    def warn(self, warning: str) -> None: ...


class Follower:
    """Follows one workflow to its end. `errors` are the lines of nodes that failed; warnings go to the bar at once."""

    def __init__(self, server: Server, socket: Messages | None, workflow: Workflow, prompt_id: str, bar: Bar) -> None:
        self._server, self._socket = server, socket
        self._workflow, self._prompt_id, self._bar = workflow, prompt_id, bar
        self.errors: list[str] = []
        self.tracebacks: list[str] = []
        self._warned: set[str] = set()

    def wait(self) -> dict[str, Any]:
        """The history entry of the workflow. Raises `ServerError` when there will be none."""
        self._bar.stage("waiting in the queue")
        heard = answered = time.monotonic()
        while True:
            message = self._receive()
            now = time.monotonic()
            if message is not None:
                heard = answered = now
                ended = self._is_end(message)
            else:
                ended = self._socket is None or now - heard >= SILENCE
            if not ended:
                continue
            try:
                if (entry := self._ask()) is not None:
                    self._note_end(entry)
                    return entry
                heard = answered = time.monotonic()
            except UserError as error:  # no answer, or a proxy's
                if now - answered > LOST:
                    raise ServerError(f"{self._server.url}: the server went away during the run") from error

    def _receive(self) -> str | bytes | None:
        if self._socket is not None:
            try:
                return self._socket.receive(TICK)
            except Closed:
                self._socket = None
        time.sleep(TICK)
        return None

    def _ask(self) -> dict[str, Any] | None:
        """The history entry, None while the workflow waits or runs."""
        queued = self._server.is_queued(self._prompt_id)  # before the history: the server moves it in one step
        entry = self._server.history(self._prompt_id)
        if entry is None and not queued:
            raise ServerError("the workflow was taken off the server's queue")
        return entry

    def _is_end(self, message: str | bytes) -> bool:
        """Show what a message tells. True for the last one of the workflow; its history is written by then."""
        if isinstance(message, bytes):
            return False  # a preview
        try:
            content = json.loads(message)
            kind, data = content["type"], content["data"]
            if data.get("prompt_id") != self._prompt_id:
                return False
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        if kind == "executing":
            node = data.get("node")
            if node is None:
                return True
            self._bar.stage(self._workflow.label(node))
        elif kind == "progress" and data.get("max", 0) >= data.get("value", 0) >= 1:
            self._bar.step(int(data["value"]), int(data["max"]), None)
        elif kind == WARNINGS:
            self._warn(str(data.get("node")), data.get("warnings"))
        elif kind == "execution_error":
            self._note_error(data)  # a blocked output is told here alone, while the rest of the workflow goes on
        return False

    def _warn(self, node: str, warnings: object) -> None:
        """Show each warning once, by whichever way it came first."""
        for warning in warnings if isinstance(warnings, list) else ():
            line = f"{self._workflow.label(node)}: {' '.join(str(warning).split())}"
            if line not in self._warned:
                self._warned.add(line)
                self._bar.warn(line)

    def _note_end(self, entry: dict[str, Any]) -> None:
        for node, content in (entry.get("outputs") or {}).items():
            self._warn(node, content.get(KEPT_WARNINGS))
        status = entry.get("status") or {}
        for kind, data in status.get("messages", []):
            if kind == "execution_error":
                self._note_error(data)
            elif kind == "execution_interrupted":
                self._note(f"{self._label(data)}: interrupted on the server")
        if status.get("status_str") == "error" and not self.errors:
            self._note("the server reports a failure without a reason; see its log")

    def _note_error(self, data: dict[str, Any]) -> None:
        what = data.get("exception_message") or data.get("exception_type") or "failed"
        self._note(f"{self._label(data)}: {' '.join(str(what).split())}", "".join(data.get("traceback") or []))

    def _note(self, line: str, traceback: str = "") -> None:
        if line not in self.errors:
            self.errors.append(line)
            self.tracebacks.append(traceback)

    def _label(self, data: dict[str, Any]) -> str:
        return self._workflow.label(str(data.get("node_id")), str(data.get("node_type") or ""))
