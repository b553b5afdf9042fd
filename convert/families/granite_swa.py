"""Granite with windows in three of four layers, attention sinks, and a base of rotary positions by layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED
from convert.families.granite import GRANITE
from convert.families.windows import windows
from convert.model.layers import Attention
from convert.model.reader import Reader
from convert.model.rope import read_rope

_ROPES = ("rope", "local_rope")


def _bases(get: Reader, layers: int, default: float) -> list[float]:
    """The base of each layer's rotary positions; 0: it has none."""
    bases = get.value("layer_rope_theta")
    if bases is None:
        return [default] * layers
    right = isinstance(bases, list) and len(bases) == layers
    if not right or not all(type(base) in (int, float) and (base == 0 or 1e-30 < base < 1e30) for base in bases):
        raise get.wrong("layer_rope_theta", f"{layers} numbers, each positive or 0")
    if len({*bases} - {0}) > len(_ROPES):
        raise get.wrong("layer_rope_theta", "at most two bases other than 0")
    return [float(base) for base in bases]


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    rope, layers = read_rope(get, fields), fields["num_hidden_layers"]
    bases = _bases(get, layers, rope.theta)
    names = dict(zip(dict.fromkeys(base for base in bases if base), _ROPES, strict=False))
    mixers = windows(get, fields, lambda number: number % 4 != 0, required=True)["mixers"]
    return {
        **GRANITE.read(get, fields),
        "rope": rope,
        **{name: dataclasses.replace(rope, theta=base) for base, name in names.items()},
        "mixers": tuple(
            Attention(one.sliding_window, names.get(base)) for one, base in zip(mixers, bases, strict=True)
        ),
    }


GRANITE_SWA = dataclasses.replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    defaults={
        **GRANITE.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    },
    constants={"attention_sinks": True},
    read=_read,
    gguf=NOT_COMPARED,
)
