"""The log-probabilities that an engine gives with its tokens, beside those of the training forward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from fastjax.data.batches import Batch
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions
from fastjax.language_model import LanguageModel
from fastjax.training.preferences.scores import token_log_probs


class Difference(NamedTuple):
    """Differences of log-probabilities, in nats.

    Attributes:
        largest: of all tokens.
        mean: of their absolute values.
        tokens: their number.
    """

    largest: float
    mean: float
    tokens: int


def log_prob_difference(model: LanguageModel, engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> Difference:
    """Let an engine answer, and compare the log-probabilities of its tokens with those of a pass over whole rows.

    Args:
        model: the engine's.
        engine: that has nothing else to do.
        prompts: token ids, all of one length.
        new: tokens of each answer.
    """
    options = GenerationOptions(max_new_tokens=new)
    numbers = [engine.add(prompt, options) for prompt in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    given: dict[int, list[float]] = {number: [] for number in numbers}
    for piece in engine.run():
        tokens[piece.request] += piece.tokens
        given[piece.request] += piece.log_probs
    whole = np.array([[*prompt, *tokens[number]] for prompt, number in zip(prompts, numbers, strict=True)], np.int32)
    expected = np.asarray(_log_probs_of_rows(model, whole))[:, -new:]
    off = np.abs(np.array([given[number] for number in numbers]) - expected)
    return Difference(float(off.max()), float(off.mean()), off.size)


def _log_probs_of_rows(model: LanguageModel, rows: np.ndarray) -> Float[Array, "B S"]:
    """Log-probability of each token of the rows after those before it; the first one has none."""
    graphdef, trained = model.graphdef, model.trainable_filter
    positions = np.broadcast_to(np.arange(rows.shape[1] - 1, dtype=np.int32), rows[:, 1:].shape)
    batch = Batch(rows[:, :-1], rows[:, 1:], None, positions)  # pyright: ignore[reportArgumentType]

    @jax.jit
    def log_probs(trainable: Any, frozen: Any, batch: Any) -> Array:
        return token_log_probs(nnx.merge(graphdef, trainable, frozen), trained, batch, batch.targets)

    return log_probs(model.trainable, model.frozen, batch)
