"""The way from the qkv projection to attention in plain jax.numpy: the oracle, of gradients by
differentiation.
"""

from jaxtyping import Array, Float

from pallas_kernels.rope import reference


def split_rope_lora(
    base: Float[Array, "N F"],
    products: Float[Array, "N PR"],
    lora_B: Float[Array, "F R"],
    cos: Float[Array, "N D/2"],
    sin: Float[Array, "N D/2"],
    *,
    heads: tuple[int, int],
) -> tuple[Float[Array, "N HD"], Float[Array, "N KD"], Float[Array, "N KD"]]:
    """Queries and keys, turned, and values; arguments as in ``api``."""
    outputs, start, rank = [], 0, lora_B.shape[1]
    for number, count in enumerate((heads[0], heads[1], heads[1])):
        rows = slice(start, start + count * 2 * cos.shape[1])
        own = products if products.shape[1] == rank else products[:, number * rank : (number + 1) * rank]
        y = base[:, rows] + own @ lora_B[rows].T
        if number < 2:
            y = reference.rope(y.reshape(1, y.shape[0], count, -1), cos[None], sin[None]).reshape(y.shape)
        outputs.append(y)
        start = rows.stop
    return tuple(outputs)
