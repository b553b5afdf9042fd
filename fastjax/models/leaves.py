"""Trained arrays by their place in the decoder's tree; key paths are read here alone.

The tree is `Decoder`'s state: {"embed_tokens": …, "layers": {stack: {position: {"self_attn": {"qkv": {"weight", "bias",
"adapters": {"q_proj": {"lora_A", …}}}, …}, "input_layernorm": {"weight"}}}}, "norm": …, "lm_head": …}, the last of a
reward model "score". Layers of one stack share arrays with a leading axis. Optimizers, gradient health and FLOPs use
this.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from convert.families import FAMILIES
from convert.model import spec
from convert.model.paths import EXPERTS, NORM, SCORE, TABLES, WeightPath

#: Key of the decoder under which the trained arrays stand as they were at the start (`models.start`).
START = "start"
#: Kinds that are vectors in a layer.
VECTORS = spec.VECTORS | {"magnitude"}
_EXPERTS = WeightPath(None, EXPERTS, "", "").keys
#: The two halves of a low-rank product.
LORA_A, LORA_B = frozenset(("lora_A", "lora_embedding_A")), frozenset(("lora_B", "lora_embedding_B"))


class Leaf(NamedTuple):
    """A trained array.

    Attributes:
        kind: as in `WeightSpec`; of an adapter "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B" or
            "magnitude"; "trainable_tokens_delta" for rows of tokens.
        keys: the path inside its layer, or inside the model where it is in none.
        stack: number of the stack of layers; None outside the layers.
        position: place of the layer in the stack's period; None outside the layers.
        name: all keys joined by dots, for people.
    """

    kind: str
    keys: tuple[str, ...]
    stack: int | None
    position: int | None
    name: str

    @property
    def of_table(self) -> bool:
        """Whether it belongs to the embeddings or the head, except the head's adapter, which is a linear layer's."""
        return self.keys[0] in TABLES and self.keys[1:2] != ("adapters",)

    @property
    def of_experts(self) -> bool:
        """Whether each expert of a mixture has its own."""
        return self.keys[: len(_EXPERTS)] == _EXPERTS

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector in each layer."""
        return self.kind in VECTORS

    def in_layer(self, layer: int) -> str:
        """The name with the layer's number instead of stack and position."""
        return ".".join(("layers", str(layer), *self.keys))


def leaf_at(path: Sequence[Any]) -> Leaf:
    """The leaf at a key path of `jax.tree_util`; one of the start is as the trained one."""
    keys = [getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))) for entry in path]
    name = ".".join(map(str, keys))
    keys = keys[keys[0] == START :]
    stack, position = None, None
    if keys[0] == "layers" and len(keys) > 3 and isinstance(keys[1], int) and isinstance(keys[2], int):
        (stack, position), keys = keys[1:3], keys[3:]
    names = tuple(map(str, keys))
    return Leaf(_kind(names), names, stack, position, name)


def _kind(keys: tuple[str, ...]) -> str:
    if keys[-1] != "weight":
        return keys[-1]
    if keys[0] in TABLES:
        return "table"
    if keys[0] == SCORE:
        return "score"
    return "norm" if keys[0] == NORM else _kinds(tuple(FAMILIES)).get(keys, "matrix")


@functools.cache
def _kinds(families: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Keys of the families' weights in a layer, those of a group for all of its projections -> their kind."""
    return {
        row.path.inside.keys if row.group is None else WeightPath.parse(f"{row.group}.weight").keys: row.kind
        for family in families
        for row in FAMILIES[family].table
        if row.path.leaf == "weight" and row.path.layer is not None
    }
