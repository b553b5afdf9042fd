"""Several devices that answer requests, each with the whole model and a cache of its own (data parallelism).

Answers need nothing of each other, so the devices need nothing of each other either: a request goes to the device with
the least to do, and all of them step at once.
"""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel, on_device
from fastjax.generation.adapters import join_adapters
from fastjax.generation.choices import Piece
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions


class Engines:
    """An `Engine` on each device, as one."""

    def __init__(
        self,
        model: LanguageModel,
        devices: Sequence[Any],
        *,
        adapters: Mapping[str, LanguageModel] | None = None,
        adapter_slots: int | None = None,
        adapter_rank: int | None = None,
        **settings: Any,
    ):
        """Put the model on the devices that do not have it, and set caches aside.

        Args:
            model: with or without an adapter.
            devices: GPUs of this process, each once.
            adapters: that requests choose, as `Engine` takes them.
            adapter_slots: as of `Engine`.
            adapter_rank: as of `Engine`.
            settings: of each engine, as `Engine` takes them.

        Raises:
            ConfigError: no device, one twice, or what `Engine` refuses.
        """
        if not devices or len(set(devices)) < len(devices):
            raise ConfigError(f"devices: expected devices, each once, got {shown([str(each) for each in devices])}")
        self.engines: list[Engine] = []
        joined = join_adapters(model, adapters or {}, adapter_slots, adapter_rank)
        for device in devices:
            with jax.default_device(device):  # of the cache
                own = dataclasses.replace(joined, model=on_device(joined.model, device))
                self.engines.append(Engine(own, **settings))
        self._pool = concurrent.futures.ThreadPoolExecutor(len(devices), thread_name_prefix="engine")
        self._left = [0] * len(devices)
        self._count = 0
        self._requests: dict[int, tuple[int, int, int]] = {}  # of requests that have not ended, as the others
        self._numbers: dict[tuple[int, int], int] = {}
        self._answers: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return any(engine.busy for engine in self.engines)

    @property
    def cache(self) -> tuple[int, int]:
        """`Engine.cache` of all devices together."""
        used, room = zip(*(engine.cache for engine in self.engines), strict=True)
        return sum(used), sum(room)

    def add(
        self, prompt: Sequence[int], options: GenerationOptions | None = None, *, adapter: str | None = None
    ) -> int:
        """Ask for answers to a prompt, as `Engine.add`.

        Args:
            prompt: token ids, at least one.
            options: of the answers.
            adapter: name of one of `adapters`.

        Returns:
            The request's number.

        Raises:
            ConfigError: as `Engine.add`.
        """
        options = GenerationOptions() if options is None else options
        place = min(range(len(self.engines)), key=self._left.__getitem__)
        own = self.engines[place].add(prompt, options, adapter=adapter)
        self._count += 1
        number = self._count
        cost = options.n * (len(prompt) // 16 + options.max_new_tokens)  # a token of a prompt takes less time
        self._left[place] += cost
        self._requests[number], self._numbers[place, own] = (place, own, cost), number
        self._answers[number] = options.n
        return number

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose."""
        return self.engines[0].adapter_names

    def load_adapter(self, name: str, model: LanguageModel) -> None:
        """Take an adapter into a free slot of every device, as `Engine.load_adapter`; of all or of none.

        Args:
            name: that no adapter has.
            model: with an adapter over the engines' model.

        Raises:
            ConfigError: as `Engine.load_adapter`.
        """
        found = [engine.adapters_with(name, model) for engine in self.engines]
        for engine, adapters in zip(self.engines, found, strict=True):
            engine.adapters = adapters

    def drop_adapter(self, name: str) -> None:
        """Let no further request choose an adapter, as `Engine.drop_adapter`.

        Args:
            name: of the adapter.

        Raises:
            ConfigError: there is none of that name.
        """
        for engine in self.engines:
            engine.drop_adapter(name)

    def cancel(self, request: int, choice: int | None = None) -> None:
        """End a request's answers, as `Engine.cancel`.

        Args:
            request: its number.
            choice: one of its answers; None: all.
        """
        if request in self._requests:
            place, own, _ = self._requests[request]
            self.engines[place].cancel(own, choice)

    def warm_up(self) -> None:
        """Compile every program that requests may need, on all devices at once."""
        list(self._pool.map(Engine.warm_up, self.engines))

    def run(self) -> Iterator[Piece]:
        """Step until all requests are answered."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Piece]:
        """A step of every device that has something to do, as `Engine.step`."""
        return self._of_each(Engine.step, [engine.busy for engine in self.engines])

    def begin(self) -> list[Piece]:
        """Begin a step of every device that has something to do, as `Engine.begin`."""
        return self._of_each(Engine.begin, [engine.busy for engine in self.engines])

    @property
    def behind(self) -> bool:
        """Whether a device has results to read, as `Engine.behind`."""
        return any(engine.behind for engine in self.engines)

    def read(self) -> list[Piece]:
        """The oldest results of every device that has some, as `Engine.read`."""
        return self._of_each(Engine.read, [engine.behind for engine in self.engines])

    def _of_each(self, part: Callable[[Engine], list[Piece]], chosen: Sequence[bool]) -> list[Piece]:
        places = list(itertools.compress(range(len(self.engines)), chosen))
        found = self._pool.map(lambda place: part(self.engines[place]), places)
        return [self._numbered(place, piece) for place, pieces in zip(places, found, strict=True) for piece in pieces]

    def _numbered(self, place: int, piece: Piece) -> Piece:
        number = self._numbers[place, piece.request]
        if piece.finish_reason is not None:
            self._answers[number] -= 1
            if not self._answers[number]:
                self._left[place] -= self._requests.pop(number)[2]
                del self._answers[number], self._numbers[place, piece.request]
        return piece.numbered(number)


def whole_on(model: LanguageModel) -> list[Any]:
    """The devices that have all of a model's arrays, if these are several of this process; else none.

    Args:
        model: any.
    """
    leaves = [leaf for leaf in jax.tree.leaves((model.trainable, model.frozen)) if isinstance(leaf, jax.Array)]
    if not leaves or not all(leaf.is_fully_replicated and leaf.is_fully_addressable for leaf in leaves):
        return []
    common = set.intersection(*(set(leaf.devices()) for leaf in leaves))
    return sorted(common, key=lambda device: device.id) if len(common) > 1 else []


#: What answers requests.
AnyEngine = Engine | Engines
