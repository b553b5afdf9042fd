"""Precision: the dtypes of a model's weights and computation, and the modules that stay in float32.

Frozen weights are held in the compute dtype, trained arrays in the parameter dtype; both are cast to the activations'
dtype where they are used. A module named in `float32_modules` is held in float32, and its input is cast to
float32 before it and its output back after it; the logits of a float32 head stay in float32. A reward model's score is
held and computed in it always.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp

from convert.errors import shown
from convert.model.config import ModelConfig
from convert.model.paths import SCORE, WeightPath
from fastjax.errors import ConfigError
from fastjax.models.module_names import module_paths
from pallas_kernels import dispatch

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
BASE_COMPUTE = ("float8",)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a model.

    Attributes:
        dtype: dtype of the computation and the frozen weights.
        param_dtype: dtype of the trained arrays.
        float32_modules: paths of the modules in float32: "norm", "layers.0.self_attn.q_proj", and
            "layers.0.self_attn" for all of it, the attention included.
        base_compute: "float8" where the products of the layers' frozen matrices are computed in it; None: in `dtype`.
    """

    dtype: jnp.dtype
    param_dtype: jnp.dtype
    float32_modules: frozenset[WeightPath] = frozenset()
    base_compute: str | None = None

    def weight_dtype(self, path: str, *, trained: bool) -> jnp.dtype:
        """The dtype of a tensor in memory.

        Args:
            path: as "layers.0.self_attn.q_proj.weight".
            trained: whether it is trained.
        """
        if WeightPath.parse(path).module in (*self.float32_modules, SCORE):
            return jnp.dtype(jnp.float32)
        return self.param_dtype if trained else self.dtype

    def in_layer(self, index: int) -> frozenset[str]:
        """A layer's float32 modules, by their paths in it."""
        return frozenset(path.inside for path in self.float32_modules if path.layer == index)

    def layer_kind(self, config: ModelConfig, index: int) -> Hashable:
        """A key, equal for two layers that one traced body serves if their arrays are alike too."""
        return config.layers[index], self.in_layer(index)


def make_precision(
    dtype: Any,
    param_dtype: Any,
    float32_modules: Sequence[str] | None,
    config: ModelConfig,
    *,
    base_compute: str | None = None,
    trained: bool = False,
) -> Precision:
    """Check a user's settings.

    Args:
        dtype: "bfloat16", "float16" or "float32", or such a dtype of JAX's, NumPy's or torch's; None: bfloat16 on a GPU
            (float16 before Ampere, which has no other matrices of 16 bits), float32 on a CPU.
        param_dtype: likewise.
        float32_modules: names of modules, or the ends of names.
        config: the model's.
        base_compute: "float8", or None for `dtype`: of the products of the layers' frozen matrices.
        trained: whether all weights are trained.

    Raises:
        ConfigError: an unknown dtype; a name that no module has; float8 where it is not served.
    """
    if dtype is None:
        device = dispatch.target()
        old = device.compute_capability is not None and device.compute_capability < (8, 0)
        dtype = "float32" if device.platform == "cpu" else "float16" if old else "bfloat16"
    dtype, param_dtype = dtype_name(dtype), dtype_name(param_dtype)
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value not in DTYPES:
            raise ConfigError(f"{name}: expected one of {list(DTYPES)}, got {shown(value)}")
    if base_compute is not None:
        _check_base_compute(base_compute, dtype, config, trained)
    kept = module_paths(float32_modules or (), config)
    return Precision(jnp.dtype(DTYPES[dtype]), jnp.dtype(DTYPES[param_dtype]), kept, base_compute)


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype of JAX's, NumPy's or torch's (`torch.bfloat16`); what is none of these stays as it is.

    Args:
        dtype: the dtype, or its name.
    """
    if dtype is None or isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype


def _check_base_compute(base_compute: str, dtype: str, config: ModelConfig, trained: bool) -> None:
    if base_compute not in BASE_COMPUTE:
        raise ConfigError(f"base_compute: expected one of {list(BASE_COMPUTE)} or None, got {shown(base_compute)}")
    expected = f"base_compute: expected None (null), got {base_compute}"
    if trained:
        raise ConfigError(f"{expected} with full_finetuning: it is of the products of frozen weights")
    if dtype != "bfloat16":
        raise ConfigError(f"{expected} with dtype {dtype}: beside it everything is computed in bfloat16")
    if any(config.mixtures):
        raise ConfigError(f"{expected} with mixtures of experts: their grouped products are not served in it")
    device = dispatch.target()
    capability = device.compute_capability
    if device.platform != "cpu" and (device.platform != "cuda" or capability is None or capability < (8, 9)):
        raise ConfigError(
            f"{expected} on {device}: products in float8 need an NVIDIA GPU of compute capability 8.9 or more "
            "(Ada, Hopper, Blackwell)"
        )
