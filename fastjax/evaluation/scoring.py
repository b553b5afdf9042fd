"""Log-probabilities of completions under a model: packed, several documents a row, in one program."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from fastjax.data.batches import Batch, batch_of
from fastjax.data.packing import PackedRows
from fastjax.data.preferences import Answer, Role, pack_preferences
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel, check_logits
from fastjax.models.decoder import Decoder, lm_logits
from fastjax.training.head import head_log_probs
from fastjax.training.preferences.scores import documents_of
from pallas_kernels.cross_entropy import IGNORE_INDEX, chunk_size_for

#: Rows of a batch, and the least length of one.
_ROWS, _LEAST = 8, 128


class Score(NamedTuple):
    """A completion under a model.

    Attributes:
        log_prob: sum of the log-probabilities of its tokens.
        tokens: their number.
        greedy: whether each of them is the likeliest.
    """

    log_prob: float
    tokens: int
    greedy: bool


def completion_scores(
    model: LanguageModel, examples: Sequence[tuple[Sequence[int], Sequence[int]]], *, rows: int = _ROWS
) -> list[Score]:
    """Score completions.

    Args:
        model: with or without an adapter.
        examples: token ids of a prompt and of its completion, none empty.
        rows: that go through the model together.

    Returns:
        A score for each example.

    Raises:
        ConfigError: an example without tokens, or longer than `max_seq_length`.
    """
    check_logits(model, "completion_scores")
    if not examples:
        return []
    longest = 0
    for number, (prompt, completion) in enumerate(examples):
        length = len(prompt) + len(completion) - 1
        if not prompt or not completion or length > model.max_seq_length:
            raise ConfigError(
                f"example {number}: expected at least one token of the prompt and one of the completion, and at most "
                f"{model.max_seq_length + 1} (max_seq_length), got {len(prompt)} and {len(completion)}"
            )
        longest = max(longest, length)
    length = min(model.max_seq_length, max(_LEAST, 1 << (longest - 1).bit_length()))  # few shapes, few compilations
    packed = pack_preferences([[Answer(*example, Role.NONE)] for example in examples], length)
    found: dict[int, Score] = {}
    for members, batch in _batches(packed, rows):
        program = _compiled(model.graphdef, model.trainable_filter)
        log_probs, counts, wrong = jax.device_get(program(model.trainable, model.frozen, batch))
        for row, documents in enumerate(members):
            for slot, document in enumerate(documents):
                one = (float(log_probs[row, slot]), int(counts[row, slot]), not wrong[row, slot])
                found[int(document)] = Score(*one)
    return [found[number] for number in range(len(examples))]


def _batches(packed: PackedRows, rows: int) -> Iterator[tuple[list[Any], Batch]]:
    """Batches of as many rows, the last ones of padding, with the documents of each row."""
    count = len(packed)
    for start in range(0, count, rows):
        numbers = np.arange(start, start + rows)
        members = [packed.members(int(number)) if number < count else [] for number in numbers]
        yield members, jax.tree.map(lambda array: array[0], batch_of(packed, numbers[None]))


@functools.lru_cache(maxsize=8)
def _compiled(graphdef: nnx.GraphDef, trainable_filter: Any) -> Any:
    @jax.jit
    def scores(trainable: Any, frozen: Any, rows: Any) -> tuple[Array, Array, Array]:
        model = nnx.merge(graphdef, trainable, frozen)
        hidden = model.head_input(model.forward(rows.tokens, rows.positions, rows.segment_ids).hidden, None)
        log_probs = head_log_probs(model, trainable_filter, hidden, rows.targets)
        scored = rows.targets != IGNORE_INDEX
        wrong = (_likeliest(model, hidden) != rows.targets) & scored
        in_document = documents_of(rows)
        return (
            jnp.sum(jnp.where(in_document, log_probs[:, :, None], 0.0), axis=1),
            jnp.sum(in_document & scored[:, :, None], axis=1),
            jnp.any(in_document & wrong[:, :, None], axis=1),
        )

    return scores


def _likeliest(model: Decoder, hidden: Float[Array, "B S E"]) -> Int[Array, "B S"]:
    """The likeliest token at each place; the logits of a chunk of places exist at once."""
    batch, length, width = hidden.shape
    chunk = chunk_size_for(batch, length, model.config.vocab_size)
    pieces = jnp.pad(hidden, ((0, 0), (0, -length % chunk), (0, 0))).reshape(batch, -1, chunk, width)

    def likeliest(piece: Float[Array, "B chunk E"]) -> Array:
        return jnp.argmax(lm_logits(model.lm_head, piece), axis=-1)

    found = jax.lax.map(likeliest, jnp.moveaxis(pieces, 1, 0))
    return jnp.moveaxis(found, 0, 1).reshape(batch, -1)[:, :length]
