"""Server-sent events, and work that ends when its client goes."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class EventStream(Response):
    """A response of events. When the client goes its generator is closed at once, wherever it stands."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], ended: Callable[[], None]):
        """Begin.

        Args:
            events: whole ones.
            ended: is called once nothing more is sent, even if no event was.
        """
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._events, self._ended = events, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            async with contextlib.aclosing(self._events):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await unless_gone(receive, self._send(send))
        finally:
            self._ended()

    async def _send(self, send: Send) -> None:
        async for events in self._events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work, which is cancelled when the client goes; None then.

    Args:
        receive: of a request whose body was read.
        work: for it.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
