"""A run's train step, from its settings: what training compiles and what a plan compiles are one."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.data.batches import Batch
from fastjax.language_model import LanguageModel
from fastjax.training.config import TrainConfig
from fastjax.training.config.training import TrainingSection
from fastjax.training.loss import Loss, loss_sums
from fastjax.training.optimizers import make_optimizer
from fastjax.training.step import make_train_step


def run_loss(training: TrainingSection) -> Loss:
    """The cross-entropy of a run, with the settings' noise and routers' losses.

    Args:
        training: the section.
    """
    return functools.partial(
        loss_sums,
        neftune_noise_alpha=training.neftune_noise_alpha,
        router_aux_loss_coef=training.router_aux_loss_coef,
        router_z_loss_coef=training.router_z_loss_coef,
    )


def run_step(
    config: TrainConfig,
    model: LanguageModel,
    total_steps: int,
    loss: Loss,
    compiler_options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """The jitted train step of a run (`training.step.make_train_step`).

    Args:
        config: the run.
        model: its model, or one of shapes.
        total_steps: of the run, for the schedule.
        loss: of a microbatch.
        compiler_options: XLA's.
    """
    return make_train_step(
        model.graphdef,
        make_optimizer(config.optimizer, total_steps),
        model.trainable_filter,
        loss=loss,
        accumulation_dtype=config.training.accumulation_dtype,
        loss_scale_window=config.training.loss_scale_window,
        compiler_options=compiler_options,
    )


def batch_shapes(config: TrainConfig) -> Batch:
    """The shapes of a run's batches.

    Args:
        config: the run.
    """
    training = config.training
    shape = (
        training.gradient_accumulation_steps,
        training.per_device_train_batch_size,
        config.model.max_seq_length,
    )
    array: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    return Batch(array, array, array, array)
