"""The thread that owns an engine: requests go in, pieces of their answers come out on the event loop that asked.

The thread does no more than the engine needs. Text, JSON and sockets are the event loop's, which works while the device
computes: it has a step to do while the tokens of the one before are read and handed over. What the engine is told
(cancel, adapters) is told between two steps.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fastjax.execution.language_model import LanguageModel
from fastjax.generation.choices import Piece
from fastjax.generation.engines import AnyEngine, Engines
from fastjax.generation.options import GenerationOptions
from fastjax.serving.metrics import Metrics

_LOG = logging.getLogger("fastjax.serving")

T = TypeVar("T")


class QueueFull(Exception):
    """More answers are waited for than the server takes."""


class Closing(Exception):
    """The server takes no more requests, since it ends or its engine has failed."""


class EngineFailed(Exception):
    """The engine has failed under an answer, or was stopped before its end."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Answers to a prompt.

    Attributes:
        prompt: token ids.
        options: of the answers.
        adapter: its name; None: the model as it was loaded.
    """

    prompt: Sequence[int]
    options: GenerationOptions
    adapter: str | None = None


class Came(NamedTuple):
    """New tokens.

    Attributes:
        place: of the prompt in the request.
        piece: of an answer to it.
    """

    place: int
    piece: Piece


class Ticket:
    """The answers to the prompts of one request, read by one coroutine.

    What is not read yet waits here; it is bounded by the longest answers.

    Attributes:
        wanted: the prompts.
        left: answers that have not ended.
        loop: the event loop of its reader.
    """

    def __init__(self, worker: "Worker", wanted: Sequence[Wanted]):
        """Begin; `Worker.submit` does."""
        self.wanted = wanted
        self.left = sum(one.options.n for one in wanted)
        self.submitted = time.perf_counter()
        self.first: float | None = None  # the time of the first token, in the worker's thread
        self.numbers: list[int] = []  # of the engine's requests, in the worker's thread
        self.stopped: set[tuple[int, int]] = set()  # prompt and choice of answers that a stop string ended
        self._worker = worker
        self.loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self.loop.create_future()
        self._came: collections.deque[Came] = collections.deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompts.

        Raises:
            ConfigError: the engine refuses a prompt or an option.
            EngineFailed: the server ends.
        """
        await asyncio.shield(self._accepted)

    async def pieces(self) -> AsyncIterator[list[Came]]:
        """New tokens, all that have come since the last time.

        Raises:
            EngineFailed: the engine has failed, or the server has ended.
        """
        left = sum(one.options.n for one in self.wanted)
        while left:
            await self._news.wait()
            self._news.clear()
            came = list(self._came)
            self._came.clear()
            if came:
                yield came
            left -= sum(piece.finish_reason is not None for _, piece in came)
            if left and self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """End the answers; of those that have ended nothing happens."""
        self._worker.cancel(self)

    def stop(self, place: int, choice: int) -> None:
        """End an answer whose text has come to a stop string.

        Args:
            place: of the prompt.
            choice: of its answers.
        """
        self._worker.stop(self, place, choice)

    def deliver(self, pieces: Sequence[Came], error: Exception | None = None) -> None:
        """Take what has come, on the event loop; the worker calls it."""
        self._came += pieces
        self._error = self._error or error
        if not self._accepted.done():
            if error is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(error)
                self._accepted.exception()  # nobody may wait for it any more
        self._news.set()

    def send(self, error: Exception | None = None) -> None:
        """Tell from another thread that the engine has taken the prompts, or has not."""
        _on(self.loop, self.deliver, (), error)


class Worker:
    """An engine in a thread of its own.

    Attributes:
        model: the engine's.
        metrics: figures of what was done.
        draining: whether new requests are refused.
        failed: whether the engine has failed, so that nothing can be answered any more.
    """

    def __init__(self, engine: AnyEngine, model: LanguageModel, *, queue: int = 256):
        """Begin the thread.

        Args:
            engine: that nobody else uses.
            model: the engine's.
            queue: answers that may wait beside those that have rows.
        """
        self.model, self.metrics = model, Metrics()
        self.draining = self.failed = False
        self._engine = engine
        self.rows = sum(one.rows for one in engine.engines) if isinstance(engine, Engines) else engine.rows
        one = engine.engines[0] if isinstance(engine, Engines) else engine
        self.max_length = one.max_length
        self._most = self.rows + queue
        self._open = 0
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        self._told: collections.deque[Callable[[], None]] = collections.deque()
        self._condition = threading.Condition()
        self._ending = self._over = False
        self._came: list[Piece] = []  # that nobody was given yet
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """Answers that have not ended."""
        return self._open

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Figures of this moment: name → meaning and value."""
        rows, (used, room) = min(self._open, self.rows), self._engine.cache
        return {
            "rows": ("answers that can be generated at a time", self.rows),
            "rows_used": ("answers that are generated", rows),
            "waiting": ("answers that wait for a row", self._open - rows),
            "cache_tokens": ("tokens that the cache has room for", room),
            "cache_tokens_used": ("tokens of the cache that answers have set aside", used),
            "tokens_per_second": (
                "tokens of answers over the last ten seconds",
                self.metrics.rate(time.perf_counter()),
            ),
        }

    def submit(self, wanted: Sequence[Wanted]) -> Ticket:
        """Ask for answers, from a coroutine; `Ticket.accepted` tells whether the engine takes them.

        Args:
            wanted: prompts, at least one.

        Raises:
            QueueFull: as many answers as the server takes are waited for.
            Closing: the server ends.
        """
        count = sum(one.options.n for one in wanted)
        with self._condition:
            if self.draining or self.failed or self._ending:
                raise Closing
            if self._open + count > self._most:
                raise QueueFull
            self._open += count
        ticket = Ticket(self, wanted)
        self._tell(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the answers of a ticket, as `Ticket.cancel`."""

        def tell() -> None:
            for number in ticket.numbers:
                if number in self._tickets:
                    self._engine.cancel(number)

        self._tell(tell)

    def stop(self, ticket: Ticket, place: int, choice: int) -> None:
        """End an answer of a ticket, as `Ticket.stop`."""

        def tell() -> None:
            number = ticket.numbers[place]
            if number in self._tickets:
                ticket.stopped.add((place, choice))
                self._engine.cancel(number, choice)

        self._tell(tell)

    def call(self, function: Callable[[AnyEngine], T]) -> "concurrent.futures.Future[T]":
        """Do something with the engine between two steps.

        Args:
            function: it is called in the worker's thread.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def tell() -> None:
            try:
                if self._ending:
                    raise Closing
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._tell(tell)
        return future

    def close(self, seconds: float = 10.0) -> bool:
        """End the thread; answers that have not ended fail.

        Args:
            seconds: to wait for it at most.

        Returns:
            Whether it has ended.
        """
        with self._condition:
            self._ending = True
            self._condition.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._condition:
            if not self._over:
                self._told.append(command)
                self._condition.notify()
                return
        command()

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except Exception:
            _LOG.exception("the engine has failed; its answers end, and the server stops")
            self.failed = True
        self._hand_over()
        with self._condition:
            self._ending = True
        self._fail()
        while not self._over:
            while self._told:
                self._told.popleft()()
            with self._condition:
                self._over = not self._told

    def _wait(self) -> bool:
        """Wait for something to do, and hear what was told; False: the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._told or self._ending or self._engine.busy)
            if self._ending:
                return False
        while self._told:
            self._told.popleft()()
        return True

    def _step(self) -> None:
        """Begin a step of the engine, and hand over what has come before it and in it."""
        if not self._engine.busy:
            return
        self._came += self._engine.begin()
        self._hand_over()
        while self._engine.behind:
            self._came += self._engine.read()
            self._hand_over()
        self.metrics.stepped(time.perf_counter())

    def _hand_over(self) -> None:
        """Give what has come to those who wait for it, with one call of their event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, dict[Ticket, list[Came]]] = {}
        for piece in self._came:
            if piece.request not in self._tickets:  # one of a ticket that the engine refused another prompt of
                continue
            ticket, place = self._tickets[piece.request]
            by_loop.setdefault(ticket.loop, {}).setdefault(ticket, []).append(Came(place, piece))
            self._note(ticket, place, piece)
        self._came = []
        for loop, came in by_loop.items():
            _on(loop, _deliver, came)

    def _note(self, ticket: Ticket, place: int, piece: Piece) -> None:
        """Count a piece, and forget a request that has ended."""
        now = time.perf_counter()
        if ticket.first is None and (piece.tokens or piece.finish_reason not in (None, "cancelled")):
            ticket.first = now
            self.metrics.first_token.add(now - ticket.submitted)
        self.metrics.generated += len(piece.tokens)
        if piece.finish_reason is not None:
            self._ended(ticket, "stop" if (place, piece.choice) in ticket.stopped else piece.finish_reason)
            if not ticket.left:
                self.metrics.answered.add(now - ticket.submitted)
                for number in ticket.numbers:
                    self._tickets.pop(number, None)

    def _ended(self, ticket: Ticket, reason: str, count: int = 1) -> None:
        ticket.left -= count
        self.metrics.finished[reason] += count
        with self._condition:
            self._open -= count

    def _add(self, ticket: Ticket) -> None:
        """Hand a ticket's prompts to the engine; if it refuses one, none is answered."""
        if self._ending:
            self._ended(ticket, "failed", ticket.left)
            ticket.send(EngineFailed())
            return
        try:
            for one in ticket.wanted:
                ticket.numbers.append(self._engine.add(one.prompt, one.options, adapter=one.adapter))
        except Exception as error:
            for number in ticket.numbers:
                self._engine.cancel(number)
            self._ended(ticket, "refused", ticket.left)
            ticket.send(error)
            return
        self._tickets |= {number: (ticket, place) for place, number in enumerate(ticket.numbers)}
        self.metrics.prompt += sum(len(one.prompt) for one in ticket.wanted)
        ticket.send()

    def _fail(self) -> None:
        """Tell all whose answers have not ended that they will not come."""
        for ticket in {ticket for ticket, _ in self._tickets.values()}:
            self._ended(ticket, "failed", ticket.left)
            ticket.send(EngineFailed())
        self._tickets = {}


def _deliver(came: Mapping[Ticket, Sequence[Came]]) -> None:
    for ticket, pieces in came.items():
        ticket.deliver(pieces)


def _on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on an event loop from another thread; one that has ended reads no more."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        _LOG.debug("an answer came after the event loop's end")
