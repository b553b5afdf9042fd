"""Compilation for a card that is not there, where its wheels are (pip install --no-deps) and JAX_PLATFORMS is cpu."""

import jax
import pytest

from fastjax.planning.aot import AOT, target_config, why_not

__all__ = ["AOT", "QUICK_CODE", "needs_cuda_plugin", "target_config"]

#: XLA's options where the program is read and no code: GEMMs and code of the quickest making.
QUICK_CODE = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

needs_cuda_plugin = pytest.mark.skipif(
    why_not() is not None or jax.default_backend() != "cpu",
    reason="needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt, and JAX_PLATFORMS=cpu",
)
