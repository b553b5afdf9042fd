"""Learning rates by step: a linear warm-up, then cosine, linear or no decay, or a plateau with a linear decay (WSD).

They equal transformers' `get_{cosine,linear,constant}_schedule_with_warmup`, with a floor its
`get_cosine_with_min_lr_schedule_with_warmup`, and its `get_wsd_schedule(decay_type="linear")`, step by step. WSD:
MiniCPM, Hu et al., arXiv 2404.06395.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from fastjax.training.config import OptimizerConfig

#: A run's learning rates are computed for a multiple of so many steps: nearly all runs have arrays of one length.
BLOCK = 2**16


class LearningRates(NamedTuple):
    """The learning rates of a run, as arguments of its step: a run with others compiles nothing.

    They stand in the optimizer's state and follow from the settings: a checkpoint does not hold them.

    Attributes:
        by_step: by the number of updates made before; float32 [multiple of BLOCK].
        factors: of the groups of weights, `groups.group_factors`; float32 [groups].
    """

    by_step: Float[Array, " steps"]
    factors: Float[Array, " groups"]


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of steps done.

    Args:
        config: the settings; the warm-up takes `warmup_steps`, or `warmup_ratio` of all steps, and the decay of wsd
            takes `decay_ratio` of them, both rounded up; a decay that would begin in the warm-up begins after it.
        total_steps: the number of steps of the run.

    Returns:
        A function from the step count (integer, scalar or array) to the learning rate (float32, same shape), that is
        `learning_rate` times a factor. With w steps of warm-up, d of wsd's decay, r = `min_lr_ratio` and T steps in
        all, the factor of step k < w is k/w, and under wsd r + (1 - r)·k/w, as in transformers. After that it is 1
        for constant, and r + (1 - r)·f for the others: f = ½(1 + cos πp) for cosine and 1 - p for linear, where
        p = (k - w)/(T - w); f = min(1, (T - k)/d) for wsd.
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    remaining = max(1, total_steps - warmup)
    decay = max(1, min(math.ceil(config.decay_ratio * total_steps), remaining))
    kind, lowest = config.lr_scheduler_type, config.min_lr_ratio

    def schedule(count):
        step = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((step - warmup) / remaining, 0.0, 1.0)
        if kind == "cosine":
            factor = 0.5 * (1.0 + jnp.cos(math.pi * progress))
        elif kind == "linear":
            factor = 1.0 - progress
        elif kind == "wsd":
            factor = jnp.clip((total_steps - step) / decay, 0.0, 1.0)
        else:
            factor = jnp.ones_like(progress)
        rising = step / max(1, warmup)
        if kind != "constant":
            factor = lowest + (1.0 - lowest) * factor
        if kind == "wsd":
            rising = lowest + (1.0 - lowest) * rising
        return config.learning_rate * jnp.where(step < warmup, rising, factor)

    return schedule


def rates_by_step(config: OptimizerConfig, total_steps: int) -> np.ndarray:
    """The learning rate of every step, on the host: float32 [`total_steps` up to the next multiple of BLOCK].

    It holds for weights of factor 1 in `groups.group_factors`; after the end of the run it is the schedule's.
    """
    with jax.ensure_compile_time_eval():  # numbers, also where a function that is traced makes the optimizer
        return np.asarray(make_schedule(config, total_steps)(jnp.arange(-(-total_steps // BLOCK) * BLOCK)))


def rate_in_state(opt_state: Any, updates: Int[Array, ""]) -> Float[Array, ""] | None:
    """The learning rate of an update, from the optimizer's state; None: the optimizer has none there.

    Args:
        opt_state: of `make_optimizer`'s transformation, or of a chain with it.
        updates: made before.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LearningRates))
    rates = next((node for node in nodes if isinstance(node, LearningRates)), None)
    return None if rates is None else jax.lax.dynamic_index_in_dim(rates.by_step, updates, keepdims=False)
