"""Reward models: the score in the place of logits, and the scores of texts."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from convert.errors import ConvertError
from convert.families import family_for
from convert.families.mapping import with_score
from fastjax.data.batches import batch_of
from fastjax.data.columns import parse_row
from fastjax.data.documents import Counts
from fastjax.data.encoding import Encoder
from fastjax.data.packing import pack_documents
from fastjax.data.preferences import Role, documents_of
from fastjax.errors import ConfigError, DataError
from fastjax.execution.language_model import LanguageModel, Model
from fastjax.models.projection import ScoreHead
from fastjax.training.preferences.scores import document_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Row lengths are multiples of this: few shapes, few compilations.
_ROUND = 64


def with_score_head(model: Model, random_state: int = 3407) -> Model:
    """Give a model one score a text in the place of logits: a reward model, as transformers'
    `AutoModelForSequenceClassification` with one label. A model that has a score keeps it.

    Args:
        model: without an adapter, which is made after the score.
        random_state: seed of the score's start, normal with the config's initializer_range.

    Raises:
        ConfigError: a model with an adapter, or of a family without such a class.
    """
    if model.config.scored:
        return model
    if model.lora is not None or model.quantization_aware is not None:
        raise ConfigError(
            "with_score_head: expected a model without an adapter and without qat, got one with it; call it before "
            "get_peft_model"
        )
    try:
        config, written = with_score(model.config), family_for(model.hf_config).scored(model.hf_config)
    except ConvertError as error:
        raise ConfigError(f"with_score_head: {error}") from error
    ids = None if model.tokenizer is None else (model.tokenizer.pad_token_id, model.tokenizer.eos_token_id)
    if ids is not None and ids[0] is not None and ids[0] != ids[1]:  # transformers reads before the first padding
        written["pad_token_id"] = ids[0]
    shape = (1, config.hidden_size)
    score = jax.random.normal(jax.random.key(random_state), shape, jnp.float32) * config.initializer_range
    module = model.module()
    module.config, module.score = config, ScoreHead(score)
    del module.lm_head
    graphdef, trainable, frozen = nnx.split(module, model.trainable_filter, ...)
    arrays = {"trainable": nnx.to_pure_dict(trainable), "frozen": nnx.to_pure_dict(frozen)}
    return model.replace(config=config, hf_config=written, graphdef=graphdef, **arrays)


def rewards(model: LanguageModel, examples: Sequence[Any], *, batch_size: int = 8) -> Float32[np.ndarray, " N"]:
    """The scores of texts, each read at its last token, of a reward model.

    Args:
        model: with a score head.
        examples: conversations as lists of messages, texts, or rows as of a data set ({"prompt": …,
            "completion": …}); each is encoded as in training, with the end of the turn or text.
        batch_size: rows of several examples that go through the model together.

    Raises:
        ConfigError: a model without score or tokenizer.
        DataError: an example that cannot be read, ends with no answer, or is longer than max_seq_length.
    """
    if not model.config.scored:
        raise ConfigError("rewards: expected a reward model (with_score_head), got one with logits")
    if model.tokenizer is None:
        raise ConfigError("rewards: expected a model with a tokenizer, got one without; load it from a folder")
    if isinstance(examples, str | Mapping) or batch_size < 1:
        raise ConfigError("rewards: expected a list of examples and a batch_size of at least 1")
    if not examples:
        return np.zeros(0, np.float32)
    records = [parse_row(_row(example), f"example {number}") for number, example in enumerate(examples)]
    encoder = Encoder(cast("PreTrainedTokenizerFast", model.tokenizer))
    encoded = [chunk[n] for chunk in encoder.encode(records, apart=False) for n in range(len(chunk))]
    for number, one in enumerate(encoded):
        if not one.learn.any():
            raise DataError(f"example {number}: expected one that ends with an answer, got none")
    numbers = np.arange(len(encoded))
    documents = documents_of(encoded, numbers, Counts(len(encoded)), last_token=True)
    longest = int(documents.lengths.max())
    if longest > model.max_seq_length:
        where = int(documents.lengths.argmax())
        raise DataError(f"example {where}: expected at most {model.max_seq_length} tokens, got {longest}")
    length = min(model.max_seq_length, -(-longest // _ROUND) * _ROUND)
    roles = np.full(len(encoded), Role.NONE, np.int32)
    rows = pack_documents(documents, length, fields={"roles": roles})
    scored = np.zeros(len(encoded), np.float32)
    program = _compiled(model.graphdef)
    for start in range(0, len(rows), batch_size):
        chosen = np.arange(start, start + batch_size)  # those behind the last are rows of padding
        batch = jax.tree.map(lambda array: array[0], batch_of(rows, chosen[None]))
        scores = np.asarray(program(model.trainable, model.frozen, batch))
        for row, number in enumerate(chosen.tolist()):
            members = rows.members(number)
            scored[members] = scores[row, : len(members)]
    return scored


def _row(example: Any) -> Any:
    """An example as a row of a data set."""
    if isinstance(example, str):
        return {"text": example}
    return {"messages": example} if isinstance(example, list) else example


@functools.lru_cache(maxsize=8)
def _compiled(graphdef: nnx.GraphDef) -> Any:
    @jax.jit
    def scores(trainable: Any, frozen: Any, rows: Any) -> Array:
        return document_rewards(nnx.merge(graphdef, trainable, frozen), rows)

    return scores
