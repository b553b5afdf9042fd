"""Models and batches that a mesh does not serve are refused, by the name of the setting."""

from collections.abc import Iterator
from typing import Any

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.parallel.exchange import FORMATS
from fastjax.parallel.mesh import MeshShape


def check_mesh(
    config: ModelConfig, shape: MeshShape, *, lora_dropout: float | None = None, use_dora: bool = False
) -> None:
    """Refuse a mesh that a model cannot be trained on.

    Args:
        config: the model's.
        shape: devices along each mesh axis.
        lora_dropout: the adapters' setting.
        use_dora: whether the adapters have magnitudes.

    Raises:
        ConfigError: names the setting, what was expected and what came.
    """
    for axis, expected, refused in _unserved(config, shape, lora_dropout or 0.0, use_dora):
        if refused and getattr(shape, axis) > 1:
            raise ConfigError(f"parallel.{axis}: expected {expected}, got {getattr(shape, axis)}")


def check_exchange(config: ModelConfig, shape: MeshShape, gradient_exchange: str) -> None:
    """Refuse a format of gradients on the link that a mesh or a model has no use for.

    Args:
        config: the model's.
        shape: devices along each mesh axis.
        gradient_exchange: the setting.

    Raises:
        ConfigError: names the setting, what was expected and what came.
    """
    reasons = {
        f"one of {', '.join(FORMATS)}": gradient_exchange not in FORMATS,
        "float32 with one replica, as parallel.data is 1": shape.data == 1,
        "float32 where devices share a replica, with parallel.fsdp, expert, context or tensor above 1": shape.size
        > shape.data,
        "float32 with a mixture of experts, whose routers' losses are of the whole batch": config.moe is not None,
    }
    for expected, refused in reasons.items():
        if refused and gradient_exchange != "float32":
            raise ConfigError(f"parallel.gradient_exchange: expected {expected}, got {gradient_exchange}")


def check_rows(rows: int, length: int, shape: MeshShape) -> None:
    """Refuse batches that cannot be cut into equal parts for the devices.

    Args:
        rows: of a microbatch, of all devices.
        length: tokens of a row.
        shape: devices along each mesh axis.

    Raises:
        ConfigError: names what was expected and what came.
    """
    if rows % shape.replicas:
        raise ConfigError(
            f"batch: expected a multiple of {shape.replicas} rows a microbatch, one for each part of the mesh {shape}, "
            f"got {rows}"
        )
    if length % shape.token_parts:
        raise ConfigError(
            f"batch: expected rows of a multiple of {shape.token_parts} tokens, equal parts of them for the devices "
            f"along context and tensor, got {length}"
        )


def _unserved(
    config: ModelConfig, shape: MeshShape, lora_dropout: float, use_dora: bool
) -> Iterator[tuple[str, str, Any]]:
    """Axis, the clause of what was expected of it, and whether it is refused where there are several devices."""
    moe, dropout = config.moe, f"where attention_dropout is not 0 (it is {config.attention_dropout})"
    experts = 0 if moe is None else moe.router.num_experts
    yield "expert", "1 of a model without mixtures of experts", moe is None
    yield "expert", f"a divisor of the {experts} experts", experts % shape.expert
    yield "context", "1 of a model with mixtures of experts", moe is not None
    yield "context", f"1 {dropout}", config.attention_dropout
    for axis in ("context", "tensor"):
        yield axis, "1 of a model with Gated DeltaNet, whose layers compute whole rows", bool(config.recurrent)
    whole_heads = config.qk_norm in ("heads", "projection")
    yield "tensor", "1 of a model with mixtures of experts", moe is not None
    yield "tensor", "1 of a model whose files hold several projections as one", bool(config.fused)
    yield "tensor", "1 of a model that normalises queries and keys of all heads together", whole_heads
    yield "tensor", f"1 {dropout}", config.attention_dropout
    yield "tensor", f"1 where residual_dropout is not 0 (it is {config.residual_dropout})", config.residual_dropout
    yield "tensor", f"1 where lora_dropout is not 0 (it is {lora_dropout})", lora_dropout
    yield "tensor", "1 with use_dora", use_dora
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        yield "tensor", f"a divisor of {name} {getattr(config, name)}", getattr(config, name) % shape.tensor
