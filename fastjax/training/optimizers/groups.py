"""What an optimizer reads off the name of a weight: its learning rate, whether it decays, and which axes are stacks.

The names are the tree's, joined by dots: "layers.0.0.self_attn.qkv.adapters.q_proj.lora_B". The first number is the
run of layers, the second the place in its period; a run's equal layers are stacked along a leading axis.

LoRA+ (Hayou et al., arXiv 2402.12354) gives B a higher learning rate than A. As in PEFT's `create_loraplus_optimizer`
a weight decays by its own learning rate times `weight_decay`, so that B decays faster too, and the adapter of an
embedding has the embedding's rate where one is given. PEFT also gives B's rate to every vector (biases, norms,
magnitudes) and 1e-6 to the adapter of an embedding by default; here, as in the paper, only B is singled out.
"""

from typing import Any

import jax

from fastjax.training.config import OptimizerConfig

#: Parts of the names of weights that are vectors; the others are matrices.
VECTORS = ("bias", "norm", "magnitude")


def decays(params: Any, no_decay: list[str] | None = None) -> Any:
    """Which leaves decay.

    A vector is recognised by its name, because stacked vectors have two dimensions as well.

    Args:
        params: the trainable tree.
        no_decay: parts of names of leaves that do not decay; None: the default of the settings, which are vectors.

    Returns:
        A tree of bools of the same structure.
    """
    words = OptimizerConfig().no_decay if no_decay is None else no_decay
    return jax.tree_util.tree_map_with_path(lambda path, _: not any(word in dotted(path) for word in words), params)


def rate_factors(config: OptimizerConfig, params: Any) -> Any:
    """The learning rate of each leaf as a multiple of the schedule's.

    `loraplus_lr_ratio` holds for every lora_B and lora_embedding_B. `embedding_learning_rate` holds for all that is
    trained of embed_tokens and lm_head: the whole weight, single rows, or the adapter of an embedding, which then is
    without the ratio. An adapter on lm_head is one of a linear layer like any other.

    Args:
        config: the settings.
        params: the trainable tree.

    Returns:
        A tree of floats of the same structure.
    """

    def factor(path: tuple[Any, ...], _leaf: Any) -> float:
        parts = dotted(path).split(".")
        table = "embed_tokens" in parts or ("lm_head" in parts and "adapters" not in parts)
        if table and config.embedding_learning_rate is not None:
            return config.embedding_learning_rate / config.learning_rate
        if parts[-1] in ("lora_B", "lora_embedding_B") and config.loraplus_lr_ratio is not None:
            return config.loraplus_lr_ratio
        return 1.0

    return jax.tree_util.tree_map_with_path(factor, params)


def stack_dims(path: tuple[Any, ...], leaf: Any) -> int:
    """How many leading axes of a leaf count layers (or experts), each of which is a tensor of its own elsewhere.

    Optimizers that look at more than one element at a time look at each of these tensors alone. What they do then
    does not depend on how the layers are arranged, and equals what torch does to the separate tensors. (Projections
    that are held as one weight, as q, k and v are in full fine-tuning, count as one matrix.)

    Args:
        path: of the leaf.
        leaf: an array, or its shape and dtype.
    """
    vector = any(word in dotted(path) for word in VECTORS)
    return max(0, leaf.ndim - (1 if vector else 2))


def dotted(path: tuple[Any, ...]) -> str:
    """A leaf's path as a name with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
