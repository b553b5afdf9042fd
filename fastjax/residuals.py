"""What is kept between the forward and the backward pass, by name."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

#: Names that are given: the projections' results, the adapters' thin products, the attention's residuals.
SAVED = ("projection", "lora", "attention_out", "attention_lse")


def keep(product: Array, name: str) -> Array:
    """Name the result of a product.

    The barrier is for XLA on GPUs: a product that goes into a stack of all layers' residuals and into the next
    operation would be computed twice, once in a fusion with the update of the stack.
    """
    return checkpoint_name(jax.lax.optimization_barrier(product), name)
