"""What a checkpoint's config.json says about the model, checked once and frozen.

`ModelConfig` is the only thing that the decoder is built from; families differ by the function that maps their
config.json onto it. A field that would change the mathematics and is not supported is refused by name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.errors import ConvertError
from fastjax.models.rope_config import RopeConfig, parse_rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder, field names as in Hugging Face's config.json where they mean the same."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float

    @property
    def max_length(self) -> int:
        """The longest row that the rotary positions are made for."""
        return self.rope.max_length(self.max_position_embeddings)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, where: str = "config.json") -> "ModelConfig":
        """Map a Hugging Face config.json.

        Args:
            config: the parsed file.
            where: what to call it in errors.

        Raises:
            ConvertError: an unknown model_type, a missing field, or fields that are not supported (all named).
        """
        kind = config.get("model_type")
        if kind not in _FAMILIES:
            raise ConvertError(f"{where}: model_type: expected one of {sorted(_FAMILIES)}, given {kind!r}")
        return _FAMILIES[kind](config, where)


# Fields of a Llama config.json that do not change what the model computes in training or generation here.
_IRRELEVANT = frozenset(
    """architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
    is_decoder is_encoder_decoder label2id max_length max_position_embeddings model_type name_or_path
    output_attentions output_hidden_states pad_token_id pretraining_tp problem_type quantization_config return_dict
    sep_token_id tokenizer_class torch_dtype transformers_version use_cache unk_token_id""".split()
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
}
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


def _llama(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Llama 2, 3 and 3.1–3.3."""
    used = {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
    }
    _refuse_unsupported(config, used, where)
    get = _Reader(config, where)
    heads, hidden = get.integer("num_attention_heads"), get.integer("hidden_size")
    key_heads = get.integer("num_key_value_heads", heads)
    if heads % key_heads:
        raise ConvertError(f"{where}: num_key_value_heads: expected a divisor of {heads} heads, given {key_heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ConvertError(f"{where}: hidden_size: expected a multiple of {heads} heads, given {hidden}")
    head_dim = get.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise ConvertError(f"{where}: head_dim: expected an even number (rotary pairs), given {head_dim}")
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConvertError(f"{where}: hidden_act: expected one of {list(_ACTIVATIONS)}, given {activation!r}")
    return ModelConfig(
        model_type=config["model_type"],
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_hidden_layers=get.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        hidden_act=activation,
        rms_norm_eps=get.number("rms_norm_eps", 1e-6),
        rope=parse_rope(config, where),
        attention_bias=get.flag("attention_bias"),
        mlp_bias=get.flag("mlp_bias"),
        tie_word_embeddings=get.flag("tie_word_embeddings"),
        max_position_embeddings=get.integer("max_position_embeddings", 2048),
        initializer_range=get.number("initializer_range", 0.02),
    )


_FAMILIES: dict[str, Callable[[Mapping[str, Any], str], ModelConfig]] = {"llama": _llama}


def _refuse_unsupported(config: Mapping[str, Any], used: set[str], where: str) -> None:
    unsupported = {
        name: value
        for name, value in config.items()
        if name not in used
        and name not in _IRRELEVANT
        and not name.startswith(("_", "unsloth_"))
        and not any(value == neutral for neutral in _NEUTRAL.get(name, ()))
    }
    if unsupported:
        listed = ", ".join(f"{name} = {value!r}" for name, value in sorted(unsupported.items()))
        raise ConvertError(
            f"{where}: fields that {config.get('model_type')} models do not support here: {listed}; "
            "remove a field that the model does not use"
        )


class _Reader:
    """Typed look-ups in one config.json, with the field's name in every error."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConvertError(f"{self.where}: {name}: expected a positive integer, given {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConvertError(f"{self.where}: {name}: expected a number >= 0, given {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.config.get(name, False)
        if not isinstance(value, bool):
            raise ConvertError(f"{self.where}: {name}: expected true or false, given {value!r}")
        return value
