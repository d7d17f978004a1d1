"""The HTTP interface of a ComfyUI server, as far as running a workflow needs it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ...errors import UserError
from .messages import Messages

TIMEOUT = 60.0  # seconds; a server that loads a model answers late
CANCEL_TIMEOUT = 5.0
EXPECTED = "expected such as http://127.0.0.1:8188"


class ServerError(RuntimeError):
    """The server could not finish what was asked; the message is one line."""


class Server:
    """One ComfyUI by its address. Every request opens a new connection; proxies of the environment are not used."""

    def __init__(self, url: str) -> None:
        self.url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise UserError(f"--server {url}: {error}; {EXPECTED}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--server {url}: no address of a server, {EXPECTED}")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")

    def check(self) -> None:
        """Raise `UserError` unless a ComfyUI answers."""
        if "queue_running" not in self._json("GET", "/queue"):
            raise UserError(f"{self.url}: no ComfyUI answers there; give the address that its log shows")

    def listen(self, client_id: str) -> Messages:
        """Listen to the messages for `client_id`. Raises OSError where no WebSocket gets through, as with some proxies.

        Needs the package websocket-client, see `can_listen`.
        """
        connection = socket.create_connection((self._host, self._port), TIMEOUT)
        if self._tls:
            connection = ssl.create_default_context().wrap_socket(connection, server_hostname=self._host)
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{'wss' if self._tls else 'ws'}://{host}:{self._port}{self._prefix}/ws?clientId={quote(client_id)}"
        return Messages(connection, address)

    def inputs_of(self, class_type: str) -> list[str]:
        """Names of all inputs of a node class; empty if the server does not know the class."""
        info = self._json("GET", f"/object_info/{quote(class_type, safe='')}").get(class_type, {})
        groups = info.get("input", {})
        return [name for group in ("required", "optional") for name in groups.get(group, {})]

    def upload(self, file: Path) -> str:
        """Put a picture into the server's input folder; return the value for `LoadImage`'s input.

        The server renames a picture whose name is taken by other content, and answers with the name it chose.
        """
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); give a picture file") from error
        name = re.sub(r'[\x00-\x1f"\\]', lambda match: f"%{ord(match[0]):02X}", file.name)
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
        status, answer = self.request("POST", "/upload/image", body, f"multipart/form-data; boundary={boundary}")
        if status == 413:
            raise UserError(f"{file}: the server takes no file this large; see ComfyUI's --max-upload-size")
        kept = self._parse("POST", "/upload/image", status, answer)
        return "/".join(part for part in (kept.get("subfolder"), kept["name"]) if part)

    def post(self, nodes: dict[str, Any], client_id: str, prompt_id: str) -> dict[str, Any]:
        """Queue a workflow. Returns the answer: `prompt_id`, or an `error`; with either, `node_errors` by node id."""
        # extra_pnginfo: the sampler stores its report there, from where it gets into the saved pictures
        body = {"prompt": nodes, "client_id": client_id, "prompt_id": prompt_id, "extra_data": {"extra_pnginfo": {}}}
        status, answer = self.request("POST", "/prompt", json.dumps(body).encode())
        return self._parse("POST", "/prompt", 200 if status == 400 else status, answer)

    def is_queued(self, prompt_id: str) -> bool:
        """Whether the workflow waits or runs."""
        queue = self._json("GET", "/queue")
        return any(item[1] == prompt_id for key in ("queue_running", "queue_pending") for item in queue[key])

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """History entry of a workflow; None before its end."""
        return self._json("GET", f"/history/{quote(prompt_id, safe='')}").get(prompt_id)

    def view(self, file: dict[str, Any]) -> bytes:
        """Fetch the content of a file that a node put out: `filename`, `subfolder`, `type`."""
        query = urlencode({key: file.get(key) or "" for key in ("filename", "subfolder", "type")})
        status, data = self.request("GET", f"/view?{query}")
        if status != 200:
            raise ServerError(f"{file['filename']}: the server does not hand out this output (status {status})")
        return data

    def cancel(self, prompt_id: str) -> None:
        """Remove a workflow from the queue, and interrupt it if it runs. Other workflows go on."""
        for path, body in (("/queue", {"delete": [prompt_id]}), ("/interrupt", {"prompt_id": prompt_id})):
            self.request("POST", path, json.dumps(body).encode(), timeout=CANCEL_TIMEOUT)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout: float = TIMEOUT,
    ) -> tuple[int, bytes]:
        """Send a request; return status and body of the answer. Raises `UserError` where there is no answer."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        headers = {} if body is None else {"Content-Type": content_type}
        try:
            connection = kind(self._host, self._port, timeout=timeout)
            try:
                connection.request(method, self._prefix + path, body, headers)
                response = connection.getresponse()
                return response.status, response.read()
            finally:
                connection.close()
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            problem = (
                f"{self.url}: no server answers there ({reason}); start ComfyUI, or give its address with --server"
            )
            raise UserError(problem) from error

    def _json(self, method: str, path: str) -> dict[str, Any]:
        return self._parse(method, path, *self.request(method, path))

    def _parse(self, method: str, path: str, status: int, answer: bytes) -> dict[str, Any]:
        try:
            value = json.loads(answer) if status == 200 else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(
                f"{self.url}: answers {method} {path} not as ComfyUI does (status {status}); check --server"
            )
        return value
