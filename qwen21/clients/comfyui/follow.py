"""Wait for a workflow's end: by the server's messages where they arrive, else by polling."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from ...errors import UserError
from .messages import Closed, Messages
from .server import Server, ServerError
from .workflow import Workflow

TICK = 0.5  # seconds that one wait for a message lasts
SILENCE = 5.0  # seconds without a message, after which the server is polled
LOST = 60.0  # seconds without any answer, after which the server counts as gone
WARNINGS = "qwen21.warnings"  # the type of the message in which our nodes send warnings before they compute
KEPT_WARNINGS = "qwen21_warnings"  # the same in a node's outputs, which a server also returns from its cache


class Bar(Protocol):
    """The interface that progress is shown by, such as the command line's `ProgressBar`."""

    def stage(self, name: str) -> None: ...

    def step(self, done: int, steps: int, _latent: object) -> None: ...

    def warn(self, warning: str) -> None: ...


class Follower:
    """Follows one workflow to its end. `errors` holds lines about failed nodes; warnings go to the bar at once."""

    def __init__(self, server: Server, socket: Messages | None, workflow: Workflow, prompt_id: str, bar: Bar) -> None:
        self._server, self._socket = server, socket
        self._workflow, self._prompt_id, self._bar = workflow, prompt_id, bar
        self.errors: list[str] = []
        self.tracebacks: list[str] = []
        self._warned: set[str] = set()

    def wait(self) -> dict[str, Any]:
        """Wait for the workflow's end; return its history entry. Raises `ServerError` where there will be none."""
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
            except UserError as error:  # no answer, or the answer of a proxy
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
        """The workflow's history entry; None while it waits or runs."""
        queued = self._server.is_queued(self._prompt_id)  # before the history: the server moves it in one step
        entry = self._server.history(self._prompt_id)
        if entry is None and not queued:
            raise ServerError("the workflow was taken off the server's queue")
        return entry

    def _is_end(self, message: str | bytes) -> bool:
        """Show a message; return whether it is the workflow's last, by which time its history is written."""
        if isinstance(message, bytes):
            return False  # a preview picture
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
            self._note_error(data)  # a blocked output is reported only here, while the rest of the workflow goes on
        return False

    def _warn(self, node: str, warnings: object) -> None:
        """Show each warning once, whether it came by message or among the outputs."""
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
