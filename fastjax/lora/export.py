"""An adapter's trained arrays out of a model, by the names of `convert.adapters`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.model.paths import EMBEDDING, HEAD, SCORE, TABLES, WeightPath
from fastjax.parallel.placing import fetched, spans_processes

#: Attribute of a module -> leaf of its path, where they differ.
_LEAVES = {"magnitude": "lora_magnitude_vector"}


def export_adapters(
    trainable: Mapping[str, Any], plan: Sequence[tuple[int, int, int]], tied: bool, *, keep: bool = True
) -> dict[str, np.ndarray]:
    """An adapter's arrays on the host by path; of several processes all must call this.

    Args:
        trainable: the trained arrays of a decoder with adapters.
        plan: its layer stacks: (first layer, period, count) of each.
        tied: whether one whole table is for embedding and head; both get a copy, as PEFT writes them.
        keep: whether they are wanted here; otherwise this process helps the others to them, and gets nothing.
    """
    arrays: dict[str, Any] = {}
    for number, positions in trainable.get("layers", {}).items():
        start, period, count = plan[number]
        for position, blocks in positions.items():
            for path, value in _in_layer(blocks):
                for n, array in enumerate([value] if count == 1 else _layers(value)):
                    arrays[path.in_layer(start + position + n * period)] = fetched(array, keep)
    for path, value in _of_tables(trainable):
        arrays[path] = fetched(value, keep)
    if not keep:
        return {}
    if tied:
        copies = [WeightPath(None, "", name, "modules_to_save.weight") for name in TABLES]
        shared = next(arrays[path] for path in copies if path in arrays)
        arrays.update(dict.fromkeys(copies, shared))
    return arrays


def _layers(stack: Any) -> Iterable[Any]:
    """The layers' arrays; of a stack that several processes hold each is taken where it lies."""
    return (stack[n] for n in range(len(stack))) if spans_processes(stack) else np.asarray(stack)


def _in_layer(tree: Mapping[str, Any], *block: str) -> Iterator[tuple[WeightPath, Any]]:
    for name, inside in tree.items():
        if "adapters" not in inside:
            yield from _in_layer(inside, *block, name)
            continue
        for part, leaves in inside["adapters"].items():
            yield from _of_module(WeightPath(None, ".".join(block), part, ""), leaves)


def _of_tables(trainable: Mapping[str, Any]) -> Iterator[tuple[WeightPath, Any]]:
    embedding, head = (WeightPath(None, "", name, "") for name in TABLES)
    yield from _of_module(embedding, trainable.get(EMBEDDING, {}).get("adapter", {}))
    yield from _of_module(head, trainable.get(HEAD, {}).get("adapters", {}).get(HEAD, {}))
    for path in (embedding, head, WeightPath(None, "", SCORE, "")):
        tree = trainable.get(path, {})
        if "weight" in tree:
            yield path.with_leaf("modules_to_save.weight"), tree["weight"]
        yield from _of_module(path, tree.get("tokens", {}))


def _of_module(module: WeightPath, leaves: Mapping[str, Any]) -> Iterator[tuple[WeightPath, Any]]:
    for leaf, value in leaves.items():
        yield module.with_leaf(_LEAVES.get(leaf, leaf)), value
