"""Optimizers as optax transformations: AdamW with moments of 32 or 8 bits, Adafactor, Lion; schedules and groups."""

from fastjax.training.config import OptimizerConfig
from fastjax.training.optimizers.api import make_optimizer
from fastjax.training.optimizers.groups import decays, rate_factors
from fastjax.training.optimizers.schedules import learning_rates, make_schedule

__all__ = ["OptimizerConfig", "decays", "learning_rates", "make_optimizer", "make_schedule", "rate_factors"]
