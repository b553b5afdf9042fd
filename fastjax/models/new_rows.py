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

from convert.model.paths import TABLES


def grown(weights: Mapping[str, Any], rows: int, known: int, new: Iterable[int]) -> dict[str, Any]:
    """A model's tree with rows for new tokens in its tables.

    Args:
        weights: the tree, as `Decoder` takes it.
        rows: of the tables afterwards.
        known: number of earlier tokens, whose rows the mean is of.
        new: ids of the new tokens.
    """
    places = np.asarray(sorted(new), np.int32)

    def grow(table: Float[Array, "V E"]) -> Float[Array, "rows E"]:
        mean = jnp.mean(table[: min(known, table.shape[0])].astype(jnp.float32), axis=0).astype(table.dtype)
        if rows > table.shape[0]:
            added = jnp.broadcast_to(mean[None], (rows - table.shape[0], table.shape[1]))
            table = jnp.concatenate([table, added])
        return table.at[places].set(mean[None])

    changed = {name: {"weight": grow(weights[name]["weight"])} for name in TABLES if "weight" in weights.get(name, {})}
    return {**weights, **changed}
