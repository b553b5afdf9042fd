"""An engine with room for given prompts, for the length of a call."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fastjax.execution.language_model import LanguageModel
from fastjax.generation.engine import PAGE, WIDTHS, Engine
from fastjax.generation.engines import AnyEngine, Engines, whole_on
from fastjax.planning.cache import pages_that_fit

#: Answers at a time; bytes of a cache where the device does not say what it has; the part of the free memory else.
_ROWS, _BYTES, _SHARE = 256, 2**30, 0.75


def engine_for(
    model: LanguageModel, lengths: Sequence[int], new_tokens: int, adapters: Mapping[str, LanguageModel] | None = None
) -> AnyEngine:
    """An engine with room for prompts and their answers, or for as many at a time as the memory holds.

    A model that several devices have whole answers on all of them.

    Its sizes are rounded up, so that most calls have programs that another has compiled.

    Args:
        model: the model.
        lengths: tokens of each answer's prompt.
        new_tokens: the most of an answer.
        adapters: that requests choose, as of `Engine`.
    """
    devices = whole_on(model)
    answers = max(1, -(-len(lengths) // max(1, len(devices))))
    rows = next((each for each in WIDTHS if each >= min(answers, _ROWS)), _ROWS)
    longest = max(lengths, default=1) + new_tokens
    length = min(max(PAGE, 1 << math.ceil(math.log2(max(longest, 1)))), model.max_seq_length)
    width, room = -(-length // PAGE), tokens_that_fit(model, rows, length) // PAGE
    pages = room if room == width * rows else max(width, 1 << int(math.log2(room)))
    settings: dict[str, Any] = {"rows": rows, "tokens": pages * PAGE, "max_length": length, "adapters": adapters}
    return Engines(model, devices, **settings) if devices else Engine(model, **settings)


def tokens_that_fit(model: LanguageModel, rows: int, length: int) -> int:
    """Tokens of a cache for rows of a length, or as many as the device's free memory holds; for one row at least.

    Args:
        model: it is in memory already.
        rows: of the engine.
        length: the most tokens of a row.
    """
    width = -(-length // PAGE)
    return PAGE * max(width, pages_that_fit(model.config, model.dtype, rows, (width * rows, PAGE), _room()))


def _room() -> int:
    """Bytes that a cache may have."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return _BYTES
    return int(_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
