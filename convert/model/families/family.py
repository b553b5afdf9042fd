"""What a family's mapping is made of, and the one reader and writer that fill it in."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from convert.activations import ACTIVATIONS
from convert.errors import ConvertError, shorten, shown
from convert.limits import LAYERS
from convert.model.families.irrelevant import IRRELEVANT, NEUTRAL
from convert.model.rope import parse_rope, rope_to_hf
from convert.rope import ORIGINAL, rope_settings

if TYPE_CHECKING:
    from convert.model.config import ModelConfig

ATTENTION = ("self_attn.qkv", "self_attn.o")
MLP = ("mlp.gate_up", "mlp.down")


class Reader:
    """Typed look-ups in one config.json, with the field's name in every error; it remembers what was asked for.

    Attributes:
        config: the file.
        where: what to call it in errors.
        defaults: values of fields that it leaves out.
        asked: the fields that were looked up.
    """

    def __init__(self, config: Mapping[str, Any], where: str, defaults: Mapping[str, Any]):
        self.config, self.where, self.defaults = config, where, defaults
        self.asked: set[str] = set()

    def value(self, name: str) -> Any:
        """A field as it stands there, null included."""
        self.asked.add(name)
        return self.config.get(name, self.defaults.get(name))

    def wrong(self, name: str, expected: str) -> ConvertError:
        """The error that says what a field should have been."""
        return ConvertError(f"{self.where}: {name}: expected {expected}, given {shown(self.value(name))}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer of 31 bits; `default` for null, and where neither the file nor the family has a value."""
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(name, "a positive integer")
        if value >= 2**31:
            raise self.wrong(name, "a positive integer below 2³¹")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A positive integer or null."""
        return None if self.value(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        """A number that is not negative, and that float32 holds."""
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
        """An activation, by the one name that is used here."""
        value = self.value(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.wrong(name, f"one of {list(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def flag(self, name: str) -> bool:
        """True or false; null means what leaving it out means."""
        value = self.value(name)
        value = self.defaults.get(name, False) if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def layer_types(self, layers: int) -> list[bool] | None:
        """Which layers have a window, from `layer_types`; None where it is left out."""
        types = self.value("layer_types")
        if types is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
            raise self.wrong("layer_types", f"{layers} of {known[0]} and {known[1]}")
        return [kind == known[1] for kind in types]


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class ConfigFamily:
    """How one family's config.json and `ModelConfig` say the same.

    Attributes:
        model_type: in config.json.
        architecture: the class in transformers.
        defaults: what transformers takes for fields that config.json leaves out, where it is not Llama's.
        names: field of `ModelConfig` -> its name in config.json, where that is another.
        numbers: further fields of `ModelConfig` that are numbers or null, -> their names in config.json.
        switches: flags of config.json -> the groups of projections to which they give a bias.
        constants: fields of `ModelConfig` that all models of the family share.
        read: (reader, fields so far) -> the fields that take a computation.
        write: config -> their way back.
        neutral: fields that are only supported at these values.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Reader, Mapping[str, Any]], dict[str, Any]] = _nothing
    write: Callable[["ModelConfig"], dict[str, Any]] = _nothing
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    def name(self, field: str) -> str:
        """A field's name in config.json."""
        return self.names.get(field, {"norm_eps": "rms_norm_eps"}.get(field, field))


_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL})


def read_fields(
    family: ConfigFamily, defaults: Mapping[str, Any], config: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The fields of `ModelConfig`.

    Args:
        family: the mapping.
        defaults: of the sizes, from the family's table of tensors.
        config: the parsed file, or the part of it that is about the text model.
        where: what to call it in errors.

    Raises:
        ConvertError: a field that is missing, wrong or not supported.
    """
    get = Reader(config, where, {**_DEFAULTS, **defaults, **family.defaults})
    heads, width = get.integer("num_attention_heads"), get.integer("hidden_size")
    key_heads = get.integer("num_key_value_heads", heads)
    if heads % key_heads:
        raise get.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    if get.value("head_dim") is None and width % heads:
        raise get.wrong("hidden_size", f"a multiple of {heads} heads")
    head_dim = get.integer("head_dim", width // heads)
    if head_dim % 2:
        raise ConvertError(f"{where}: head_dim: expected an even number (rotary pairs), given {head_dim}")
    layers = get.integer("num_hidden_layers")
    if layers > LAYERS:
        raise get.wrong("num_hidden_layers", f"at most {LAYERS}")
    fields: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": get.integer("vocab_size"),
        "hidden_size": width,
        "intermediate_size": get.integer("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "hidden_act": get.activation(family.name("hidden_act")),
        "norm_eps": get.number(family.name("norm_eps")),
        "tie_word_embeddings": get.flag("tie_word_embeddings"),
        "max_position_embeddings": get.integer("max_position_embeddings"),
        "initializer_range": get.number("initializer_range"),
        "layers": ((None, "rope"),) * layers,
        "attention_multiplier": head_dim**-0.5,
        "attention_dropout": get.probability("attention_dropout"),
        **{ours: get.optional_number(theirs) for ours, theirs in family.numbers.items()},
        **family.constants,
    }
    given = {group for name, groups in family.switches.items() if get.flag(name) for group in groups}
    fields["biases"] = frozenset(given | set(family.constants.get("biases", ())))
    fields |= family.read(get, fields)
    if "rope" not in fields:
        positions = fields["max_position_embeddings"]
        settings = rope_settings(config, where, theta=get.defaults["rope_theta"], positions=positions)
        fields["rope"] = parse_rope(settings, where, positions=positions, head_dim=head_dim)
        get.asked |= ROPE
    if "layer_types" not in get.asked and any(get.layer_types(layers) or ()):
        raise get.wrong("layer_types", f"full_attention alone: no layer of {family.model_type} has a window")
    refuse_unsupported(config, get.asked, family.neutral, where)
    return fields


def write_fields(family: ConfigFamily, config: "ModelConfig") -> dict[str, Any]:
    """The way back from `read_fields`: fields of a config.json as transformers 5 writes them.

    Args:
        family: the mapping.
        config: a model of the family.
    """
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "norm_eps", "tie_word_embeddings"),
        *("max_position_embeddings", "initializer_range", "attention_dropout"),
    )
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{family.name(field): getattr(config, field) for field in same},
        **{theirs: getattr(config, ours) for ours, theirs in family.numbers.items()},
        **{name: config.biases.issuperset(groups) for name, groups in family.switches.items()},
        "rope_parameters": rope_to_hf(config.rope),
        **family.write(config),
    }


def refuse_unsupported(
    config: Mapping[str, Any], used: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Refuse fields that would change the mathematics and mean nothing here.

    Args:
        config: the file.
        used: the fields that are read.
        neutral: field -> the values at which it changes nothing.
        where: what to call the file in the error.

    Raises:
        ConvertError: names all of them.
    """
    unsupported = {
        name: value
        for name, value in config.items()
        if name not in used
        and name not in IRRELEVANT
        and not name.startswith(("_", "unsloth_"))
        and not any(value == harmless for harmless in (*neutral.get(name, ()), *NEUTRAL.get(name, ())))
    }
    if unsupported:
        listed = ", ".join(f"{shorten(name)} = {shown(value)}" for name, value in sorted(unsupported.items()))
        raise ConvertError(
            f"{where}: fields that {config.get('model_type')} models do not support here: {shorten(listed, 1000)}; "
            "remove a field that the model does not use"
        )
