"""An optimizer's settings of each weight: learning rate, weight decay, stacked axes.

LoRA+ (Hayou et al., arXiv 2402.12354) gives B a higher learning rate than A. As in PEFT's `create_loraplus_optimizer`
a weight decays by its own learning rate times `weight_decay`, so that B decays faster too, and the adapter of an
embedding has the embedding's rate if one is set. PEFT also gives B's rate to every vector (biases, norms, magnitudes)
and 1e-6 to the adapter of an embedding by default; here, as in the paper, only B is singled out.
"""

from typing import Any

import jax

from fastjax.models.leaves import LORA_B, VECTORS, leaf_at
from fastjax.training.config import OptimizerConfig


def decays(params: Any, no_decay: list[str] | None = None) -> Any:
    """Mask of the leaves with weight decay.

    Args:
        params: the trainable tree.
        no_decay: leaves without decay: kinds of vectors ("bias", "norm", "magnitude") and parts of names; None: the
            settings' default, all vectors.

    Returns:
        A tree of bools of the same structure.
    """
    words = OptimizerConfig().no_decay if no_decay is None else no_decay
    kinds, parts = VECTORS & set(words), [word for word in words if word not in VECTORS]

    def decay(path: tuple[Any, ...], _leaf: Any) -> bool:
        leaf = leaf_at(path)
        return leaf.kind not in kinds and not any(part in leaf.name for part in parts)

    return jax.tree_util.tree_map_with_path(decay, params)


def rate_groups(params: Any) -> Any:
    """The group of each leaf: leaves of a group have one learning rate.

    Every lora_B and lora_embedding_B is in a group of its own, and so is every trained part of embed_tokens and
    lm_head: the whole weight, single rows, or the adapter of an embedding. An adapter on lm_head counts as a linear
    layer's.

    Args:
        params: the trainable tree.

    Returns:
        A tree of indices into `group_factors` of the same structure.
    """

    def group(path: tuple[Any, ...], _leaf: Any) -> int:
        leaf = leaf_at(path)
        return 2 * leaf.of_table + (leaf.kind in LORA_B)

    return jax.tree_util.tree_map_with_path(group, params)


def group_factors(config: OptimizerConfig) -> tuple[float, float, float, float]:
    """The learning rates of the groups as multiples of the schedule's.

    Args:
        config: the settings.

    Returns:
        Of the other weights, of lora_B (`loraplus_lr_ratio`), of tables, and of a table's lora_B
        (`embedding_learning_rate`, then without the ratio).
    """
    lora_b = config.loraplus_lr_ratio or 1.0
    if config.embedding_learning_rate is None:
        return 1.0, lora_b, 1.0, lora_b
    table = config.embedding_learning_rate / config.learning_rate
    return 1.0, lora_b, table, table


def stack_dims(path: tuple[Any, ...], leaf: Any) -> int:
    """Number of leading axes of a leaf over layers (or experts), separate tensors elsewhere.

    Optimizers with statistics of several elements take each of these tensors alone, so that updates do not depend on
    the layers' arrangement and equal torch's of separate tensors. (Fused projections, as q, k and v in full
    fine-tuning, count as one matrix.)

    Args:
        path: of the leaf.
        leaf: an array, or its shape and dtype.
    """
    return max(0, leaf.ndim - (1 if leaf_at(path).is_vector else 2))
