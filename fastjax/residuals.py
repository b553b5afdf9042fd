"""Names of the residuals between forward and backward pass, for policies that keep some of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Array

#: The names in use: the projections' results, or the turned heads made of them, the adapters' rank products, the
#: attention's residuals, what devices that share layers or experts gathered of each other's tokens, and the norms'
#: reciprocal root mean squares.
SAVED = ("projection", "lora", "attention_out", "attention_lse", "gathered", "rstd")
#: The input of a layer, which every policy keeps somewhere.
LAYER_INPUT = "layer_input"
#: Queries, keys and values as the attention reads them, and the residual stream behind it.
HEADS, ATTENDED = "heads", "attended"


def name_residual(product: "Array", name: str) -> "Array":
    """Name the result of a product.

    The barrier is for XLA on GPUs: a product that goes into a stack of all layers' residuals and into the next
    operation would be computed twice, once in a fusion with the update of the stack.

    Args:
        product: the result.
        name: one of `SAVED`.
    """
    import jax  # here, since settings, which need no JAX, read the names above
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(jax.lax.optimization_barrier(product), name)
