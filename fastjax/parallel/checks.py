"""What a mesh asks of a model: one place where sizes that do not fit it, or that nothing serves, are refused."""

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.parallel.exchange import FORMATS
from fastjax.parallel.mesh import MeshShape


def check_mesh(config: ModelConfig, shape: MeshShape) -> None:
    """Refuse a mesh that a model cannot be trained on.

    Args:
        config: the model's.
        shape: devices along each mesh axis.

    Raises:
        ConfigError: names the setting, what was expected and what came.
    """
    for axis in ("context", "tensor"):
        if getattr(shape, axis) > 1:
            raise ConfigError(f"parallel.{axis}: expected 1, no model is split in this way, got {getattr(shape, axis)}")


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
