"""float8_e4m3fn rows by the definition."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.float8.scales import MAX


def quantize_rows(x: Float[Array, "*rows in"]) -> tuple[Float[Array, "*rows in"], Float[Array, "*rows"]]:
    """Codes and scales; arguments as in `api`. For finite x."""
    absmax = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
    fraction, exponent = jnp.frexp(jnp.maximum(absmax / MAX, 2.0**-118))  # fraction in [0.5, 1)
    scale = jnp.ldexp(jnp.ones_like(absmax), jnp.where(fraction == 0.5, exponent - 1, exponent))
    return (x.astype(jnp.float32) / scale[..., None]).astype(jnp.float8_e4m3fn), scale


def matmul(x, x_scales, w, w_scales) -> Float[Array, "*rows out"]:
    """The product in float32."""
    wide = (x.astype(jnp.float32) * x_scales[..., None], w.astype(jnp.float32) * w_scales[:, None])
    return jnp.einsum("...i,oi->...o", *wide, precision="highest")
