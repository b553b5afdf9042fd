"""The trained arrays as a run begins with them, held frozen beside them: the reference of its preferences.

They are a copy of an adapter, and of tables that are trained whole, under the name `START` of the decoder, by the same
keys as the trained ones. A model that begins as its base needs none: the base is there without its adapter.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx.filterlib import Filter

from fastjax.lora.params import Constant
from fastjax.models.decoder import Decoder
from fastjax.models.leaves import START


def hold(model: Decoder, arrays: Any) -> None:
    """Hold arrays as the model's start.

    Args:
        model: the decoder; changed in place.
        arrays: of the trained arrays' tree, a pure dict; None: it holds none any more.
    """
    model.start = nnx.static(None) if arrays is None else nnx.data(_held(arrays))


def at_start(model: Decoder, trainable_filter: Filter) -> Decoder | None:
    """The model with its trained arrays as they were at the start, constants; None: it holds none.

    Args:
        model: the decoder, merged.
        trainable_filter: the nnx filter of the trained variables.
    """
    if model.start is None:
        return None
    graphdef, trained, rest = nnx.split(model, trainable_filter, ...)
    nnx.replace_by_pure_dict(trained, nnx.to_pure_dict(rest)[START])
    return nnx.merge(graphdef, *jax.lax.stop_gradient((trained, rest)))


def _held(tree: Any) -> Any:
    """Variables in modules whose state has the tree's keys, of which numbers are places in a list."""
    if not isinstance(tree, Mapping):
        return Constant(tree)
    if tree and all(isinstance(key, int) for key in tree):
        return nnx.List([_held(tree.get(place, {})) for place in range(max(tree) + 1)])
    return nnx.Dict({key: _held(value) for key, value in tree.items()})
