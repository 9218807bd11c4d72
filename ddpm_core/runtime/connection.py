"""HTTP connections with deadlines, and a limit on how many are open.

uvicorn parses requests and notices clients that leave, but it waits forever for a request to arrive
and for a response to be read. `Connection` adds these limits to uvicorn's protocol.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
MIN_PROGRESS = 2**16  # bytes of a response that a client must read within each `timeout`

# States of h11 in which a part of a request is still missing.
_RECEIVING = (h11.IDLE, h11.SEND_BODY)

_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A connection that is closed when a request is not received within `timeout` seconds.

    The header and the body have `timeout` seconds each. Beyond MAX_CONNECTIONS, the connection that
    has waited longest for its request is closed, so that idle clients do not lock out others.
    """

    def __init__(self, *args: Any, timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout = timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._awaited: tuple[Any, Any] | None = None  # the request, and its part that is awaited
        self._since = math.inf  # when the wait for that part began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without a buffer, pause_writing is called as soon as the client stops reading.
        transport.set_write_buffer_limits(high=0)
        self._watch_receiving()
        if len(self.connections) > MAX_CONNECTIONS:
            others: list[Any] = [one for one in self.connections if isinstance(one, Connection)]
            longest = min(others, key=lambda one: one._since)
            self.connections.discard(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._sending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        responding = self.cycle is not None and not self.cycle.response_complete
        if responding and self.conn.their_state not in _RECEIVING:
            # A pipelined request. uvicorn would buffer it and stop reading, so that it could not
            # notice when the client leaves. HTTP allows a server to close the connection after the
            # response; the client then sends the request again.
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        self._watch_receiving()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_receiving()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def _watch_receiving(self) -> None:
        """Start the deadline when a part of a request begins, and stop it when all has arrived."""
        state = self.conn.their_state
        awaited = (self.cycle, state) if state in _RECEIVING else None
        if awaited == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._deadline, self._since = awaited, None, math.inf
        if awaited is not None:
            self._since = self.loop.time()
            self._deadline = self.loop.call_later(self._timeout, self._give_up)

    def _give_up(self) -> None:
        """Close; send status 408 if the client has begun a request that has no response yet."""
        responded = self.cycle is not None and self.cycle.response_started
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if begun and not (responded and self.conn.their_state is h11.SEND_BODY):
            self.transport.write(_LATE)
        self.transport.close()

    def _watch_sending(self, before: float) -> None:
        """Abort if the client has read too little of the response since the last check."""
        left = self.transport.get_write_buffer_size()
        if left > before - MIN_PROGRESS:
            self.transport.abort()
        else:
            self._sending = self.loop.call_later(self._timeout, self._watch_sending, left)
