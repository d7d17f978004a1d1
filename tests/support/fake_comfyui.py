"""A fake ComfyUI server: the HTTP interface and WebSocket that a client sees."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.server import ServerProtocol


class _Listener:
    """A client's WebSocket: the protocol is that of the package websockets, the connection that of the HTTP request."""

    def __init__(self, connection: Any, request: bytes) -> None:
        self.connection, self.request, self._protocol = connection, request, ServerProtocol()
        self._protocol.receive_data(request)
        self._protocol.send_response(self._protocol.accept(self._protocol.events_received()[0]))
        self.connection.sendall(b"".join(self._protocol.data_to_send()))

    def send(self, message: str | bytes) -> None:
        self.connection.sendall(self.framed(message))

    def framed(self, message: str | bytes) -> bytes:
        """Bytes of the message as sent over the connection."""
        if isinstance(message, str):
            self._protocol.send_text(message.encode())
        else:
            self._protocol.send_binary(message)
        return b"".join(self._protocol.data_to_send())

    def close(self) -> None:
        self._protocol.send_close()
        self.connection.sendall(b"".join(self._protocol.data_to_send()))
        self.connection.shutdown(2)


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early, as tests do on purpose; the default prints a traceback to stderr."""


class FakeComfy:
    """A fake server. `play` runs in its own thread once a workflow is queued; it sends events and ends with `finish`.

    Attributes record the requests: `posted` (bodies of /prompt), `uploads` ((name, data)), `calls` ((path, body)).
    """

    def __init__(self, play: Callable[[FakeComfy], None] | None = None) -> None:
        self.play = play or (lambda fake: fake.finish())
        self.posted: list[dict[str, Any]] = []
        self.uploads: list[tuple[str, bytes]] = []
        self.calls: list[tuple[str, Any]] = []
        self.views: list[dict[str, str]] = []
        self.files: dict[str, bytes] = {}
        self.object_info: dict[str, Any] = {}
        self.answer: tuple[int, dict[str, Any]] | None = None
        self.has_socket = self.is_comfy = True
        self.running: list[str] = []
        self.entries: dict[str, Any] = {}
        self.listeners: list[_Listener] = []
        self._httpd = _QuietServer(("127.0.0.1", 0), _handler(self))
        self._httpd.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._httpd.server_port}"

    @property
    def prompt_id(self) -> str:
        return self.posted[-1]["prompt_id"]

    def __enter__(self) -> FakeComfy:
        threading.Thread(target=self._httpd.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._httpd.shutdown()
        self._httpd.server_close()

    def run(self) -> None:
        try:
            self.play(self)
        except BaseException:
            self.running.clear()  # so that the client does not wait for it
            raise

    def send(self, message: str | bytes) -> None:
        for listener in self.listeners:
            listener.send(message)

    def send_event(self, kind: str, **data: Any) -> None:
        """Send an event about the running workflow."""
        self.send(json.dumps({"type": kind, "data": {"prompt_id": self.prompt_id, **data}}))

    def finish(
        self, outputs: dict[str, Any] | None = None, error: dict[str, Any] | None = None, announced: bool = True
    ):
        """End the workflow as ComfyUI does: announce success, write the history, then announce the last `executing`.

        Without `announced` only the history is written.
        """
        messages = [["execution_start", {}]] + ([["execution_error", error]] if error else [])
        if not error and announced:
            self.send_event("execution_success")
            time.sleep(0.05)
        status = {"status_str": "error" if error else "success", "completed": not error, "messages": messages}
        self.entries[self.prompt_id] = {"outputs": outputs or {}, "status": status}
        self.running.remove(self.prompt_id)
        if announced:
            self.send_event("executing", node=None)

    def hang_up(self) -> None:
        for listener in self.listeners:
            with contextlib.suppress(OSError):
                listener.close()
        self.listeners.clear()


def _handler(fake: FakeComfy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, value: Any, status: int = 200) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            name = parts.path.rsplit("/", 1)[-1]
            if parts.path == "/ws":
                self.shake_hands()
            elif not fake.is_comfy:
                self.answer({})
            elif parts.path == "/queue":
                self.answer({"queue_running": [[0, name] for name in fake.running], "queue_pending": []})
            elif parts.path.startswith("/history/"):
                self.answer({name: fake.entries[name]} if name in fake.entries else {})
            elif parts.path.startswith("/object_info/"):
                self.answer({name: fake.object_info[name]} if name in fake.object_info else {})
            elif parts.path == "/view":
                query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
                fake.views.append(query)
                known = query["filename"] in fake.files
                self.answer(fake.files.get(query["filename"], b""), 200 if known else 404)
            else:
                self.answer(b"not found", 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/upload/image":
                fields = re.search(rb'name="image"; filename="([^"]*)"\r\n.*?\r\n\r\n(.*)\r\n--', body, re.DOTALL)
                fake.uploads.append((fields[1].decode(), fields[2]))
                self.answer({"name": f"kept {fields[1].decode()}", "subfolder": "sub", "type": "input"})
                return
            value = json.loads(body)
            fake.calls.append((self.path, value))
            if self.path != "/prompt":
                self.answer({})
                return
            fake.posted.append(value)
            if fake.answer:
                self.answer(fake.answer[1], fake.answer[0])
                return
            fake.running.append(fake.prompt_id)
            self.answer({"prompt_id": fake.prompt_id, "number": 1, "node_errors": {}})
            threading.Thread(target=fake.run, daemon=True).start()

        def shake_hands(self) -> None:
            if not fake.has_socket:
                self.answer(b"no", 404)
                return
            listener = _Listener(self.connection, f"{self.requestline}\n{self.headers}".replace("\n", "\r\n").encode())
            fake.listeners.append(listener)
            listener.send(json.dumps({"type": "status", "data": {"sid": "x"}}))
            while self.connection.recv(4096):  # until the client has disconnected
                pass
            if listener in fake.listeners:
                fake.listeners.remove(listener)
            self.close_connection = True

    return Handler
