"""Checkpoints from before moments of layers that are called one by one were stacked (2026-11-24).

What is now one array of n layers lies there in n arrays, under the names that differ in the layer's number alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


def apart(wanted: Mapping[str, Any], stored: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """The stacks of an optimizer that a checkpoint holds in parts, and the names of these.

    Args:
        wanted: arrays of a state by name.
        stored: shape and dtype of a checkpoint's arrays by name.
    """
    layers: dict[Any, list[tuple[int, str]]] = {}
    for name, (shape, dtype) in stored.items():
        if found := _LAYER.fullmatch(name):
            before, number, after = found.groups()
            layers.setdefault((before, after, tuple(shape), dtype), []).append((int(number), name))
    parts = {}
    for name, array in wanted.items():
        found = None if name.startswith("trainable.") else _LAYER.fullmatch(name)
        if found and name in stored and list(stored[name][0]) == list(array.shape[1:]):
            same = layers[found[1], found[3], tuple(array.shape[1:]), stored[name][1]]
            if len(same) == array.shape[0]:
                parts[name] = [part for _, part in sorted(same)]
    return parts


def with_parts(wanted: Mapping[str, Any], parts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The arrays to be read: parts in place of their stacks.

    Args:
        wanted: arrays by name, with shapes, dtypes and places.
        parts: of `apart`.
    """
    found = {}
    for name, array in wanted.items():
        if name not in parts:
            found[name] = array
            continue
        place = array.sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, P(*place.spec[1:]), memory_kind=place.memory_kind)
        found |= dict.fromkeys(parts[name], jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=place))
    return found


def with_stacks(
    read: Mapping[str, jax.Array], wanted: Mapping[str, Any], parts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What was read, stacks in place of their parts.

    Args:
        read: by name.
        wanted: as for `with_parts`.
        parts: of `apart`.
    """
    members = {part for names in parts.values() for part in names}
    stacks = {
        name: jax.device_put(jnp.stack([read[part] for part in names]), wanted[name].sharding)
        for name, names in parts.items()
    }
    return {name: array for name, array in read.items() if name not in members} | stacks
