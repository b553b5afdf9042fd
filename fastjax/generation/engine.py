"""An engine that answers requests: rows of a batch that come and go, while the others go on.

The host decides which answers have a row and pages of the cache, and the programs (`generation.programs`) do the rest:
prompts are prefilled packed, as the documents of a training row, and `steps` tokens of all rows come from one call
(continuous batching: Yu et al., OSDI 2022; pages: Kwon et al., arXiv 2309.06180). A call is given to the device before
the tokens of the one before are read, so that the device does not wait for the host. A request that finds no room
waits. The pages that an answer may need are set aside when it begins, so no answer is ever taken back.
"""

import collections
import concurrent.futures
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel, check_logits
from fastjax.generation.adapters import AdapterSet, join_adapters
from fastjax.generation.bound import BoundDecoder
from fastjax.generation.choices import Choice, Piece, piece_of, token_ids
from fastjax.generation.entering import Call, Sizes, add_told, next_call, prompt_arrays, tells
from fastjax.generation.options import STEPS, GenerationOptions
from fastjax.generation.pages import Pages
from fastjax.generation.programs import Decoded, decode, prefill
from fastjax.generation.state import Prompts, empty_state
from fastjax.limits import MAX_ROW_TOKENS
from fastjax.models.caching import PAGE, empty_states
from fastjax.parallel.islands import several_devices

#: The most tokens of prompts that a call takes in; the fewest; and the most answers whose prompts are.
CHUNK, LEAST, ENTRIES = 8192, 32, 64
#: Numbers of rows for which the decoding program is compiled.
WIDTHS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
#: Prompts come in once the rows that wait for them have stood idle for as many tokens as this part of those that go on,
#: which stand still meanwhile: about two tokens' time, however few prompts there are. The most steps that one waits so.
_IDLE, _WAIT = 0.5, 4


class _Unread(NamedTuple):
    """A call of a program whose results are not read yet.

    Attributes:
        prompts: what it takes in; None: later tokens come.
        entries: the answers of which tokens come, by their columns in the results.
        results: `Picked` and `Told` (None: none is asked for) of prompts, else `Decoded`.
    """

    prompts: Call | None
    entries: list[tuple[int, Choice]]
    results: Any


class Engine:
    """Answers to requests, as many at a time as there are rows and pages for."""

    def __init__(
        self,
        model: LanguageModel | AdapterSet,
        *,
        adapters: Mapping[str, LanguageModel] | None = None,
        adapter_slots: int | None = None,
        adapter_rank: int | None = None,
        rows: int = 64,
        tokens: int | None = None,
        max_length: int | None = None,
        cache_dtype: str | None = None,
        steps: int = STEPS,
        prefill_tokens: int | None = None,
    ):
        """Set the cache aside.

        Args:
            model: with or without an adapter; or one to which `adapters` are joined already.
            adapters: by name, models with a low-rank adapter each over the same base (`model` as
                `FastLanguageModel.load_adapter` took it), of which every request chooses one. Their ranks add up, and
                the engine holds them once more, in the dtype of the computation.
            adapter_slots: how many adapters there may be at a time, up to 128, with `load_adapter`; None: as many as
                `adapters`, on the projections that these have. Each takes memory and time whether it is used or not.
            adapter_rank: the largest rank of an adapter in a slot; None: of those given, or 16.
            rows: answers at a time, up to 512; more wait.
            tokens: of prompts and answers that the cache holds, in pages of 64; None: as many as `rows` of
                `max_length`. Layers with a sliding window keep a ring of it a row, where that is less.
            max_length: the most tokens of a prompt with its answer; None: the model's `max_seq_length`.
            cache_dtype: dtype of keys and values, the computation's or "float8_e4m3fn", which takes half the room of
                16 bits and changes what is said a little; None: that of the computation.
            steps: tokens of each answer that one call of the device brings; rows whose answers end meanwhile are idle
                until the next call but one.
            prefill_tokens: of prompts that a call of `step` takes in at most, before all rows decode; a longer prompt
                comes in over several. None: 16,384 while rows decode, and all that there is room for while none does.

        Raises:
            ConfigError: a setting out of range, a reward model, a cache too small for one answer of `max_length`, or an
                adapter over another base, with DoRA, with trained tables or rows of them, or on tables or experts.
        """
        if not isinstance(model, AdapterSet):
            model = join_adapters(model, adapters or {}, adapter_slots, adapter_rank)
        self.adapters = model
        model = self.adapters.model
        check_logits(model, "generate")
        longest = model.max_seq_length if max_length is None else max_length
        limits = (("rows", rows, WIDTHS[-1]), ("max_length", longest, model.max_seq_length))
        for name, value, most in (*limits, ("prefill_tokens", prefill_tokens, MAX_ROW_TOKENS)):
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name}: expected an integer from 1 to {most}, got {shown(value)}")
        dtypes = (str(model.dtype), "float8_e4m3fn")
        if cache_dtype not in (None, *dtypes):
            raise ConfigError(f"cache_dtype: expected {' or '.join(dtypes)}, got {shown(cache_dtype)}")
        self.rows, self.max_length, self.steps, self.prefill_tokens = rows, longest, steps, prefill_tokens
        self._chunk = CHUNK if prefill_tokens is None else min(CHUNK, max(LEAST, 1 << prefill_tokens.bit_length() - 1))
        width = -(-longest // PAGE)
        count = width * rows if tokens is None else -(-tokens // PAGE)
        if count < width:
            raise ConfigError(
                f"tokens: expected room for one answer of max_length {longest}, which is {width * PAGE}, got {tokens}"
            )
        dtype = model.dtype if cache_dtype is None else jnp.dtype(cache_dtype)
        decoder = model.module()
        states = jax.eval_shape(lambda: empty_states(decoder, 1, (1, 1)))
        self._packs = all(state.PACKS for stack in states for state in stack)
        self._state = empty_state(decoder, rows, (count + 1, PAGE), width, dtype)
        self._width, self._pages = width, Pages(count + 1, PAGE)
        self._free = list(range(rows - 1, -1, -1))
        self._asked: dict[int, list[Choice]] = {}  # the answers of each request that have not ended
        self._waiting: collections.deque[Choice] = collections.deque()
        self._entering: list[Choice] = []
        self._going: list[Choice] = []
        self._ended: list[Piece] = []
        self._unread: collections.deque[_Unread] = collections.deque()  # the oldest first
        self._kept = 0  # of those, how many wait for the next step
        self._idle: list[int] = []  # rows that stood idle in each step since prompts came in
        self._numbers = 0
        self._bound: tuple[LanguageModel, BoundDecoder] | None = None

    @property
    def model(self) -> LanguageModel:
        """The model, with its adapters; another value may take its place, but where `adapters` are joined to it."""
        return self.adapters.model

    @model.setter
    def model(self, model: LanguageModel) -> None:
        self.adapters = self.adapters.of_value(model)

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._waiting or self._entering or self._going or self._ended or self._unread)

    @property
    def cache(self) -> tuple[int, int]:
        """Tokens for which answers have set room in the cache aside, and for which there is room."""
        return self._pages.tokens

    def add(
        self, prompt: Sequence[int], options: GenerationOptions | None = None, *, adapter: str | None = None
    ) -> int:
        """Ask for answers to a prompt.

        Args:
            prompt: token ids, at least one.
            options: of the answers; their `stop_strings` are the caller's to look for (`generation.text`).
            adapter: name of one of the engine's `adapters`; None: what its model is by itself, with its own adapter or
                without any.

        Returns:
            The request's number.

        Raises:
            ConfigError: no prompt, a token that the model does not have, a setting out of range, prompt and answer
                longer than `max_length`, or a name that no adapter has.
        """
        number = self.adapters.number(adapter)
        vocabulary = self.model.config.vocab_size
        options = (GenerationOptions() if options is None else options).checked(vocabulary)
        tokens = token_ids(prompt, vocabulary)
        if len(tokens) + options.max_new_tokens > self.max_length:
            raise ConfigError(
                f"generate: expected a prompt and new tokens of at most {self.max_length} together (max_seq_length "
                f"{self.model.max_seq_length}), got a prompt of {len(tokens)} and max_new_tokens "
                f"{options.max_new_tokens}; load the model with a larger max_seq_length, or ask for fewer"
            )
        self._numbers += 1
        choices = [Choice(self._numbers, choice, tokens, options, number) for choice in range(options.n)]
        self._asked[self._numbers] = choices
        self._waiting += choices
        return self._numbers

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose, in the order in which they came."""
        return self.adapters.names

    def load_adapter(self, name: str, model: LanguageModel) -> None:
        """Take an adapter into a free slot, while others' rows decode; nothing compiles again.

        Args:
            name: that no adapter has. One model under two names is two adapters.
            model: with a low-rank adapter over the engine's model, as of `adapters`; the engine holds its arrays anew.

        Raises:
            ConfigError: a name that is taken, no free slot, a rank above `adapter_rank`, a module without slots, or an
                adapter that does not join; nothing has changed.
        """
        self.adapters = self.adapters_with(name, model)

    def drop_adapter(self, name: str) -> None:
        """Let no further request choose an adapter; answers that have begun, or wait, end on it.

        Its slot is free for another once they have ended.

        Args:
            name: of the adapter.

        Raises:
            ConfigError: there is none of that name.
        """
        self.adapters = self.adapters.without(name)

    def adapters_with(self, name: str, model: LanguageModel) -> AdapterSet:
        """The engine's adapters and another one, as of `load_adapter`; the engine stays as it is."""
        used = {one.adapter for choices in self._asked.values() for one in choices}
        return self.adapters.with_adapter(name, model, used - {*self.adapters.numbers.values()})

    def cancel(self, request: int, choice: int | None = None) -> None:
        """End a request's answers; of those that have ended, nothing happens.

        Args:
            request: its number.
            choice: one of its answers; None: all.
        """
        cancelled = [one for one in self._asked.get(request, ()) if choice in (None, one.number)]
        if any(one.row < 0 for one in cancelled):
            self._waiting = collections.deque(one for one in self._waiting if one not in cancelled)
        self._entering = [one for one in self._entering if one not in cancelled]
        for one in cancelled:
            self._ended.append(Piece(one.request, one.number, finish_reason="cancelled"))
            self._finish(one)
        # Answers that were to share a prompt that does not come any more wait again.
        lost = [one for one in self._entering if one.source in cancelled]
        self._entering = [one for one in self._entering if one not in lost]
        for one in reversed(lost):
            self._take_back(one)
            one.source, one.entered = None, 0
            self._waiting.appendleft(one)

    def warm_up(self) -> None:
        """Compile every program that requests may need, side by side, before the first one comes.

        The engine is not busy.
        """
        together = self._most_entries if self._packs else 1
        longest = min(self._chunk, self.max_length * together)
        widths = {_bucket(min(1 << power, longest), self._chunk) for power in range(self._chunk.bit_length())}
        kinds = {self._packs} | ({False} if self.max_length > self._chunk else set())
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (prefill, (self._arrays([], [], width),), {"packed": packed})
            for width in sorted(widths)
            for packed in kinds
        ]
        for width in sorted({min(each, self.rows) for each in WIDTHS}):
            where = np.full(width, self.rows, np.int32)
            calls.append((decode, (where,), {"steps": self.steps}))
        decoder = self._decoder()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            # The call of an equal signature finds what was compiled.
            lowered = (program.lower(decoder, self._state, *arrays, **static) for program, arrays, static in calls)
            for compiled in [pool.submit(each.compile) for each in lowered]:
                compiled.result()
        if jax.default_backend() == "cpu":  # which would compute for minutes
            return
        for program, arrays, static in calls:  # loads code, and shows whether there is memory for it
            self._state, *_ = self._call(program, *arrays, **static)

    def run(self) -> Iterator[Piece]:
        """Step until all requests are answered."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Piece]:
        """Take in prompts, up to `prefill_tokens`, and generate tokens of all rows.

        Returns:
            What has come: the first tokens of the prompts, and the later tokens of the step before.

        Raises:
            ConfigError: in a mesh of several devices (`jax.set_mesh`).
        """
        pieces = self.begin()
        while self.behind:
            pieces += self.read()
        return pieces

    def begin(self) -> list[Piece]:
        """Give the device a step to do, and do not wait for it; `read` does, as long as the engine is `behind`.

        Returns:
            The ends of the answers that were cancelled.

        Raises:
            ConfigError: as of `step`.
        """
        before = len(self._unread)
        self._admit()
        most = self.prefill_tokens or (2 * CHUNK if self._going else math.inf)
        taken = 0
        while self._entering and (not taken or taken + self._chunk <= most):
            taken += self._prefill()
        decoding = [one for one in self._going if one.begun < one.options.max_new_tokens]
        if decoding:
            self._decode(decoding)
        self._kept = min(1, len(self._unread) - before)
        pieces, self._ended = self._ended, []
        return pieces

    @property
    def behind(self) -> bool:
        """Whether there are results to `read`, besides those of the step's last call."""
        return len(self._unread) > self._kept

    def read(self) -> list[Piece]:
        """Wait for the oldest call whose results are not read: its tokens."""
        call = self._unread.popleft()
        if call.prompts is None:
            return self._pieces(call.entries, jax.device_get(call.results))
        picked, told = jax.device_get(call.results)
        if told is not None:
            add_told(call.prompts, told)
        return self._pieces(call.entries, jax.tree.map(lambda leaf: leaf[None], Decoded(*picked)), first=True)

    def _admit(self) -> None:
        """Give the answers that wait rows and pages, in the order in which they came, once that is worth a call."""
        ready = min(len(self._waiting), len(self._free))
        self._idle += [ready] * (ready > 0)
        if self.steps * sum(self._idle) < _IDLE * len(self._going) and len(self._idle) < _WAIT:
            return
        while self._waiting and self._free:
            choice = self._waiting[0]
            source = self._shared_with(choice)
            whole = 0 if source is None else len(choice.prompt) // PAGE
            needed = self._pages.needed(choice.longest) - whole
            if needed > self._pages.free:
                return
            self._waiting.popleft()
            self._idle = []
            choice.row, choice.source = self._free.pop(), source
            shared = [] if source is None else source.pages[:whole]
            self._pages.share(shared)
            choice.pages = [*shared, *self._pages.take(needed)]
            self._entering.append(choice)

    def _shared_with(self, choice: Choice) -> Choice | None:
        """The answer to the same request whose prompt comes in with this one's, with room for it in the same call."""
        same = [one for one in self._entering if one.request == choice.request]
        return same[0] if same and len(same) < self._most_entries else None

    @property
    def _most_entries(self) -> int:
        return min(self.rows, ENTRIES)

    def _prefill(self) -> int:
        """Take in as many prompts as go together, or a piece of one; the number of its tokens."""
        call = next_call(self._entering, self._chunk, self._most_entries, packs=self._packs)
        prompts = self._arrays(call.entries, call.taken, _bucket(call.tokens, self._chunk))
        self._state, picked, told = self._call(prefill, prompts, packed=call.packed)
        for one, count in zip(call.entries, call.taken, strict=True):
            one.entered += count
        ended = [one for _, one in call.ended]
        for one in ended:
            one.begun = 1
        self._entering = [one for one in self._entering if one not in ended]
        self._going += ended
        self._unread.append(_Unread(call, call.ended, (picked, told if any(map(tells, call.entries)) else None)))
        return call.tokens

    def _arrays(self, entries: list[Choice], taken: list[int], width: int) -> Prompts:
        sizes = Sizes(self.rows, self._most_entries, width, self._width, PAGE, self.model.config.vocab_size)
        return prompt_arrays(entries, taken, sizes)

    def _decode(self, choices: list[Choice]) -> None:
        """Generate `steps` tokens of some answers."""
        width = next(each for each in (*WIDTHS, self.rows) if each >= len(choices))
        width = min(width, self.rows)
        where = np.full(width, self.rows, np.int32)
        where[: len(choices)] = [one.row for one in choices]
        self._state, decoded = self._call(decode, where, steps=self.steps)
        for one in choices:
            one.begun += self.steps
        self._unread.append(_Unread(None, list(enumerate(choices)), decoded))

    def _call(self, program: Any, *arguments: Any, **static: Any) -> tuple[Any, ...]:
        return program(self._decoder(), self._state, *arguments, **static)

    def _decoder(self) -> BoundDecoder:
        """The model's arrays, bound once for each value of it."""
        if several_devices():
            shape = {name: size for name, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1}
            raise ConfigError(
                f"generate: expected no mesh of several devices around it (jax.set_mesh), got {shape}; a model whose "
                "arrays are split over devices answers without one, and generation.Engines answers on several"
            )
        if self._bound is None or self._bound[0] is not self.model:
            self._bound = self.model, BoundDecoder.of(self.model)
        return self._bound[1]

    def _pieces(self, entries: list[tuple[int, Choice]], tokens: Decoded, *, first: bool = False) -> list[Piece]:
        """Pieces of some answers, their first or later ones; those that ended give back their rows."""
        pieces, (ids, log_probs) = [], (leaf.T.tolist() for leaf in tokens[:2])
        for column, one in entries:
            if one.row < 0:  # cancelled, or ended by its first token
                continue
            likeliest = (tokens.likeliest_ids[:, column], tokens.likeliest[:, column])
            piece = piece_of(one, ids[column], log_probs[column], likeliest, first=first)
            one.answered += len(piece.tokens)
            if piece.finish_reason is not None:
                self._finish(one)
            pieces.append(piece)
        return pieces

    def _finish(self, choice: Choice) -> None:
        """Forget an answer that has ended, and give back its room."""
        self._going = [one for one in self._going if one is not choice]
        self._take_back(choice)
        left = [one for one in self._asked.pop(choice.request) if one is not choice]
        if left:
            self._asked[choice.request] = left

    def _take_back(self, choice: Choice) -> None:
        """Take an answer's row and pages from it."""
        if choice.row >= 0:
            self._free.append(choice.row)
            self._pages.give_back(choice.pages)
            choice.row, choice.pages = -1, []


def _bucket(count: int, most: int) -> int:
    """A number of tokens, rounded up to few widths, so to few compilations."""
    return min(max(LEAST, 1 << math.ceil(math.log2(count))), most)
