"""The listener: uvicorn with our limits, which drains at the first signal and ends at the second."""

import logging
import socket
import time
from types import FrameType

import uvicorn

from fastjax.serving.app import create_app
from fastjax.serving.connection import Connection
from fastjax.serving.settings import ServerSettings
from fastjax.serving.worker import Worker

_LOG = logging.getLogger("fastjax.serving")


class Server(uvicorn.Server):
    """A listener whose first SIGTERM or SIGINT refuses new requests and lets those under way end."""

    def __init__(self, worker: Worker, settings: ServerSettings):
        """Begin.

        Args:
            worker: that answers; the server ends it.
            settings: where to listen, and limits.
        """
        limits = {"header_seconds": settings.header_seconds, "write_seconds": settings.write_seconds}
        connection = type("Connection", (Connection,), limits)
        self._app = create_app(worker, settings)
        super().__init__(
            uvicorn.Config(
                self._app,
                host=settings.host.strip("[]"),
                port=settings.port,
                http=connection,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.connections,
                h11_max_incomplete_event_size=settings.header_bytes,
                timeout_keep_alive=75,  # longer than clients keep one, so that none asks on a connection that just ends
                timeout_graceful_shutdown=2,
            )
        )
        self._worker, self._settings = worker, settings
        self._deadline: float | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once it has started."""
        return self.servers[0].sockets[0].getsockname()[1]

    @property
    def _busy(self) -> bool:
        """Whether answers are generated, or sent."""
        return self._worker.open > 0 or any(one.busy for one in self._connections)

    @property
    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and cut the connections whose clients do not."""
        await super().shutdown(sockets)
        for connection in self._connections:
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; at the second signal end at once."""
        if self._deadline is None:
            _LOG.info("draining: %d answers are under way; a second signal ends them", self._worker.open)
            self._worker.draining = True
            self._deadline = time.monotonic() + self._settings.drain_seconds
        else:
            self._deadline = 0.0
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: drained, past the time for it, or the engine has failed."""
        if self._worker.failed:
            self.should_exit = True
        if self._deadline is not None and (not self._busy or time.monotonic() > self._deadline):
            self.should_exit = True
        if self.should_exit:
            self._worker.close(0.0)  # answers that are left end with an error event
        return await super().on_tick(counter)

    def run_to_end(self) -> bool:
        """Listen until the server has ended, with the worker's thread.

        Returns:
            Whether all went well: the engine has not failed, and the thread has ended.
        """
        try:
            self.run()
        finally:
            self._app.state.close()
            ended = self._worker.close(5.0)
        return ended and not self._worker.failed
