"""Optimizers as optax transformations: AdamW with moments of 32 or 8 bits, Adafactor, Lion, Muon; schedules."""

from fastjax.training.config import OptimizerConfig
from fastjax.training.optimizers.api import make_optimizer
from fastjax.training.optimizers.groups import decays, group_factors, rate_groups
from fastjax.training.optimizers.schedules import LearningRates, make_schedule, rates_by_step

__all__ = [
    "LearningRates",
    "OptimizerConfig",
    "decays",
    "group_factors",
    "make_optimizer",
    "make_schedule",
    "rate_groups",
    "rates_by_step",
]
