"""The convolution token by token in plain jax.numpy: the oracle.

float64 inputs are computed in float64, others in float32.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
    x: Float[Array, "B S C"],
    weight: Float[Array, "C T"],
    *,
    bias: Float[Array, " C"] | None = None,
    activation: str | None = "silu",
    segment_ids: Int[Array, "B S"] | None = None,
    before: Float[Array, "B T-1 C"] | None = None,
) -> Float[Array, "B S C"]:
    """Arguments as in ``api.short_conv``."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    reach = weight.shape[1] - 1
    earlier = jnp.zeros((x.shape[0], reach, x.shape[2]), wide) if before is None else before
    tokens = jnp.concatenate([earlier.astype(wide), x.astype(wide)], axis=1)
    rows = []
    for row in range(x.shape[0]):
        outputs = []
        for place in range(x.shape[1]):
            total = jnp.zeros(x.shape[2], wide) if bias is None else bias.astype(wide)
            for back in range(reach, -1, -1):
                ids = None if segment_ids is None else segment_ids[row]
                first = 0 if ids is None else max([0, *(at for at in range(1, place + 1) if ids[at] != ids[at - 1])])
                if back > place - first and (first > 0 or before is None):
                    continue
                total = total + weight[:, reach - back].astype(wide) * tokens[row, reach + place - back]
            outputs.append(total / (1 + jnp.exp(-total)) if activation == "silu" else total)
        rows.append(jnp.stack(outputs))
    return jnp.stack(rows).astype(x.dtype)
