"""TRL's names for runs over preferences: `DPOTrainer`, `ORPOTrainer`, `KTOTrainer`, `CPOTrainer`, `RewardTrainer`, and
their configs.

The defaults are TRL's. A name that is not served says what to use instead. A row holds one pair (KTO: an answer, and
its prompt with the completion of another one) unless `packing` is set, so a batch is what it is in TRL.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.trainer import TrainerSettings
from fastjax.runs.trl_arguments import SharedArguments, arguments
from fastjax.runs.trl_trainer import TRLTrainer
from fastjax.training.config import PreferencesSection

_REFERENCE = "the model as training begins, with the adapter that it has by then, which is the reference"
_SECTION = "TrainerSettings(preferences=PreferencesSection(…)) for what losses there are"
#: Names with another place -> which.
_ELSEWHERE = {
    "max_prompt_length": "max_length, over prompt and answer together",
    "max_completion_length": "max_length, over prompt and answer together",
    "ref_model": _REFERENCE,
    "precompute_ref_log_probs": "a loss with a reference",
    "precompute_ref_batch_size": "per_device_eval_batch_size",
    "sync_ref_model": "a reference that stays",
    "generate_during_eval": "Trainer's evaluate",
    "router_aux_loss_coef": "a loss without it",
    "quantization_config": "FastLanguageModel.from_pretrained",
    **dict.fromkeys(("loss_weights", "ld_alpha", "use_weighting", "alpha", "is_encoder_decoder"), _SECTION),
}


@arguments
class PreferenceArguments(SharedArguments, abc.ABC):
    """What the configs share; further ones: `SharedArguments`.

    Attributes:
        max_length: tokens of a prompt with its answer, at most; a row of the model's max_seq_length holds two of them.
        disable_dropout: the adapter has no dropout.
        packing: put several pairs into one row, which do not see each other; not a name of TRL's.
    """

    disable_dropout: bool = True
    packing: bool = False

    def _expect(self, name: str, *known: str) -> None:
        if getattr(self, name) not in known:
            raise ConfigError(
                f"{type(self).__name__}: {name}: expected {' or '.join(known)}, got {getattr(self, name)!r}"
            )

    def elsewhere(self) -> Mapping[str, str]:
        """Names with another place -> which."""
        return _ELSEWHERE

    def preferences(self) -> PreferencesSection:
        """The section `preferences`: what has the same name there."""
        return PreferencesSection(**self.named_alike(PreferencesSection) | self.section())

    @abc.abstractmethod
    def section(self) -> dict[str, Any]:
        """The loss, and what has another name in the section or is not the argument's."""

    def settings(self, model: LanguageModel) -> TrainerSettings:
        """The trainer's settings.

        Args:
            model: that is trained.

        Raises:
            ConfigError: a dtype or dropout that the model does not have.
        """
        if self.disable_dropout and model.lora is not None and model.lora.lora_dropout:
            raise ConfigError(
                f"{type(self).__name__}: disable_dropout: expected false over an adapter with lora_dropout="
                f"{model.lora.lora_dropout}, got true; make the adapter with lora_dropout=0"
            )
        return TrainerSettings(*self.sections(model), self.preferences(), packing=self.packing)


@arguments
class PolicyArguments(PreferenceArguments, abc.ABC):
    """What those of log-probabilities share.

    Attributes:
        truncation_mode: "keep_start": the beginning of what is longer is kept.
        beta: as in `PreferencesSection`.
    """

    learning_rate: float = 1e-6
    truncation_mode: str = "keep_start"
    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("truncation_mode", "keep_start")


@arguments
class DPOConfig(PolicyArguments):
    """TRL's settings of DPO.

    Attributes:
        loss_type: "sigmoid" (DPO) or "ipo".
        label_smoothing: nothing, as of these two in TRL; of cDPO it is `PreferencesSection`'s.
        precompute_ref_log_probs: as in `PreferencesSection`.
    """

    loss_type: str | Sequence[str] = "sigmoid"
    label_smoothing: float = 0.0
    precompute_ref_log_probs: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.loss_type, str) and len(self.loss_type) == 1:
            self.loss_type = self.loss_type[0]
        super().__post_init__()
        self._expect("loss_type", "sigmoid", "ipo")
        if self.label_smoothing:
            raise ConfigError(
                f"DPOConfig: label_smoothing: expected 0 with loss_type {self.loss_type!r}, of which TRL has none, got "
                f"{self.label_smoothing}; cDPO is PreferencesSection('dpo', label_smoothing=…)"
            )

    def section(self) -> dict[str, Any]:
        """DPO or IPO."""
        return {"loss": "ipo" if self.loss_type == "ipo" else "dpo", "label_smoothing": None}


@arguments
class ORPOConfig(PolicyArguments):
    """TRL's settings of ORPO; its first term is over all tokens of the chosen documents, as there."""

    def section(self) -> dict[str, Any]:
        """ORPO."""
        return {"loss": "orpo", "nll_tokens": "all"}


@arguments
class KTOConfig(PolicyArguments):
    """TRL's settings of KTO.

    Attributes:
        loss_type: "kto".
        desirable_weight: as in `PreferencesSection`.
        undesirable_weight: likewise.
        precompute_ref_log_probs: likewise.
    """

    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    precompute_ref_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("loss_type", "kto")

    def section(self) -> dict[str, Any]:
        """KTO."""
        return {"loss": "kto"}


@arguments
class CPOConfig(PolicyArguments):
    """TRL's settings of CPO, of which SimPO is served: `loss_type="simpo"` with `cpo_alpha=0`.

    Attributes:
        loss_type: "simpo".
        cpo_alpha: 0.
        simpo_gamma: the margin.
        label_smoothing: as in `PreferencesSection`.
    """

    loss_type: str = "sigmoid"
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("loss_type", "simpo")
        if self.cpo_alpha:
            raise ConfigError(f"CPOConfig: cpo_alpha: expected 0, which is SimPO, got {self.cpo_alpha}")

    def section(self) -> dict[str, Any]:
        """SimPO."""
        return {"loss": "simpo", "gamma": self.simpo_gamma}


@arguments
class RewardConfig(PreferenceArguments):
    """TRL's settings of a reward model; pairs with an answer longer than `max_length` are left out, as there.

    Attributes:
        center_rewards_coefficient: as in `PreferencesSection`.
    """

    learning_rate: float = 1e-4
    center_rewards_coefficient: float | None = None

    def section(self) -> dict[str, Any]:
        """A reward model's."""
        return {"loss": "reward"}

    def settings(self, model: LanguageModel) -> TrainerSettings:
        """The trainer's settings; see `PreferenceArguments.settings`."""
        return dataclasses.replace(super().settings(model), too_long="drop")


class PreferenceTrainer(TRLTrainer):
    """The base of the trainers for preferences."""

    def __init__(self, model: LanguageModel, **named: Any):
        """Look at the settings; see `TRLTrainer`, whose arguments have no order here, as TRL's have another."""
        super().__init__(model, **named)

    def _settings(self, model: LanguageModel) -> TrainerSettings:
        return self.args.settings(model)


class DPOTrainer(PreferenceTrainer):
    """TRL's trainer of DPO and IPO."""

    Config = DPOConfig


class ORPOTrainer(PreferenceTrainer):
    """TRL's trainer of ORPO."""

    Config = ORPOConfig


class KTOTrainer(PreferenceTrainer):
    """TRL's trainer of KTO, whose rows are shuffled; mismatched prompts have the completions before theirs."""

    Config = KTOConfig


class CPOTrainer(PreferenceTrainer):
    """TRL's trainer of CPO, for SimPO."""

    Config = CPOConfig


class RewardTrainer(PreferenceTrainer):
    """TRL's trainer of reward models, over pairs that may have a `margin`."""

    Config = RewardConfig
