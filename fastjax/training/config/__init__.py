"""The settings of a training run: the sections of the YAML file that `fastjax train --config` reads.

The sections `model` and `lora` are the arguments of `FastLanguageModel.from_pretrained` and `.get_peft_model`; the
others carry the names of Hugging Face's TrainingArguments where they mean the same. Nothing here repeats a value that
the model's config.json gives. A value out of range is refused when the section is made, with its full name.
"""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

from fastjax.errors import ConfigError
from fastjax.limits import MAX_STEP_TOKENS
from fastjax.training.config.data import DataSection
from fastjax.training.config.model import LoraSection, ModelSection
from fastjax.training.config.optimizer import OptimizerConfig
from fastjax.training.config.output import OutputSection
from fastjax.training.config.parallel import ParallelSection
from fastjax.training.config.preferences import PreferencesSection
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
        for key, allowed, reason, way_out in _rules(self):
            value = operator.attrgetter(key)(self)
            if value not in allowed:
                expected = " or ".join(map(_written, allowed))
                raise ConfigError(f"{key}: expected {expected} {reason}, got {_written(value)}{way_out}")
        if self.model.full_finetuning and self.lora != LoraSection():
            raise ConfigError("lora: expected no such section with model.full_finetuning: true, which has no adapter")
        training, output, way_out = self.training, self.output, "name held-out data or leave it out"
        needs_eval = {
            "training.eval_steps": training.eval_steps is not None,
            "training.early_stopping_patience": training.early_stopping_patience is not None,
            "output.load_best_model_at_end": output.load_best_model_at_end,
            "output.sample_answers": output.sample_answers > 0,
        }
        for key, given in needs_eval.items():
            if given and self.data.eval is None and self.data.val_set_size is None:
                raise ConfigError(f"{key}: expected data.eval or data.val_set_size with it, got none; {way_out}")
        rows = max(training.per_device_train_batch_size, training.per_device_eval_batch_size or 1)
        tokens = rows * training.gradient_accumulation_steps * self.model.max_seq_length
        if tokens > MAX_STEP_TOKENS:
            raise ConfigError(
                f"training.per_device_train_batch_size: expected at most {MAX_STEP_TOKENS} tokens a step (rows × "
                f"gradient_accumulation_steps × model.max_seq_length), got {tokens}"
            )
        if self.streams and self.preferences.loss is not None:
            beside = f"with preferences.loss: {self.preferences.loss}"
            raise ConfigError(f"data.train: streaming: expected false {beside}, got true; its data are read whole")
        if self.streams and training.max_steps is None:
            raise ConfigError("training.max_steps: expected a number of steps for streamed data, got none")
        for key, every in {"training.eval_steps": training.eval_steps, "output.save_steps": output.save_steps}.items():
            if self.streams and every == "epoch":
                raise ConfigError(
                    f"{key}: expected a number of steps, or a share of them, for streamed data, got epoch; the end of "
                    "theirs is not known"
                )

    @property
    def streams(self) -> bool:
        """Whether the training data are read while training."""
        return any(source.streaming for source in self.data.sources("train"))

    @property
    def holds_start(self) -> bool:
        """Whether the reference of the preferences is what the adapter begins with, since that is not the base."""
        lora = self.lora
        is_base = lora.adapter is None and not lora.modules_to_save and lora.init_lora_weights in (True, "gaussian")
        return self.preferences.needs_reference and not is_base


#: Settings → the values that they may have with preferences.
_WITH_PREFERENCES: dict[str, tuple[Any, ...]] = {
    "output.sample_answers": (0,),
    "data.loss_on": ("responses", "last_response"),
    "data.too_long": ("truncate", "drop"),
    "training.label_smoothing_factor": (0,),
    "training.z_loss_coef": (0,),
    "training.router_aux_loss_coef": (0,),
    "training.router_z_loss_coef": (0,),
    "training.neftune_noise_alpha": (None,),
    "training.qat": (None,),
}


def _rules(config: TrainConfig) -> Iterator[tuple[str, tuple[Any, ...], str, str]]:
    """The settings that others restrict: the key, its values, the reason, and a way out."""
    optimizer, loss = config.optimizer.name, f"with preferences.loss: {config.preferences.loss}"
    if optimizer not in ("adamw", "adamw_8bit"):
        reason = f"with optimizer.name: {optimizer}"
        yield "training.offload_optimizer", (False,), reason, "; it is for adamw and adamw_8bit"
    if config.preferences.loss is not None:
        for key, allowed in _WITH_PREFERENCES.items():
            yield key, allowed, loss, ""
    if config.preferences.reference_in_step:
        reason = f"{loss}, whose reference is the model as training begins"
        way_out = "; with preferences.precompute_ref_log_probs: true it is computed before; orpo and simpo need none"
        yield "model.full_finetuning", (False,), reason, way_out
    grouped = {"without data.packing: false": config.data.packing, "for streamed data": config.streams}
    for reason, applies in grouped.items():
        if applies:
            yield "training.group_by_length", (False,), reason, ""


def _written(value: Any) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
