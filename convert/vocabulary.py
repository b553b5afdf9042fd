"""Embedding and head under an adapter: the trained rows of each, and the number of rows.

Tied tables are one array. They stay one where an adapter trains equal rows of both; whole tables and low-rank adapters
untie them, unless `ensure_weight_tying` says otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence

from convert.adapter_config import AdapterConfig
from convert.model.paths import EMBEDDING, HEAD, WeightPath

_TOKEN_AXES = {"modules_to_save.weight": 0, "base_layer.weight": 0, "lora_embedding_A": 1}
#: Table -> array of an adapter -> its axis of tokens.
_AXES = {EMBEDDING: _TOKEN_AXES, HEAD: {**_TOKEN_AXES, "lora_B": 0}}


def token_ids(config: AdapterConfig) -> dict[str, list[int]]:
    """Table -> ids of the trained rows; a plain list of ids is about the embedding.

    Args:
        config: The settings.
    """
    indices = config.trainable_token_indices or {}
    by_table = indices if isinstance(indices, dict) else {EMBEDDING: indices}
    return {name.removeprefix("model."): ids for name, ids in by_table.items()}


def head_follows(ids: Mapping[str, Sequence[int]]) -> bool:
    """Whether a tied head has the embedding's trained rows: equal ids, or none of its own.

    Args:
        ids: Table -> ids, as from `token_ids`.
    """
    return ids.get(HEAD, ids.get(EMBEDDING)) == ids.get(EMBEDDING)


def table_rows(shapes: Mapping[str, Sequence[int]], ids: Iterable[Sequence[int]]) -> int:
    """The number of rows that the tables had in training; 0 for an adapter that does not tell.

    Args:
        shapes: Path -> shape of the adapter's arrays; arrays with an axis of tokens decide.
        ids: The trained rows of each table, which decide without such an array.
    """
    paths = ((WeightPath.parse(name), shape) for name, shape in shapes.items())
    axes = ((shape, _AXES.get(path.module, {}).get(path.leaf)) for path, shape in paths)
    sizes = [shape[axis] for shape, axis in axes if axis is not None and len(shape) > axis]
    return max(sizes or [max(rows) + 1 for rows in ids if rows], default=0)
