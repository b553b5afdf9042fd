"""Typed look-ups in a config.json."""

from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, unexpected
from convert.limits import LAYERS

FULL, SLIDING = "full_attention", "sliding_attention"
#: transformers' names (`ACT2FN`) of a supported function -> its name here.
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_pytorch_tanh"
    ),
    "relu": "relu",
    "relu2": "relu2",
}
#: transformers' values of fields absent from config.json, where a family has no default of its own.
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}


class Reader:
    """Typed look-ups in one config.json that name the field in every error and remember the fields read.

    Attributes:
        config: the file.
        where: its name in errors.
        defaults: values of absent fields.
        asked: the fields looked up.
    """

    def __init__(self, config: Mapping[str, Any], where: str, defaults: Mapping[str, Any]):
        self.config, self.where, self.defaults = config, where, {**DEFAULTS, **defaults}
        self.asked: set[str] = set()

    def value(self, name: str) -> Any:
        """A field's value, null included."""
        self.asked.add(name)
        return self.config.get(name, self.defaults.get(name))

    def wrong(self, name: str, expected: str) -> ConvertError:
        """The error for a field that is not `expected`."""
        return unexpected(self.where, name, expected, self.value(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer of 31 bits; `default` for null, and without a value of the file or the family."""
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(name, "a positive integer")
        if value >= 2**31:
            raise self.wrong(name, "a positive integer below 2³¹")
        return value

    def count(self, name: str, most: int = 2**31 - 1) -> int:
        """An integer from 0 to `most`."""
        value = self.value(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(name, "an integer from 0" + (f" to {most}" if most < 2**31 - 1 else " and below 2³¹"))
        return value

    def optional_integer(self, name: str) -> int | None:
        """A positive integer or null."""
        return None if self.value(name) is None else self.integer(name)

    def layers(self) -> int:
        """The number of layers."""
        count = self.integer("num_hidden_layers")
        if count > LAYERS:
            raise self.wrong("num_hidden_layers", f"at most {LAYERS}")
        return count

    def number(self, name: str) -> float:
        """A number >= 0 that float32 holds."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise self.wrong(name, "a number >= 0 and below 1e30")
        return float(value)

    def positive(self, name: str) -> float:
        """A number above 0."""
        if self.number(name) < 1e-30:
            raise self.wrong(name, "a positive number")
        return self.number(name)

    def optional_number(self, name: str) -> float | None:
        """A positive number or null."""
        return None if self.value(name) is None else self.positive(name)

    def probability(self, name: str) -> float:
        """A number from 0 to below 1; null means 0."""
        if self.value(name) is None:
            return 0.0
        if self.number(name) >= 1:
            raise self.wrong(name, "a number from 0 to below 1")
        return self.number(name)

    def activation(self, name: str) -> str:
        """An activation, by its name here."""
        value = self.value(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.wrong(name, f"one of {list(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def flag(self, name: str) -> bool:
        """True or false; null means the default."""
        value = self.value(name)
        value = self.defaults.get(name, False) if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def layer_types(self, layers: int) -> list[bool] | None:
        """Whether each layer has a window, from `layer_types`; None if that is absent."""
        types = self.value("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != layers or not all(kind in (FULL, SLIDING) for kind in types):
            raise self.wrong("layer_types", f"{layers} of {FULL} and {SLIDING}")
        return [kind == SLIDING for kind in types]
