"""Shapes of known models as their config.json has them, without what the family's defaults say; no JAX."""

from typing import Any

from fastjax.errors import ConfigError

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_LLAMA3 = _LLAMA | {"vocab_size": 128256, "rope_theta": 500000.0}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "norm_topk_prob": True,
}
#: Qwen 3.5's text models, the defaults of transformers' configs among them (Qwen/Qwen3.5-9B, Qwen/Qwen3.5-35B-A3B).
_QWEN3_5 = {"max_position_embeddings": 262144, "rope_theta": 10000000.0, "vocab_size": 248320, "head_dim": 256}


def _sized(base: dict[str, Any], sizes: tuple[int, int, int, int], **others: Any) -> dict[str, Any]:
    """A family's config with the width of the model and of its MLP, its layers, and its query heads."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    return base | dict(zip(names, sizes, strict=True)) | others


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _sized(_LLAMA, (128, 256, 2, 4), vocab_size=512, num_key_value_heads=2),
    "llama3.2-1b": _sized(
        _LLAMA3,
        (2048, 8192, 16, 32),
        tie_word_embeddings=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3-8b": _sized(_LLAMA3, (4096, 14336, 32, 32)),
    "llama3-70b": _sized(_LLAMA3, (8192, 28672, 80, 64)),
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, (2048, 6144, 48, 32), moe_intermediate_size=768),
    "qwen3-235b-a22b": _sized(_QWEN3_MOE, (4096, 12288, 94, 64), moe_intermediate_size=1536),
    "qwen3.5-9b": _sized(_QWEN3_5 | {"model_type": "qwen3_5_text"}, (4096, 12288, 32, 16), num_key_value_heads=4),
    "qwen3.5-35b-a3b": _sized(
        _QWEN3_5 | {"model_type": "qwen3_5_moe_text"},
        (2048, 512, 40, 16),
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    # zai-org/GLM-4.7-Flash on the Hugging Face hub, without what are transformers' defaults of glm4_moe_lite
    "glm-4.7-flash": _sized(
        {"model_type": "glm4_moe_lite", "vocab_size": 154880, "rope_theta": 1000000.0}, (2048, 10240, 47, 20)
    ),
    "gpt-oss-20b": _sized(
        {"model_type": "gpt_oss", "rms_norm_eps": 1e-5, "vocab_size": 201088, "max_position_embeddings": 131072},
        (2880, 2880, 24, 64),
        num_local_experts=32,
        router_aux_loss_coef=0.9,
        quantization_config={"quant_method": "mxfp4"},
    ),
}
"""Name → config.json. Llama 3 has the positions of 3.1, so that rows can be long."""


def preset_config(preset: str, layers: int | None, weights: str) -> dict[str, Any]:
    """The config.json of a model with random weights.

    Args:
        preset: a key of PRESETS.
        layers: its first ones alone; None: all.
        weights: of the base: "nf4", "mxfp4" or "16bit".

    Raises:
        ConfigError: more layers than there are; MXFP4 of a model that is not published in it.
    """
    config = dict(PRESETS[preset])
    known = config["num_hidden_layers"]
    if layers is not None:
        if layers > known:
            raise ConfigError(f"--layers: expected at most the {known} of {preset}, got {layers}")
        config["num_hidden_layers"] = layers
    if weights == "mxfp4" and "quantization_config" not in config:
        having = ", ".join(name for name, fields in PRESETS.items() if "quantization_config" in fields)
        raise ConfigError(f"--weights mxfp4: expected a preset with experts in MXFP4 ({having}), got {preset}")
    if weights != "mxfp4":
        config.pop("quantization_config", None)
    return config
