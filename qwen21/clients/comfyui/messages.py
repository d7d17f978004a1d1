"""Receive the messages that a ComfyUI server sends while it works, if the package websocket-client is installed."""

from __future__ import annotations

import socket


def can_listen() -> bool:
    """Whether the package websocket-client is installed."""
    try:
        import websocket  # noqa: F401
    except ImportError:
        return False
    return True


class Closed(ConnectionError):
    """The server ended the connection, broke the protocol, or never spoke it."""


class Messages:
    """A WebSocket that only listens and answers pings. A context manager."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """Open a WebSocket over `connection` to `address` (ws://...). Raises `Closed` where no WebSocket answers.

        The caller makes the connection, because websocket-client would go through proxies of the environment. No Origin
        is sent, because ComfyUI compares it with the Host.
        """
        import websocket

        self._errors = (OSError, ValueError, websocket.WebSocketException)
        self._timed_out = websocket.WebSocketTimeoutException
        options = {"suppress_origin": True, "redirect_limit": 0}
        try:
            self._socket = websocket.create_connection(address, connection.gettimeout(), socket=connection, **options)
        except self._errors as error:
            connection.close()
            raise Closed(str(error)) from error

    def __enter__(self) -> Messages:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown()  # `close` would wait for the server's answer

    def receive(self, timeout: float) -> str | bytes | None:
        """Return the next message, text or binary; None where none is complete after `timeout` seconds of silence."""
        self._socket.settimeout(timeout)
        try:
            message = self._socket.recv()
        except self._timed_out:
            return None
        except self._errors as error:
            raise Closed(str(error)) from error
        if not self._socket.connected:
            raise Closed("the server closed the connection")
        return message
