"""Tables with rows for new tokens.

The row of a new token starts as the mean of the earlier tokens' rows, in the embedding and in an untied head, also in a
table that has room for it. (transformers' `resize_token_embeddings` draws rows around that mean; the mean is the same
in every run.)
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from convert.model.paths import EMBEDDING, HEAD, TABLES
from fastjax.errors import ConfigError


def grown(weights: Mapping[str, Any], rows: int, known: int, new: Iterable[int]) -> dict[str, Any]:
    """A model's tree with rows for new tokens in its tables.

    Args:
        weights: the tree, as `Decoder` takes it.
        rows: of the tables afterwards.
        known: number of earlier tokens, whose rows the mean is of.
        new: ids of the new tokens.

    Raises:
        ConfigError: the tables would grow beside a bias of the head.
    """
    if "bias" in weights.get(HEAD, {}) and rows > weights[EMBEDDING]["weight"].shape[0]:
        raise ConfigError(
            f"new_tokens: expected tokens for the {weights[EMBEDDING]['weight'].shape[0]} rows that the tables have, "
            f"got some for {rows}: the head of this family has a bias, which does not grow"
        )
    places = np.asarray(sorted(new), np.int32)

    def grow(table: Float[Array, "V E"]) -> Float[Array, "rows E"]:
        mean = jnp.mean(table[: min(known, table.shape[0])].astype(jnp.float32), axis=0).astype(table.dtype)
        if rows > table.shape[0]:
            added = jnp.broadcast_to(mean[None], (rows - table.shape[0], table.shape[1]))
            table = jnp.concatenate([table, added])
        return table.at[places].set(mean[None])

    tables = [name for name in TABLES if "weight" in weights.get(name, {})]
    return {**weights, **{name: {**weights[name], "weight": grow(weights[name]["weight"])} for name in tables}}
