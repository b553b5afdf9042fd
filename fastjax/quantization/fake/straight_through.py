"""The straight-through estimator (Bengio et al., arXiv 1308.3432), clipped at a format's range."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fastjax.quantization.fake.schemes import Scheme


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fake_quantize(w: Float[Array, "out in"], scheme: Scheme, dtype: DTypeLike = jnp.float32) -> Float[Array, "out in"]:
    """The values that a matrix decodes to after quantisation, in its dtype.

    The gradient passes as it is, but where a value lies outside of the format's range it is 0; scales count as
    constants. What is not finite becomes NaN.

    Args:
        w: the matrix, in float32, bfloat16 or float16.
        scheme: the format.
        dtype: of its scales, as `Scheme` takes it.
    """
    return _forward(w, scheme, dtype)[0]


def _forward(w, scheme, dtype):
    wide = w.astype(jnp.float32)
    values, inside = scheme(wide, jnp.max(jnp.abs(wide)), dtype)
    return values.astype(w.dtype), inside


def _backward(scheme, dtype, inside, dvalues):
    return (dvalues if inside is None else jnp.where(inside, dvalues, jnp.zeros_like(dvalues)),)


fake_quantize.defvjp(_forward, _backward)
