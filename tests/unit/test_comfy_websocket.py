"""The WebSocket client against frames made by hand."""

import os
import socket
import threading
import time

import pytest

from qwen21.comfy_client.websocket import Closed, WebSocket
from tests.fake_comfy import FakeComfy, frame


@pytest.fixture
def wire():
    """(WebSocket, the server's end of it), hands shaken."""
    with FakeComfy() as fake, socket.create_connection(("127.0.0.1", int(fake.url.rsplit(":")[-1]))) as connection:
        client = WebSocket(connection, "h", "/ws")
        assert "status" in client.receive(5)
        server = fake.connections[0]
        yield client, server


def test_frames_in_pieces(wire):
    client, server = wire
    sizes = [0, 1, 125, 126, 127, 65535, 65536, 300_000]
    data = b"".join(frame(bytes([size % 251]) * size) for size in sizes)

    def trickle():
        for start in range(0, len(data), 50_001):
            server.sendall(data[start : start + 50_001])
            time.sleep(0.01)

    threading.Thread(target=trickle, daemon=True).start()
    for size in sizes:
        assert client.receive(5) == bytes([size % 251]) * size
    server.sendall(frame("café")[:4])
    assert client.receive(0.05) is None  # and nothing of it is lost
    server.sendall(frame("café")[4:])
    assert client.receive(5) == "café"


def test_fragments_with_a_ping_between(wire):
    client, server = wire
    server.sendall(frame("ab", last=False) + frame(b"are you there", 9) + frame("cd", 0, False) + frame("ef", 0))
    assert client.receive(5) == "abcdef"
    assert client.receive(0.05) is None


@pytest.mark.parametrize(
    "data", [frame(b"", 8), b"\xc1\x00", b"\x82\x80\0\0\0\0", b"\x82\x7f" + b"\xff" * 8], ids=range(4)
)
def test_what_ends_the_connection(wire, data):
    client, server = wire
    server.sendall(data)
    with pytest.raises(Closed):
        client.receive(5)


def test_handshake_of_the_standard(monkeypatch):
    """The example of RFC 6455, section 1.3; and a server that proves nothing is refused."""
    monkeypatch.setattr(os, "urandom", lambda count: b"the sample nonce"[:count])
    for accept, sound in (("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", True), ("x", False)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(f"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nSEC-websocket-Accept:  {accept}\r\n\r\n".encode())
            if sound:
                WebSocket(ours, "h", "/ws")
            else:
                pytest.raises(Closed, WebSocket, ours, "h", "/ws")
            assert b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" in theirs.recv(4096)


def test_pong_is_masked_and_echoes(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(os, "urandom", lambda count: b"the sample nonce"[:count])
        handshake = b"HTTP/1.1 101 S\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
        theirs.sendall(handshake + frame(b"Hello", 9))
        client = WebSocket(ours, "h", "/ws")
        theirs.recv(4096)
        assert client.receive(0.05) is None
        pong = theirs.recv(100)
    assert pong[:6] == b"\x8a\x85the "
    assert bytes(a ^ b for a, b in zip(pong[6:], b"the t", strict=True)) == b"Hello"
