"""Limits of HTTP connections that uvicorn has none for: the time of headers, and of what follows a response.

A client that sends a header line every minute holds a connection for ever (Slowloris), and so does one that goes on
with a body after its refusal, or does not read the end of its answer. Too long headers are 431, as RFC 6585 says.
"""

import asyncio
import json
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from fastjax.serving.errors import ApiError

#: Seconds for the rest of a body whose request was answered.
_REST = 5.0
#: Bytes of an answer's end that a reader takes in `write_seconds`, or all of it.
_READ = 2**16


class Connection(H11Protocol):
    """uvicorn's connection with these limits. A request's state has `abort`, which cuts it."""

    #: Seconds from a connection's beginning, or from a request's first byte, to the end of its headers.
    header_seconds = 10.0
    #: Seconds in which a reader must take `_READ` bytes of a response whose end was written.
    write_seconds = 30.0

    @property
    def busy(self) -> bool:
        """Whether a request is answered, or some of an answer is not taken yet."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return answering or self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, with the time for headers running.

        The kernel's buffer is small, since what it holds counts as taken, and it asks for more in thirds of it.
        """
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _READ)
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._unread, self._reading = 0, False  # bytes of responses that were not taken, and whether they are watched
        self._late: asyncio.TimerHandle | None = self.loop.call_later(self.header_seconds, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, and let the time of headers run while they are not complete."""
        super().data_received(data)
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._stop_clock()
        elif self._late is None:
            self._late = self.loop.call_later(self.header_seconds, self._headers_late)

    def on_response_complete(self) -> None:
        """After a response, give what is left of its request's body a little time, and its reader some."""
        self._unread = self.transport.get_write_buffer_size()
        if self._unread and not self._reading:
            self._reading = True
            self.loop.call_later(self.write_seconds, self._reader_late)
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(_REST, self._rest_late, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, with the status that h11 names."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        message = "the request's headers are too long" if status == 431 else "expected a valid HTTP request"
        self._refuse(ApiError(status, message))

    def _headers_late(self) -> None:
        self._late = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._refuse(ApiError(408, f"expected the request's headers within {self.header_seconds:g} s"))

    def _rest_late(self, cycle: Any) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _reader_late(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._reading = bool(left) and left <= self._unread - _READ
        self._unread = left
        if self._reading:
            self.loop.call_later(self.write_seconds, self._reader_late)
        elif left:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        try:
            head = self.conn.send(
                h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
            )
            self.transport.write((head or b"") + (self.conn.send(h11.Data(data=body)) or b""))
            self.transport.close()
        except h11.LocalProtocolError:  # a response is under way already
            self.transport.abort()

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
