"""The settings of an optimizer as one optax chain: clipping, direction, weight decay, learning rates.

The parts share their shape: a rule turns the clipped gradient into a direction, the decay is added to it, and each
leaf's learning rate multiplies both (decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101). The rules are
AdamW with moments of 32, 16 or 8 bits (`adam.py`), Adafactor (`adafactor.py`), Muon (`muon.py`) and Lion (Chen et al.,
arXiv 2302.06675).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fastjax.training.config import OptimizerConfig
from fastjax.training.optimizers.adafactor import scale_by_factored_rms
from fastjax.training.optimizers.adam import scale_by_adam
from fastjax.training.optimizers.groups import decays, group_factors, rate_groups
from fastjax.training.optimizers.muon import scale_by_muon
from fastjax.training.optimizers.schedules import LearningRates, rates_by_step
from fastjax.training.optimizers.stacked_layers import StackedLayers


def make_optimizer(
    config: OptimizerConfig, total_steps: int, *, offload: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, then the rule of `config.name` with the schedule.

    Parameters in bfloat16 have eight significant bits: a sum with an update is rounded to the nearest, as in torch and
    bitsandbytes, and an update below 0.2% to 0.4% of its weight is lost. At the learning rates of fine-tuning that is
    most of them: train in float32, the default of `model.param_dtype`, unless memory is short.

    Args:
        config: the settings.
        total_steps: the number of steps of the run and of the schedule.
        offload: keep Adam's moments of matrices in the host's memory; the update then takes `finite`, as
            `adam.scale_by_adam`'s.

    Returns:
        A transformation of gradients into updates in the dtype of the parameters. All arithmetic is float32, and so
        is the state except moments in 8 or 16 bits. The state consists of arrays alone, the learning rates among them.
    """
    clip = _clip(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=lambda params: decays(params, config.no_decay))
    rates = LearningRates(
        rates_by_step(config, total_steps),  # pyright: ignore[reportArgumentType]  # on the device in the state
        np.asarray(group_factors(config), np.float32),  # pyright: ignore[reportArgumentType]
    )
    return _in_float32(optax.chain(clip, _direction(config, offload), decay, _scale_by_rates()), rates)


def _clip(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with one factor for all, where that divides each number."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        factor = most / jnp.maximum(optax.tree.norm(updates), most)
        return jax.tree.map(lambda leaf: leaf * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _direction(config: OptimizerConfig, offload: bool) -> optax.GradientTransformation:
    if config.name == "adafactor":
        return scale_by_factored_rms()
    if config.name == "lion":
        return optax.scale_by_lion(config.adam_beta1, config.adam_beta2)
    if config.name == "muon":
        return scale_by_muon(config.muon_momentum, config.adam_beta1, config.adam_beta2, config.adam_epsilon)
    bits: Any = {"adamw": 32, "adamw_16bit": 16, "adamw_8bit": 8}[config.name]
    return scale_by_adam(config.adam_beta1, config.adam_beta2, config.adam_epsilon, bits=bits, offload=offload)


def _scale_by_rates() -> optax.GradientTransformationExtraArgs:
    """Multiply each leaf by its negative learning rate; the state counts the steps."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        rates: LearningRates = extra["rates"]
        rate = -jax.lax.dynamic_index_in_dim(rates.by_step, state, keepdims=False)
        by_group = [rate * factor for factor in rates.factors]
        scaled = jax.tree.map(lambda u, group: u * by_group[group], updates, rate_groups(updates))
        return scaled, state + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros((), jnp.int32), update)


def _in_float32(
    inner: optax.GradientTransformationExtraArgs, rates: LearningRates
) -> optax.GradientTransformationExtraArgs:
    """The chain in float32 over stacks of arrays, with the learning rates behind the states of its parts."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        # Shapes suffice to start from zero: no float32 copy of the parameters has to exist.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
        parts: Any = inner.init(jax.eval_shape(StackedLayers(params).stacked, shapes))
        return (*parts, jax.tree.map(jnp.asarray, rates))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("update: expected the parameters as third argument, got none; weight decay needs them")
        *parts, here = state
        layers = StackedLayers(params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with its integer counters
            after: Any  # of the chain's parts, a tuple
            gradients, weights = layers.stacked(widen(updates)), layers.stacked(widen(params))
            wide, after = inner.update(gradients, tuple(parts), weights, rates=here, **extra)
        return jax.tree.map(lambda u, p: u.astype(p.dtype), layers.apart(wide), params), (*after, here)

    return optax.GradientTransformationExtraArgs(init, update)
