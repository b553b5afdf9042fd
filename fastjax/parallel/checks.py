"""What a mesh asks of a model: one place where sizes that do not fit it, or that nothing serves, are refused."""

from collections.abc import Iterator

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
        use_dora: likewise.

    Raises:
        ConfigError: names the setting, what was expected and what came.
    """
    found = (*_expert(config, shape), *_context(config, shape), *_tensor(config, shape, lora_dropout or 0.0, use_dora))
    for axis, expected in found:
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


def _expert(config: ModelConfig, shape: MeshShape) -> Iterator[tuple[str, str]]:
    """What does not serve experts on several devices: axis, and the clause of what was expected."""
    if shape.expert == 1:
        return
    if config.moe is None:
        yield "expert", "1 of a model without mixtures of experts"
    elif config.moe.router.num_experts % shape.expert:
        yield "expert", f"a divisor of the {config.moe.router.num_experts} experts"


def _context(config: ModelConfig, shape: MeshShape) -> Iterator[tuple[str, str]]:
    """What does not serve rows on several devices: likewise."""
    if shape.context == 1:
        return
    if config.moe is not None:
        yield "context", "1 of a model with mixtures of experts"
    if config.attention_dropout:
        yield "context", f"1 where attention_dropout is not 0 (it is {config.attention_dropout})"


def _tensor(config: ModelConfig, shape: MeshShape, lora_dropout: float, use_dora: bool) -> Iterator[tuple[str, str]]:
    """What does not serve heads and features on several devices; likewise."""
    if shape.tensor == 1:
        return
    unserved = {
        "of a model with mixtures of experts": config.moe is not None,
        "of a model whose files hold queries, keys and values as one": config.fused,
        "of a model that normalises queries and keys of all heads together": config.qk_norm in ("heads", "projection"),
        f"where attention_dropout is not 0 (it is {config.attention_dropout})": config.attention_dropout != 0,
        f"where residual_dropout is not 0 (it is {config.residual_dropout})": config.residual_dropout != 0,
        f"where lora_dropout is not 0 (it is {lora_dropout})": lora_dropout != 0,
        "with use_dora": use_dora,
    }
    yield from (("tensor", f"1 {what}") for what, found in unserved.items() if found)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % shape.tensor:
            yield "tensor", f"a divisor of {name} {getattr(config, name)}"
