"""AdamW with warm-up, decay and clipping, as an optax chain (Loshchilov and Hutter, arXiv 1711.05101).

The schedules equal those of transformers' `get_{cosine,linear}_schedule_with_warmup`, step by step. The moments are
float32 whatever the dtype of the parameters: in bfloat16 the second moment would stand still, because 0.1% of it is
below half a unit in its last place.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fastjax.training.config import OptimizerConfig

__all__ = ["OptimizerConfig", "decays", "learning_rates", "make_optimizer", "make_schedule"]

#: Words in the path of a leaf that is a vector a layer, even where the layers are stacked into a matrix.
UNDECAYED = ("bias", "norm", "magnitude")


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of steps done.

    Args:
        config: the settings; the warm-up takes `warmup_steps`, or `warmup_ratio` of all steps, rounded up.
        total_steps: the number of steps of the run.

    Returns:
        A function from the step count (integer, scalar or array) to the learning rate (float32, same shape):
        `learning_rate` × k/w while k < w, and then, with p = (k − w)/(total − w), × ½(1 + cos πp), × (1 − p), or × 1.
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    remaining = max(1, total_steps - warmup)

    def schedule(count):
        step = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((step - warmup) / remaining, 0.0, 1.0)
        if config.lr_scheduler_type == "cosine":
            factor = 0.5 * (1.0 + jnp.cos(math.pi * progress))
        elif config.lr_scheduler_type == "linear":
            factor = 1.0 - progress
        else:
            factor = jnp.ones_like(progress)
        return config.learning_rate * jnp.where(step < warmup, step / max(1, warmup), factor)

    return schedule


def learning_rates(config: OptimizerConfig, total_steps: int) -> np.ndarray:
    """The learning rate of every step of a run, on the host: float32 [total_steps]."""
    return np.asarray(make_schedule(config, total_steps)(jnp.arange(total_steps)))


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW with the schedule.

    Args:
        config: the settings.
        total_steps: the number of steps of the run, at the end of which the schedule ends.

    Returns:
        A transformation of gradients into updates in the dtype of the parameters; its state is float32.
    """
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    adamw = optax.adamw(
        make_schedule(config, total_steps),
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )
    return _in_float32(optax.chain(clip, adamw))


def decays(params: Any) -> Any:
    """Which leaves decay: matrices, recognised by their path because a stacked vector has two dimensions as well.

    Args:
        params: the trainable tree.

    Returns:
        A tree of bools of the same structure.
    """

    def decay(path: tuple[Any, ...], _leaf: Any) -> bool:
        return not any(word in jax.tree_util.keystr(path) for word in UNDECAYED)

    return jax.tree_util.tree_map_with_path(decay, params)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("update: expected the parameters as third argument, given none; weight decay needs them")
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            wide, state = inner.update(widen(updates), state, widen(params))
        return jax.tree.map(lambda u, p: u.astype(p.dtype), wide, params), state

    return optax.GradientTransformation(lambda params: inner.init(widen(params)), update)
