"""In which precision a model is held and computed: three settings, and the modules that stay in float32.

Frozen weights are held in the compute dtype, what is trained in the parameter dtype, and both are cast to the dtype of
the activations where they are used. A module named in `float32_modules` is held in float32, and its input is cast to
float32 before it and its output back after it; the logits of a float32 head stay in float32.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from convert.errors import shown
from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.errors import ConfigError
from fastjax.models.module_names import module_paths

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Precision:
    """How a model is held and computed.

    Attributes:
        dtype: of the computation, and of the frozen weights.
        param_dtype: of what is trained.
        float32_modules: paths of the modules that stay in float32: "norm", "layers.0.self_attn.q_proj", and
            "layers.0.self_attn" where all of it does, the attention included.
    """

    dtype: jnp.dtype
    param_dtype: jnp.dtype
    float32_modules: frozenset[WeightPath] = frozenset()

    def weight_dtype(self, path: str, *, trained: bool) -> jnp.dtype:
        """The dtype in which a tensor is held.

        Args:
            path: as "layers.0.self_attn.q_proj.weight".
            trained: whether it is trained, not frozen.
        """
        if WeightPath.parse(path).module in self.float32_modules:
            return jnp.dtype(jnp.float32)
        return self.param_dtype if trained else self.dtype

    def in_layer(self, index: int) -> frozenset[str]:
        """The float32 modules of a layer, by their path in it."""
        return frozenset(path.inside for path in self.float32_modules if path.layer == index)

    def layer_kind(self, config: ModelConfig, index: int) -> Hashable:
        """What two layers must share besides the structure of their arrays for one traced body to serve both."""
        return config.layers[index], self.in_layer(index)


def make_precision(
    dtype: str | None, param_dtype: str, float32_modules: Sequence[str] | None, config: ModelConfig
) -> Precision:
    """Settings as a user gives them, checked.

    Args:
        dtype: "bfloat16", "float16" or "float32"; None: bfloat16 on a GPU, float32 on a CPU.
        param_dtype: likewise.
        float32_modules: names of modules, or the ends of names.
        config: the model that has the modules.

    Raises:
        ConfigError: an unknown dtype; a name that no module has.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value not in DTYPES:
            raise ConfigError(f"{name}: expected one of {list(DTYPES)}, given {shown(value)}")
    kept = module_paths(float32_modules or (), config)
    return Precision(jnp.dtype(DTYPES[dtype]), jnp.dtype(DTYPES[param_dtype]), kept)
