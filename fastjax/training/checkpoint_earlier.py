"""Checkpoints of earlier versions: their checksums, and moments that were not stacked yet.

Until 2026-11-27 the metadata held a checksum of each array: the CRC-32 of its bytes, or, where several processes had
written it, a sum over its elements, each mixed with its index.

Until 2026-11-24 an optimizer held the moments of layers that are called one by one in an array each. One array of n
layers now is n arrays there, under names that differ in the layer's number alone.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

#: Beginning of a checksum that is a sum.
SUM = "sum-"
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
    arrays = {}
    for name, array in wanted.items():
        if name not in parts:
            arrays[name] = array
            continue
        sharding = array.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
        arrays |= dict.fromkeys(parts[name], jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding))
    return arrays


def with_stacks(
    read: Mapping[str, jax.Array], wanted: Mapping[str, Any], parts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The arrays that were read, stacks in place of their layers.

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


def mismatch(array: np.ndarray, expected: str | None) -> str | None:
    """The two checksums of an array that differ, in words; None: they are equal.

    Args:
        array: whole, of NumPy.
        expected: of the metadata; None: it is missing there.
    """
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    if expected is not None and expected.startswith(SUM):
        given = f"{SUM}{_element_sum(flat):08x}"
    else:
        given = f"{zlib.crc32(flat.view(np.uint8)):08x}"  # ml_dtypes' arrays are no buffers
    return None if given == expected else f"expected the checksum {expected}, got {given}"


def _element_sum(flat: np.ndarray) -> int:
    """The sum, modulo 2³², of the elements, each mixed with its index by a bijection (MurmurHash3's finaliser)."""
    bits = flat.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[flat.dtype.itemsize])
    mixed = bits.astype(np.uint32) ^ (np.arange(bits.size, dtype=np.uint32) * np.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return int(np.sum(mixed, dtype=np.uint32))
