"""Hearing a server's messages by the package websocket-client."""

import json
import socket
import sys

import pytest

from qwen21.cli.main import main
from qwen21.clients.comfyui.messages import Closed
from qwen21.clients.comfyui.run import UNHEARD
from qwen21.clients.comfyui.server import Server
from tests.support.fake_comfyui import FakeComfy


def test_the_server_is_heard_without_origin_or_proxy(monkeypatch):
    """ComfyUI refuses an Origin that is not its Host; a proxy of the environment would not reach this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FakeComfy() as fake, Server(fake.url).listen("me") as messages:
        assert "status" in messages.receive(5)
        request = fake.listeners[0].request
    assert request.startswith(b"GET /ws?clientId=me HTTP/1.1") and b"\nOrigin" not in request


def test_a_message_in_pieces_is_lost_nowhere(monkeypatch):
    """A wait that ends within a message leaves what came of it for the next."""
    with FakeComfy() as fake, Server(fake.url).listen("me") as messages:
        assert "status" in messages.receive(5)
        (listener,) = fake.listeners
        data = listener.framed("café")
        listener.connection.sendall(data[:4])
        assert messages.receive(0.05) is None
        listener.connection.sendall(data[4:])
        assert messages.receive(5) == "café"
        fake.hang_up()
        with pytest.raises(Closed):
            messages.receive(5)


@pytest.mark.parametrize("port", ["nobody", "no WebSocket"])
def test_where_no_websocket_answers_is_an_oserror(port):
    with FakeComfy() as fake:
        fake.has_socket = False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = fake.url if port == "no WebSocket" else f"http://127.0.0.1:{free.getsockname()[1]}"
            with pytest.raises(OSError):
                Server(url).listen("me")


def test_without_the_package_the_server_is_asked_and_that_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "websocket", None)
    (tmp_path / "w.json").write_text(json.dumps({"9": {"class_type": "SaveImage", "inputs": {}}}))
    output = {"filename": "a.png", "subfolder": "", "type": "output"}
    heard = []
    with FakeComfy(lambda fake: (heard.extend(fake.listeners), fake.finish({"9": {"images": [output]}}))) as fake:
        fake.files = {"a.png": b"x"}
        assert main(["run", str(tmp_path / "w.json"), "--server", fake.url, "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr()
    assert (heard, (tmp_path / "a.png").read_bytes(), seen.out) == ([], b"x", f"{tmp_path / 'a.png'}\n")
    assert seen.err == f"qwen21: warning: {UNHEARD}\n" and "pip install websocket-client" in UNHEARD
