"""The precision that options ask for, checked against the model and the device."""

from typing import Any

import jax.numpy as jnp

from convert.model.config import ModelConfig
from fastjax.errors import ConfigError
from fastjax.execution.options import LoadOptions
from fastjax.models.module_names import module_paths
from fastjax.models.precision import DTYPES, Precision
from pallas_kernels import dispatch


def make_precision(options: LoadOptions, config: ModelConfig) -> Precision:
    """The dtypes of a model.

    Args:
        options: where no dtype is given, it is bfloat16 on a GPU (float16 before Ampere, which has no other matrices of
            16 bits), float32 on a CPU.
        config: the model's.

    Raises:
        ConfigError: a name that no module has; float8 where it is not served.
    """
    dtype, device = options.dtype, dispatch.target()
    if dtype is None:
        old = device.compute_capability is not None and device.compute_capability < (8, 0)
        dtype = "float32" if device.platform == "cpu" else "float16" if old else "bfloat16"
    if options.base_compute is not None:
        _check_base_compute(options.base_compute, dtype, config)
    float32_modules = module_paths(options.float32_modules or (), config)
    held = jnp.dtype(DTYPES[dtype]), jnp.dtype(DTYPES[options.param_dtype])
    return Precision(*held, float32_modules, options.base_compute)


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


def _check_base_compute(base_compute: str, dtype: str, config: ModelConfig) -> None:
    expected = f"base_compute: expected None (null), got {base_compute}"
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
