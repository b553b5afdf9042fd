"""The cases of one model, in this process, one after the other: rows of figures as they come.

The allocator's peak is that of all cases so far, so those of fewer rows come first. Decoding is timed while no row
begins or ends; if programs were compiled meanwhile, once more.
"""

import gc
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fastjax.bench.generate.compilations import counted
from fastjax.bench.generate.kernels import kinds_of
from fastjax.bench.generate.log_probs import log_prob_difference
from fastjax.bench.generate.model import build_model
from fastjax.bench.generate.requests import mixed_requests, serve
from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.generate.steady import SteadyRows, prefill_seconds
from fastjax.bench.timing import Row
from fastjax.errors import TrainingError
from fastjax.generation.engine import Engine
from fastjax.generation.options import STEPS
from fastjax.language_model import LanguageModel
from fastjax.models.caching import PAGE
from fastjax.planning.cache import pages_that_fit
from fastjax.planning.device import memory_limit
from fastjax.training.metrics import peak_memory

#: Rounds of the prefill of which the median counts, after one to warm up.
_ROUNDS = 3
#: Bytes that are left to the programs beside the cache: prompts of 8,192 tokens at a time, and logits.
_BESIDE_CACHE = 3 * 2**30
#: Rows whose log-probabilities are compared.
_COMPARED = 8


def measure(settings: GenerateSettings, r: int, layer_loop: str, profile: Path | None = None) -> Iterator[Row]:
    """Build a model and measure it.

    Args:
        settings: what is measured.
        r: rank of the adapters; 0: none.
        layer_loop: "scan" or "unroll".
        profile: folder for a trace of each decoding; None: no traces.

    Yields:
        A row for each case: its labels, its figures or the `reason` that there are none, and `kinds` of kernels where
        there is a trace.

    Raises:
        ConfigError: settings that the model or the engine does not take.
    """
    model = build_model(settings, r, layer_loop)
    bench = _Bench(settings, model, profile)
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dtype": str(model.dtype)}
    for cache in settings.caches:
        labels = about | {"r": r, "layer_loop": layer_loop, "cache_dtype": cache}
        cases: list[tuple[str, int, Callable[..., Row]]] = []
        if "decode" in settings.parts:
            cases += [("decode", rows, bench.decode) for rows in sorted(settings.rows)]
        if "prefill" in settings.parts:
            cases.append(("prefill", settings.prefilled[0], bench.prefill))
        if "log_probs" in settings.parts:
            cases.append(("log_probs", min(_COMPARED, max(settings.rows)), bench.log_probs))
        if "requests" in settings.parts:
            cases.append(("requests", max(settings.rows), bench.requests))
        for name, rows, case in cases:
            yield {**labels, "case": name, "rows": rows, **_figures(case, rows, cache)}


def _figures(case: Callable[..., Row], rows: int, cache: str | None) -> Row:
    """The figures of a case, with what it compiled and the peak so far; or the reason that there are none."""
    reason, found = None, {}
    with counted() as compiled:
        try:
            found = case(rows, cache)
        except TrainingError as fault:
            reason = str(fault)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = "out of memory"
    gc.collect()  # an engine and its programs may hold each other
    return {**found, "compile_seconds": compiled.seconds, "peak_bytes": peak_memory(), "reason": reason}


class _Bench:
    """The cases of a model; the rates of some are what others are compared with."""

    def __init__(self, settings: GenerateSettings, model: LanguageModel, profile: Path | None):
        self._settings, self._model, self._profile = settings, model, profile
        self._random = np.random.default_rng(0)
        self._rates: dict[tuple[str, str | None], float] = {}

    def decode(self, rows: int, cache: str | None) -> Row:
        """Tokens a second of rows that all decode."""
        settings = self._settings
        self._rates.pop(("decode", cache), None)  # that of fewer rows is none of the most
        engine = self._engine(rows, settings.prompt + settings.budget, cache)
        prompts, found = self._prompts(rows, settings.prompt), None
        for _ in range(2):
            answers = SteadyRows(engine, prompts, settings.budget)
            found = answers.decode(settings.new)
            if not found.compilations:
                break
            answers.release()
        assert found is not None
        kinds = None if found.compilations else self._traced(answers, rows, cache)
        self._rates["decode", cache] = found.tokens / found.seconds
        return {
            "tokens_per_second": found.tokens / found.seconds,
            "milliseconds": 1e3 * found.seconds / found.steps,
            "context": found.context,
            "compilations": found.compilations,
            **({} if kinds is None else kinds),
        }

    def prefill(self, rows: int, cache: str | None) -> Row:
        """Tokens a second of prompts, up to the first token of each."""
        tokens = self._settings.prefilled[1]
        engine = self._engine(rows, tokens + 1, cache)
        seconds = [prefill_seconds(engine, self._prompts(rows, tokens)) for _ in range(_ROUNDS + 1)]
        rate = rows * tokens / statistics.median(seconds[1:])
        self._rates["prefill", cache] = rate
        return {"tokens": tokens, "tokens_per_second": rate, "milliseconds": 1e3 * statistics.median(seconds[1:])}

    def log_probs(self, rows: int, cache: str | None) -> Row:
        """Differences from the training forward pass."""
        context, new = self._settings.context, self._settings.new
        engine = self._engine(rows, context + 1, cache)
        prompts = self._prompts(rows, context + 1 - new)
        return log_prob_difference(self._model, engine, prompts, new)._asdict()

    def requests(self, rows: int, cache: str | None) -> Row:
        """The time of requests of different lengths, over that of their tokens at the rates of the other cases."""
        settings = self._settings
        length = settings.prompts[1] + settings.answers[1]
        engine = self._engine(rows, length, cache, self._room(rows, length, cache))
        engine.warm_up()
        requests = mixed_requests(settings, self._model.config.vocab_size)
        served, rates = serve(engine, requests), self._rates
        alone = None
        if {("prefill", cache), ("decode", cache)} <= rates.keys():
            alone = served.prompt_tokens / rates["prefill", cache] + served.admitted_tokens / rates["decode", cache]
        return {
            **served._asdict(),
            "requests": len(requests),
            "tokens_per_second": served.tokens / served.seconds,
            "over_alone": None if alone is None else served.admitted_seconds / alone,
        }

    def _engine(self, rows: int, length: int, cache: str | None, tokens: int | None = None) -> Engine:
        """An engine with room for rows of a length; or for `tokens` of all rows."""
        return Engine(self._model, rows=rows, tokens=tokens, max_length=length, cache_dtype=cache)

    def _room(self, rows: int, length: int, cache: str | None) -> int | None:
        """Tokens that the cache may hold where rows of a length are too many; None: they are not, or nobody knows."""
        stats = jax.devices()[0].memory_stats() or {}
        limit = memory_limit(stats)
        if self._settings.tokens is not None or limit is None:
            return self._settings.tokens
        left = limit - stats["bytes_in_use"] - _BESIDE_CACHE
        wanted = rows * -(-length // PAGE)
        dtype = cache or self._model.dtype
        fitting = pages_that_fit(self._model.config, dtype, rows, (wanted, PAGE), int(left))
        return PAGE * fitting if fitting < wanted else None

    def _prompts(self, rows: int, tokens: int) -> list[list[int]]:
        return self._random.integers(0, self._model.config.vocab_size, (rows, tokens)).tolist()

    def _traced(self, answers: SteadyRows, rows: int, cache: str | None) -> Row | None:
        """The kernels of a token, of a trace of further ones; None: no trace is wanted, or it has no kernels."""
        if self._profile is None:
            return None
        options = self._model.options
        name = f"{rows}-r{self._model.lora.r if self._model.lora else 0}-{options.layer_loop}-{cache or 'cache'}"
        folder = self._profile / name
        with jax.profiler.trace(str(folder)):
            traced = answers.decode(4 * STEPS)
        found: Any = kinds_of(folder, traced.steps)
        return None if found is None else {"kernels": found.kernels, "busy_seconds": found.busy, "kinds": found.kinds}
