"""A ComfyUI of our own: started in an empty base folder with this pack in it, asked over HTTP, stopped by its pid."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from qwen21.comfy_client.server import Server
from qwen21.errors import UserError
from tests.comfy.installation import ROOT, Installation

PACK = "qwen21_nodes"
PROBES = ROOT / "tests" / "comfy" / "probes"
STARTUP, LIMIT = 180.0, 180.0  # seconds
ARGUMENTS = ("--cpu", "--disable-auto-launch", "--disable-api-nodes", "--preview-method", "latent2rgb")


@dataclass
class Result:
    """What became of a workflow. `error` is the failed node's message, empty after success."""

    prompt_id: str
    history: dict[str, Any] = field(default_factory=dict)
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)  # as the socket brings them, headed by 8 bytes
    error: str = ""
    error_node: str = ""

    @property
    def outputs(self) -> dict[str, Any]:
        """By node id: `images`, `text`, ..."""
        return self.history.get("outputs", {})

    @property
    def interrupted(self) -> bool:
        return any(kind == "execution_interrupted" for kind, _ in self.messages)

    @property
    def executed(self) -> list[str]:
        """Ids of the nodes that ran, in order."""
        nodes = [data.get("node") for kind, data in self.messages if kind == "executing"]
        return [node for node in nodes if node is not None]


class Running:
    """A workflow that is queued or runs."""

    def __init__(self, server: LiveServer, nodes: dict[str, Any], extra_data: dict[str, Any]) -> None:
        self._api, client_id = server.api, uuid.uuid4().hex
        self._socket = self._api.listen(client_id)
        self.result = Result(str(uuid.uuid4()))  # so far
        body = {"prompt": nodes, "client_id": client_id, "prompt_id": self.result.prompt_id, "extra_data": extra_data}
        answer = json.loads(self._api.request("POST", "/prompt", json.dumps(body).encode())[1])
        self._over = "prompt_id" not in answer
        self._note_refusal(answer)

    def until(self, matches: Callable[[str, dict[str, Any]], bool], timeout: float = LIMIT) -> dict[str, Any]:
        """Listen until a message matches; returns its data. Fails when the workflow ends without one."""
        for kind, data in self._listen(timeout):
            if matches(kind, data):
                return data
        raise AssertionError(f"the workflow ended without such a message: {self.result}")

    def wait(self, timeout: float = LIMIT) -> Result:
        """Listen until the end."""
        for _ in self._listen(timeout):
            pass
        return self.result

    def _listen(self, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
        deadline = time.monotonic() + timeout
        while not self._over:
            assert time.monotonic() < deadline, f"the workflow did not end within {timeout} s"
            message = self._socket.receive(0.5)
            if isinstance(message, bytes):
                self.result.previews.append(message)
            if not isinstance(message, str):
                continue
            content = json.loads(message)
            kind, data = content["type"], content["data"]
            if data.get("prompt_id") != self.result.prompt_id:
                continue
            self.result.messages.append((kind, data))
            if kind == "executing" and data["node"] is None:
                self._finish()
            yield kind, data

    def _finish(self) -> None:
        self._over = True
        self._socket.__exit__()
        self.result.history = self._api.history(self.result.prompt_id)
        for kind, data in self.result.messages:
            if kind == "execution_error":
                self.result.error, self.result.error_node = data["exception_message"].strip(), data["node_id"]

    def _note_refusal(self, answer: dict[str, Any]) -> None:
        """An invalid output among valid ones is refused too; ComfyUI runs the others."""
        for node, found in (answer.get("node_errors") or {}).items():
            told = found["errors"][0]
            self.result.error, self.result.error_node = f"{told['message']}: {told['details']}", node
        if self._over:
            self._socket.__exit__()
            self.result.error = self.result.error or answer["error"]["message"]


class LiveServer:
    """A server that runs. `api` is the library's client of it."""

    def __init__(self, installation: Installation, base: Path, models: Path, *arguments: str) -> None:
        """`base` is an empty folder; input/, output/, temp/ and log.txt come into it."""
        self.installation, self.base, self.models = installation, base, models
        for name in ("custom_nodes", "input", "output", "user", "temp"):
            (base / name).mkdir(parents=True)
        (base / "models").symlink_to(models)
        (base / "custom_nodes" / PACK).symlink_to(ROOT)
        if PROBES.is_dir():
            (base / "custom_nodes" / "qwen21_probes").symlink_to(PROBES)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.api = Server(self.url)
        self._command = [installation.python_path, "main.py", "--port", str(port), "--base-directory", str(base)]
        self._command += [*ARGUMENTS, "--database-url", "sqlite:///:memory:", *arguments]

    def __enter__(self) -> LiveServer:
        with (self.base / "log.txt").open("wb") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(
                self._command, cwd=self.installation.path, env=self.installation.environment(), **options
            )
        deadline = time.monotonic() + STARTUP
        while True:
            with contextlib.suppress(UserError):
                self.api.check()
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"ComfyUI {self.installation} did not start:\n{self.log()[-4000:]}")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self, nodes: dict[str, Any], **extra_data: Any) -> Running:
        """Queue a workflow in API format. `extra_data` as /prompt takes it, such as `extra_pnginfo`."""
        return Running(self, nodes, extra_data)

    def post(self, nodes: dict[str, Any], timeout: float = LIMIT, **extra_data: Any) -> Result:
        """Run a workflow to its end, whatever that is."""
        return self.start(nodes, **extra_data).wait(timeout)

    def interrupt(self) -> None:
        """Whatever runs."""
        self._order("/interrupt", {})

    def free(self) -> None:
        """Unload the models and drop what was kept of earlier runs, as the buttons of the menu do."""
        self._order("/free", {"unload_models": True, "free_memory": True})

    def get(self, path: str) -> Any:
        """JSON."""
        status, data = self.api.request("GET", path)
        assert status == 200, f"GET {path}: {status}"
        return json.loads(data)

    def object_info(self) -> dict[str, Any]:
        return self.get("/object_info")

    def upload(self, file: Path) -> str:
        """Value for LoadImage's `image`."""
        return self.api.upload(file)

    def view(self, file: dict[str, Any]) -> bytes:
        return self.api.view(file)

    def images(self, result: Result) -> list[Image.Image]:
        """The pictures of a result, their metadata in `text`."""
        files = [file for output in result.outputs.values() for file in output.get("images", ())]
        pictures = [Image.open(io.BytesIO(self.view(file))) for file in files]
        for picture in pictures:
            picture.load()
        return pictures

    def log(self) -> str:
        return (self.base / "log.txt").read_text(encoding="utf-8", errors="replace")

    def _order(self, path: str, body: dict[str, Any]) -> None:
        assert self.api.request("POST", path, json.dumps(body).encode())[0] == 200
