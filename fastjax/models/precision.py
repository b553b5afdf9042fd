"""Precision: the dtypes of a model's weights and computation, and the modules that stay in float32.

Frozen weights are held in the compute dtype, trained arrays in the parameter dtype; both are cast to the activations'
dtype where they are used. A module named in `float32_modules` is held in float32, and its input is cast to
float32 before it and its output back after it; the logits of a float32 head stay in float32. A reward model's score is
held and computed in it always.
"""

import dataclasses
from collections.abc import Hashable

import jax.numpy as jnp

from convert.model.config import ModelConfig
from convert.model.paths import SCORE, WeightPath

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a model.

    Attributes:
        dtype: dtype of the computation and the frozen weights.
        param_dtype: dtype of the trained arrays.
        float32_modules: paths of the modules in float32: "norm", "layers.0.self_attn.q_proj", and
            "layers.0.self_attn" for all of it, the attention included.
        base_compute: "float8" where the products of the layers' frozen matrices are computed in it, "float8_backward"
            where those to their inputs are; None: in `dtype`.
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
