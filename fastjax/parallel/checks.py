"""What a mesh asks of a model: one place where sizes that do not fit it, or that nothing serves, are refused."""

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
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
