"""The HTTP/1.1 protocol with bounds on what it collects before any application code could judge it."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hardpoint.interfaces.endpoint import RequestFailure

_LINGER_S = 1.0
MAX_BODY_PARTS = 65_536
"""Pieces of one body. A body cut into tiny chunks costs far more to receive than its size says."""


class _BoundedProtocol(HttpToolsProtocol):
    max_header_bytes: int
    _in_head = False
    _head_bytes = 0
    _num_parts = 0
    _is_refused = False
    _late_refusal: RequestFailure | None = None

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

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if self._late_refusal is not None and was_last and not self.transport.is_closing():
            self._answer_and_hang_up(self._late_refusal)

    def _refuse(self, failure: RequestFailure) -> None:
        """Hang up, in order: whole requests get their answers first, and the refusal is the last thing written.

        No other answer is sent if the refused data follows a whole request, or if one to it has begun.
        """
        self._is_refused = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._answer_and_hang_up(failure)
        elif not cycle.more_body:
            cycle.keep_alive = False  # The server closes the connection behind this answer.
        elif self.pipeline:
            # The request that is refused was waiting for those before it.
            self.pipeline.popleft()
            self._late_refusal = failure
        else:
            has_begun = cycle.response_started
            # Whatever the application still says of this request is dropped: nothing may follow the refusal.
            cycle.disconnected = True
            cycle.message_event.set()
            if has_begun:
                self.transport.close()
            else:
                self._answer_and_hang_up(failure)

    def _answer_and_hang_up(self, failure: RequestFailure) -> None:
        """What still comes in is read and dropped for a moment: closing over unread data would reset the connection,
        and the client might never see the answer.
        """
        body = json.dumps(failure.body).encode()
        head = (
            f"HTTP/1.1 {failure.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def bounded_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """The protocol class to hand to the server."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"max_header_bytes": max_header_bytes})
