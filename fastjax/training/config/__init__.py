"""The settings of a training run: the sections of the YAML file that `fastjax train --config` reads.

The sections `model` and `lora` are the arguments of `FastLanguageModel.from_pretrained` and `.get_peft_model`; the
others carry the names of Hugging Face's TrainingArguments where they mean the same. Nothing here repeats a value that
the model's config.json gives. A value out of range is refused when the section is made, with its full name.
"""

import dataclasses

from fastjax.errors import ConfigError
from fastjax.limits import MAX_STEP_TOKENS
from fastjax.training.config.data import DataSection
from fastjax.training.config.model import LoraSection, ModelSection
from fastjax.training.config.optimizer import OptimizerConfig
from fastjax.training.config.output import OutputSection
from fastjax.training.config.parallel import ParallelSection
from fastjax.training.config.preferences import PreferencesSection, check_preferences
from fastjax.training.config.qat import QATSettings
from fastjax.training.config.training import TrainingSection

__all__ = [
    "DataSection",
    "LoraSection",
    "ModelSection",
    "OptimizerConfig",
    "OutputSection",
    "ParallelSection",
    "PreferencesSection",
    "QATSettings",
    "TrainConfig",
    "TrainingSection",
]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: the base model and how it is held.
        data: training and held-out data.
        output: the output folder and its contents.
        lora: the adapter.
        optimizer: the rule of the updates and its schedule.
        training: length, batches, evaluation.
        parallel: the devices.
        preferences: chosen and rejected answers.
    """

    model: ModelSection
    data: DataSection
    output: OutputSection
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingSection = dataclasses.field(default_factory=TrainingSection)
    parallel: ParallelSection = dataclasses.field(default_factory=ParallelSection)
    preferences: PreferencesSection = dataclasses.field(default_factory=PreferencesSection)

    def __post_init__(self) -> None:
        if self.model.full_finetuning and self.lora != LoraSection():
            raise ConfigError("lora: expected no such section with model.full_finetuning: true, which has no adapter")
        if self.training.offload_optimizer and self.optimizer.name not in ("adamw", "adamw_8bit"):
            raise ConfigError(
                f"training.offload_optimizer: expected false with optimizer.name: {self.optimizer.name}, got true; "
                "it is for adamw and adamw_8bit"
            )
        needs_eval = {
            "training.eval_steps": self.training.eval_steps is not None,
            "training.early_stopping_patience": self.training.early_stopping_patience is not None,
            "output.load_best_model_at_end": self.output.load_best_model_at_end,
            "output.sample_answers": self.output.sample_answers > 0,
        }
        for name, given in needs_eval.items():
            if given and self.data.eval is None and self.data.val_set_size is None:
                raise ConfigError(
                    f"{name}: expected data.eval or data.val_set_size with it, got none; name held-out data or leave "
                    "it out"
                )
        training = self.training
        size = max(training.per_device_train_batch_size, training.per_device_eval_batch_size or 1)
        tokens = size * training.gradient_accumulation_steps * self.model.max_seq_length
        if tokens > MAX_STEP_TOKENS:
            raise ConfigError(
                f"training.per_device_train_batch_size: expected at most {MAX_STEP_TOKENS} tokens a step (rows × "
                f"gradient_accumulation_steps × model.max_seq_length), got {tokens}"
            )
        if self.output.sample_answers and self.preferences.loss is not None:
            raise ConfigError(
                f"output.sample_answers: expected 0 with preferences.loss: {self.preferences.loss}, got "
                f"{self.output.sample_answers}"
            )
        check_preferences(self.preferences, self.model, self.data, training)
        parallel = self.parallel.sizes
        alone = {"data.packing: false": not self.data.packing} | {
            f"parallel.{name}: 1": parallel.get(name, 1) == 1 for name in ("context", "tensor")
        }
        for setting, holds in alone.items():
            if training.group_by_length and not holds:
                raise ConfigError(f"training.group_by_length: expected false without {setting}, got true")
        streaming = any(source.streaming for source in self.data.sources("train"))
        if streaming and self.training.max_steps is None:
            raise ConfigError("training.max_steps: expected a number of steps for streamed data, got none")
        if streaming and training.group_by_length:
            raise ConfigError("training.group_by_length: expected false for streamed data, got true")
        for name, every in (
            ("training.eval_steps", training.eval_steps),
            ("output.save_steps", self.output.save_steps),
        ):
            if streaming and every == "epoch":
                raise ConfigError(
                    f"{name}: expected a number of steps, or a share of them, for streamed data, got epoch; the end of "
                    "theirs is not known"
                )

    @property
    def holds_start(self) -> bool:
        """Whether the reference of the preferences is what the adapter begins with, since that is not the base."""
        lora = self.lora
        is_base = lora.adapter is None and not lora.modules_to_save and lora.init_lora_weights in (True, "gaussian")
        return self.preferences.needs_reference and not is_base
