"""Fast, lean fine-tuning of language models on NVIDIA GPUs in JAX.

`from fastjax import FastLanguageModel, Trainer` is where a script starts. They are imported when they are asked for, so
that what needs no JAX (the command line's help, conversions) imports none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.data.settings import DataSource
    from fastjax.language_model import FastLanguageModel, LanguageModel, ModelHandle
    from fastjax.runs.preference_trainers import (
        CPOConfig,
        CPOTrainer,
        DPOConfig,
        DPOTrainer,
        KTOConfig,
        KTOTrainer,
        ORPOConfig,
        ORPOTrainer,
        RewardConfig,
        RewardTrainer,
    )
    from fastjax.runs.sft import SFTConfig, SFTTrainer, get_chat_template, train_on_responses_only
    from fastjax.runs.trainer import Event, Trainer, TrainerSettings
    from fastjax.training.config import OptimizerConfig, OutputSection, PreferencesSection, TrainingSection

_PLACES = {
    "CPOConfig": "fastjax.runs.preference_trainers",
    "CPOTrainer": "fastjax.runs.preference_trainers",
    "DPOConfig": "fastjax.runs.preference_trainers",
    "DPOTrainer": "fastjax.runs.preference_trainers",
    "DataSource": "fastjax.data.settings",
    "Event": "fastjax.runs.trainer",
    "FastLanguageModel": "fastjax.language_model",
    "KTOConfig": "fastjax.runs.preference_trainers",
    "KTOTrainer": "fastjax.runs.preference_trainers",
    "LanguageModel": "fastjax.language_model",
    "ModelHandle": "fastjax.language_model",
    "ORPOConfig": "fastjax.runs.preference_trainers",
    "ORPOTrainer": "fastjax.runs.preference_trainers",
    "OptimizerConfig": "fastjax.training.config",
    "OutputSection": "fastjax.training.config",
    "PreferencesSection": "fastjax.training.config",
    "RewardConfig": "fastjax.runs.preference_trainers",
    "RewardTrainer": "fastjax.runs.preference_trainers",
    "SFTConfig": "fastjax.runs.sft",
    "SFTTrainer": "fastjax.runs.sft",
    "Trainer": "fastjax.runs.trainer",
    "TrainerSettings": "fastjax.runs.trainer",
    "TrainingSection": "fastjax.training.config",
    "get_chat_template": "fastjax.runs.sft",
    "train_on_responses_only": "fastjax.runs.sft",
}

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DataSource",
    "Event",
    "FastLanguageModel",
    "KTOConfig",
    "KTOTrainer",
    "LanguageModel",
    "ModelHandle",
    "ORPOConfig",
    "ORPOTrainer",
    "OptimizerConfig",
    "OutputSection",
    "PreferencesSection",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "Trainer",
    "TrainerSettings",
    "TrainingSection",
    "get_chat_template",
    "train_on_responses_only",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
