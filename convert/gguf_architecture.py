"""What llama.cpp calls a family, the hyper-parameters that it needs of it, and what of the family it cannot compute.

llama.cpp fixes much by architecture that config.json can change: activation, which layers have windows, biases, the
scale of the scores. A model that differs in such a thing is refused by the name of the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.activations import ACTIVATIONS
from convert.errors import unexpected
from convert.families import Family
from convert.families.table import size
from convert.gguf_rope import rope_keys

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ALL = (*_QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_TANH = ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        name: In `gguf.MODEL_ARCH`.
        paired: Whether rotary positions pair neighbours where the family pairs halves: rows of q and k move.
        act: The field with the activation's name, and the names that mean what llama.cpp computes.
        biases: Modules of a layer whose biases it adds.
        norm_shift: Added to the scales of normalisations.
        square: Whether all heads together must be as wide as the model.
        windows: All layers but each so many-th have a window; None: llama.cpp knows none.
        wide: With so many layers the scores are scaled by the width a head instead of its size.
        numbers: Field of config.json -> key for it, as `GGUFWriter.add_…` is called.
        defaults: What transformers takes for fields that config.json leaves out, where it is not Llama's.
    """

    name: str
    paired: bool = False
    act: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu",))
    biases: tuple[str, ...] = ()
    norm_shift: float = 0.0
    square: bool = False
    windows: int | None = None
    wide: int | None = None
    numbers: Mapping[str, str] = field(default_factory=lambda: {"rms_norm_eps": "layer_norm_rms_eps"})
    defaults: Mapping[str, Any] = field(default_factory=dict)


_EPS = {"rms_norm_eps": "layer_norm_rms_eps"}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False}
_LLAMA = Architecture("LLAMA", paired=True, biases=_ALL)
_GEMMA3 = Architecture(
    "GEMMA3",
    act=("hidden_activation", _TANH),
    norm_shift=1.0,
    windows=6,
    wide=62,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
    },
)
#: model_type -> architecture.
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": Architecture(
        "LLAMA", paired=True, biases=_ALL, defaults={"max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "qwen2": Architecture("QWEN2", biases=_QKV, defaults=_QWEN),
    "qwen3": Architecture("QWEN3", defaults=_QWEN),
    "gemma": Architecture(
        "GEMMA",
        act=("hidden_act", (*_TANH, "gelu")),
        norm_shift=1.0,
        defaults={"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
    ),
    "gemma2": Architecture(
        "GEMMA2",
        act=("hidden_activation", _TANH),
        norm_shift=1.0,
        windows=2,
        wide=46,
        numbers={
            **_EPS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Architecture(
        "PHI3",
        square=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "olmo2": Architecture("OLMO2", square=True, defaults={"rms_norm_eps": 1e-5}),
    "granite": Architecture(
        "GRANITE",
        paired=True,
        biases=_ALL,
        numbers={
            **_EPS,
            "attention_multiplier": "attention_scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        defaults=dict.fromkeys(
            ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        ),
    ),
    "cohere": Architecture(
        "COMMAND_R",
        square=True,
        numbers={"layer_norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"},
        defaults={
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_theta": 5e5,
            "logit_scale": 0.0625,
            "use_qk_norm": False,
        },
    ),
    "smollm3": Architecture(
        "SMOLLM3",
        paired=True,
        defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "use_sliding_window": False},
    ),
}
#: model_type -> why there is no GGUF file of it.
REFUSED = {"ministral": "llama.cpp has no Mistral some of whose layers have windows"}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0}
_POSITION_FREE = 4  # SmolLM3: llama.cpp leaves the positions out of each so many-th layer
_QK_NORM_FROM = 64  # Command R: with so many layers llama.cpp expects queries and keys to be normalised


@dataclass(frozen=True)
class HyperParameters:
    """What a GGUF file says of a model.

    Attributes:
        architecture: Of llama.cpp.
        keys: Name of `GGUFWriter.add_…` -> its argument.
        tensors: Name -> float32 array that no checkpoint has: divisors of rotary frequencies.
        heads: Of "q_proj" and of "k_proj".
        notes: In what llama.cpp differs all the same, in sentences.
    """

    architecture: Architecture
    keys: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    heads: Mapping[str, int]
    notes: tuple[str, ...]


def hyper_parameters(family: Family, config: Mapping[str, Any], file: str) -> HyperParameters:
    """Read a config.json as llama.cpp needs it.

    Args:
        family: The model's.
        config: Contents of config.json.
        file: Its path, for messages.

    Raises:
        ConvertError: llama.cpp has no such architecture, or computes something else; the message names the field.
    """
    kind = family.model_type
    if kind not in ARCHITECTURES:
        reason = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise unexpected(file, "model_type", f"one of {', '.join(ARCHITECTURES)} for GGUF{reason}", kind)
    found = ARCHITECTURES[kind]
    config = {**_DEFAULTS, **family.defaults, **found.defaults, **family.text_config(config, file)}
    layers, width = size(config, "num_hidden_layers", file), size(config, "hidden_size", file)
    heads = size(config, "num_attention_heads", file)
    key_heads = size(config, "num_key_value_heads", file, heads)
    head_size = size(config, "head_dim", file, max(1, width // heads))
    length = size(config, "model_max_length", file, size(config, "max_position_embeddings", file))
    _check(found, config, file, width, heads, head_size)
    rope, tensors = rope_keys(kind, config, file, head_size, length)
    windows, notes = _windows(found, config, file, layers, length)
    keys = {
        "context_length": length,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": size(config, "intermediate_size", file),
        "head_count": heads,
        "head_count_kv": key_heads,
        "key_length": head_size,
        "value_length": head_size,
        **{key: _number(config, name, file) for name, key in found.numbers.items()},
        **rope,
        **windows,
    }
    if family.section is not None:
        notes.append("the vision tower is left out")
    return HyperParameters(found, keys, tensors, {"q_proj": heads, "k_proj": key_heads}, tuple(notes))


def _check(found: Architecture, config: Mapping[str, Any], file: str, width: int, heads: int, head_size: int) -> None:
    """Refuse what llama.cpp computes in another way."""
    layers, name = config["num_hidden_layers"], found.name
    field, known = found.act
    given = config.get(field)
    if not isinstance(given, str) or (given not in known and ACTIVATIONS.get(given) not in known[:1]):
        raise unexpected(file, field, f"{known[0]!r}, which {name} means in llama.cpp", given)
    if found.square and heads * head_size != width:
        raise unexpected(file, "head_dim", f"{width // heads}: in llama.cpp {name}'s heads fill its width", head_size)
    scalar = config.get("query_pre_attn_scalar")
    if "query_pre_attn_scalar" in found.defaults:
        wanted = width // heads if layers == found.wide else head_size
        if scalar != wanted:
            raise unexpected(file, "query_pre_attn_scalar", f"{wanted}, which {name} means in llama.cpp", scalar)
    if name == "GEMMA3":
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(cap) is not None:
                raise unexpected(file, cap, "null, for GGUF", config[cap])
    if name == "OLMO2" and config.get("tie_word_embeddings"):
        raise unexpected(file, "tie_word_embeddings", "false: llama.cpp's OLMO2 has a head of its own", True)
    if name == "COMMAND_R" and bool(config["use_qk_norm"]) != (layers >= _QK_NORM_FROM):
        wanted = f"{str(layers >= _QK_NORM_FROM).lower()} with {layers} layers, which {name} means in llama.cpp"
        raise unexpected(file, "use_qk_norm", wanted, config["use_qk_norm"])
    if name == "SMOLLM3":
        turning = [int((i + 1) % _POSITION_FREE != 0) for i in range(layers)]
        interval = config.get("no_rope_layer_interval", _POSITION_FREE)
        given = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
        if given != turning:
            raise unexpected(file, "no_rope_layers", f"0 for each {_POSITION_FREE}th layer alone, for GGUF", given)


def _windows(
    found: Architecture, config: Mapping[str, Any], file: str, layers: int, length: int
) -> tuple[dict[str, Any], list[str]]:
    """Keys for windows; a note where llama.cpp leaves them out."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise unexpected(file, "layer_types", "a list or null", types)
    if config.get("use_sliding_window") is False or types is not None and "sliding_attention" not in types:
        window = None
    if found.windows is not None:
        period = config.get("sliding_window_pattern", found.windows)
        if types is not None:
            right = types == ["full_attention" if (i + 1) % found.windows == 0 else "sliding_attention"
                              for i in range(layers)]  # fmt: skip
        else:
            right = period == found.windows
        if not right:
            wanted = f"a window in all layers but each {found.windows}th, which {found.name} means in llama.cpp"
            raise unexpected(file, "layer_types", wanted, types or f"sliding_window_pattern {period}")
        return {"sliding_window": size({"sliding_window": window}, "sliding_window", file)}, []
    notes = []
    if window is not None and size(config, "sliding_window", file) < length:
        notes.append(f"llama.cpp leaves out the window of {window} tokens: longer texts come out otherwise")
    return {"sliding_window": window or 0} if found.name == "PHI3" else {}, notes


def _number(config: Mapping[str, Any], name: str, file: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise unexpected(file, name, "a positive number, for GGUF", value)
    return float(value)
