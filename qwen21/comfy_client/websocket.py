"""The listening half of a WebSocket (RFC 6455): as much as it takes to follow ComfyUI's messages."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import time

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
LONGEST_MESSAGE = 1 << 28  # bytes
LONGEST_HEADER = 1 << 16
CONTINUATION, TEXT, BINARY, CLOSE, PING = 0x0, 0x1, 0x2, 0x8, 0x9


class Closed(ConnectionError):
    """The other side ended the connection, broke the protocol, or never spoke it."""


class WebSocket:
    """A connection that only listens; pings are answered. Takes over a connected socket and closes it."""

    def __init__(self, connection: socket.socket, host: str, path: str) -> None:
        """Shakes hands. `host` is the Host header. Raises `Closed` when no WebSocket answers at `path`."""
        self._connection = connection
        self._buffer = bytearray()
        self._parts: list[bytes] = []  # of a message that comes in fragments
        self._is_text = False
        try:
            self._shake_hands(host, path)
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def receive(self, timeout: float) -> str | bytes | None:
        """The next message, text or binary; None when none is complete within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            while (frame := self._next_frame()) is not None:
                if (message := self._take(*frame)) is not None:
                    return message
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                return None

    def _shake_hands(self, host: str, path: str) -> None:
        key = base64.b64encode(os.urandom(16))
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key.decode()}", "", ""]
        self._send("\r\n".join(lines).encode("latin-1"))
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > LONGEST_HEADER or not self._read(10.0):
                raise Closed("no answer to the handshake")
        header, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer[:] = rest
        status, *fields = header.split(b"\r\n")
        names = {name.strip().lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
        accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest())
        if status.split()[1:2] != [b"101"] or names.get(b"sec-websocket-accept") != accept:
            raise Closed("no WebSocket answers there")

    def _send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise Closed(str(error)) from error

    def _read(self, timeout: float) -> bool:
        """Wait for more bytes; False when none came in time."""
        self._connection.settimeout(timeout)
        try:
            data = self._connection.recv(1 << 16)
        except TimeoutError:
            return False
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("the connection ended")
        self._buffer += data
        return True

    def _next_frame(self) -> tuple[bool, int, bytes] | None:
        """(is last, opcode, payload) of a frame that is here in full, taken off the buffer."""
        data = self._buffer
        if len(data) < 2:
            return None
        if data[0] & 0x70 or data[1] & 0x80:
            raise Closed("a frame with an extension or a mask, which no server sends unasked")
        length, start = data[1] & 0x7F, 2
        if length > 125:
            size = 2 if length == 126 else 8
            start += size
            if len(data) < start:
                return None
            length = int.from_bytes(data[2:start], "big")
        if length + sum(map(len, self._parts)) > LONGEST_MESSAGE:
            raise Closed(f"a message of more than {LONGEST_MESSAGE} bytes")
        if len(data) < start + length:
            return None
        frame = bool(data[0] & 0x80), data[0] & 0x0F, bytes(data[start : start + length])
        del data[: start + length]
        return frame

    def _take(self, is_last: bool, opcode: int, payload: bytes) -> str | bytes | None:
        """The message that this frame completes, if any."""
        if opcode == CLOSE:
            raise Closed("the server closed the connection")
        if opcode == PING:
            mask = os.urandom(4)
            masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
            self._send(bytes([0x8A, 0x80 | len(payload)]) + mask + masked)
        if opcode not in (CONTINUATION, TEXT, BINARY):
            return None
        if opcode != CONTINUATION:
            self._parts, self._is_text = [], opcode == TEXT
        self._parts.append(payload)
        if not is_last:
            return None
        message, self._parts = b"".join(self._parts), []
        return message.decode("utf-8", "replace") if self._is_text else message
