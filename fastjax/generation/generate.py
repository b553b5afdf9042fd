"""Token ids in, token ids out: an engine for the length of a call."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fastjax.execution.language_model import LanguageModel
from fastjax.generation.engine import PAGE, WIDTHS, Engine
from fastjax.generation.engines import AnyEngine, Engines, whole_on
from fastjax.generation.options import GenerationOptions
from fastjax.planning.cache import pages_that_fit

#: Answers at a time; bytes of a cache where the device does not say what it has; the part of the free memory else.
_ROWS, _BYTES, _SHARE = 256, 2**30, 0.75


def generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], options: GenerationOptions | None = None, **changes: Any
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        model: with or without an adapter.
        prompts: token ids, none empty.
        options: of the answers; `n` is 1.
        changes: other options, by name.

    Returns:
        The new tokens of each prompt, without the one that ends it.

    Raises:
        ConfigError: an empty prompt, a setting out of range, or prompt and answer longer than max_seq_length.
    """
    options = dataclasses.replace(GenerationOptions() if options is None else options, **changes)
    if not prompts:
        return []
    engine = engine_for(model, [len(prompt) for prompt in prompts], options)
    numbers = [engine.add(prompt, seeded(options, place)) for place, prompt in enumerate(prompts)]
    answers: dict[int, list[int]] = {number: [] for number in numbers}
    for piece in engine.run():
        answers[piece.request] += piece.tokens
    return list(answers.values())


def seeded(options: GenerationOptions, place: int) -> GenerationOptions:
    """The options of one of several prompts, which draw other numbers than each other by one seed.

    Args:
        options: of all.
        place: of the prompt among them; the first one's seed is the options' own.
    """
    if place == 0 or not isinstance(options.seed, int):
        return options
    seed = np.random.SeedSequence((abs(options.seed), int(options.seed < 0), place)).generate_state(1)[0]
    return dataclasses.replace(options, seed=int(seed) >> 1)


def engine_for(model: LanguageModel, lengths: Sequence[int], options: GenerationOptions) -> AnyEngine:
    """An engine with room for prompts and their answers, or for as many at a time as the memory holds.

    A model that several devices have whole answers on all of them.

    Its sizes are rounded up, so that most calls have programs that another has compiled.

    Args:
        model: the model.
        lengths: tokens of each prompt.
        options: of the answers.
    """
    devices = whole_on(model)
    answers = max(1, -(-len(lengths) * options.n // max(1, len(devices))))
    rows = next((each for each in WIDTHS if each >= min(answers, _ROWS)), _ROWS)
    longest = max(lengths, default=1) + options.max_new_tokens
    length = min(max(PAGE, 1 << math.ceil(math.log2(max(longest, 1)))), model.max_seq_length)
    width = -(-length // PAGE)
    room = pages_that_fit(model.config, model.dtype, rows, (width * rows, PAGE), _room())
    pages = min(width * rows, max(width, 1 << max(0, int(math.log2(max(room, 1))))))
    settings: dict[str, Any] = {"rows": rows, "tokens": pages * PAGE, "max_length": length}
    return Engines(model, devices, **settings) if devices else Engine(model, **settings)


def _room() -> int:
    """Bytes that a cache may have."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return _BYTES
    return int(_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
