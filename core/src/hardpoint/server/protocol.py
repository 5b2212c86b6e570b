"""The HTTP/1.1 protocol with bounds on what it collects before any application code could judge it."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hardpoint.interfaces.endpoint import RequestFailure

__all__ = ["MAX_BODY_PARTS", "bounded_protocol"]

_LINGER_S = 1.0
MAX_BODY_PARTS = 65_536
"""Pieces of one body. A body cut into tiny chunks costs far more to receive than its size says."""


class _BoundedProtocol(HttpToolsProtocol):
    max_header_bytes: int
    _in_head = False
    _head_bytes = 0
    _num_parts = 0
    _is_refused = False

    def on_message_begin(self) -> None:
        # The rest of the data this head began in may belong to an earlier request: counting starts with the next.
        self._in_head, self._head_bytes, self._num_parts = True, 0, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes:
                self._refuse(RequestFailure(431, "the headers are too large", None, "headers_too_large"))
                return
        super().data_received(data)
        if self._num_parts > MAX_BODY_PARTS:
            self._num_parts = 0
            self._refuse(RequestFailure(413, "the body comes in too many pieces", None, "body_too_large"))

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(RequestFailure(400, "this is not a valid HTTP request", None, "bad_request"))

    def _refuse(self, failure: RequestFailure) -> None:
        """Answer unless an answer has begun, and hang up.

        What still comes in is read and dropped for a moment: closing over unread data would reset the connection, and
        the client might never see the answer.
        """
        self._is_refused = True
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering:
            body = json.dumps(failure.body).encode()
            head = (
                f"HTTP/1.1 {failure.status} Refused\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.write_eof()
        self.loop.call_later(0.0 if is_answering else _LINGER_S, self.transport.close)


def bounded_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """The protocol class to hand to the server."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"max_header_bytes": max_header_bytes})
