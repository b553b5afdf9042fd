"""TRL's names for runs over preferences: `DPOTrainer`, `ORPOTrainer`, `KTOTrainer`, `CPOTrainer`, `RewardTrainer`, and
their configs.

The defaults are TRL's. A name that is not served says what to use instead. A row holds one pair (KTO: an answer, and
its prompt with the completion of another one) unless `packing` is set, so a batch is what it is in TRL.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from fastjax.data.settings import TooLong
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.trainer import TrainerSettings
from fastjax.runs.trl import TRLTrainer
from fastjax.runs.trl_arguments import SharedArguments, arguments


@arguments
class PreferenceArguments(SharedArguments):
    """Arguments that the configs share; further ones: `SharedArguments`.

    Attributes:
        max_length: tokens of a prompt with its answer, at most; a row of the model's max_seq_length holds two of them.
        max_prompt_length: as in `PreferencesSection`.
        max_completion_length: as in `PreferencesSection`.
        disable_dropout: the adapter has no dropout.
        packing: put several pairs into one row, which do not see each other; not a name of TRL's.
    """

    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    disable_dropout: bool = True
    packing: bool = False

    def settings(self, model: LanguageModel, **more: Any) -> TrainerSettings:
        """The trainer's settings; see `SharedArguments.settings`.

        Raises:
            ConfigError: a dtype or dropout that the model does not have.
        """
        if self.disable_dropout and model.lora is not None and model.lora.lora_dropout:
            raise ConfigError(
                f"{type(self).__name__}: disable_dropout: expected false over an adapter with lora_dropout="
                f"{model.lora.lora_dropout}, got true; make the adapter with lora_dropout=0"
            )
        return super().settings(model, **more)


@arguments
class PolicyArguments(PreferenceArguments):
    """Arguments of the losses over log-probabilities.

    Attributes:
        beta: as in `PreferencesSection`.
    """

    learning_rate: float = 1e-6
    beta: float = 0.1


@arguments
class DPOConfig(PolicyArguments):
    """TRL's settings of DPO.

    Attributes:
        loss_type: "sigmoid" (DPO) or "ipo".
        precompute_ref_log_probs: as in `PreferencesSection`.
    """

    losses = {"sigmoid": "dpo", "ipo": "ipo"}
    loss_type: str | Sequence[str] = "sigmoid"
    precompute_ref_log_probs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, list | tuple) and len(self.loss_type) == 1:
            self.loss_type = self.loss_type[0]
        super().__post_init__()


@arguments
class ORPOConfig(PolicyArguments):
    """TRL's settings of ORPO; its first term is over all tokens of the chosen documents, as there."""

    losses = {None: "orpo"}
    nll_tokens: ClassVar = "all"


@arguments
class KTOConfig(PolicyArguments):
    """TRL's settings of KTO.

    Attributes:
        loss_type: "kto".
        desirable_weight: as in `PreferencesSection`.
        undesirable_weight: as in `PreferencesSection`.
        precompute_ref_log_probs: as in `PreferencesSection`.
    """

    losses = {"kto": "kto"}
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    precompute_ref_log_probs: bool = False


@arguments
class CPOConfig(PolicyArguments):
    """TRL's settings of CPO, of which SimPO is served: `loss_type="simpo"` with `cpo_alpha=0`.

    Attributes:
        loss_type: "simpo".
        cpo_alpha: 0.
        simpo_gamma: the margin.
        label_smoothing: as in `PreferencesSection`.
    """

    losses = {"simpo": "simpo"}
    choices = {**SharedArguments.choices, "cpo_alpha": (0,)}
    loss_type: str = "sigmoid"
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    label_smoothing: float = 0.0

    @property
    def gamma(self) -> float:
        """SimPO's margin by its name in `PreferencesSection`."""
        return self.simpo_gamma


@arguments
class RewardConfig(PreferenceArguments):
    """TRL's settings of a reward model; pairs with an answer longer than `max_length` are left out, as there.

    Attributes:
        center_rewards_coefficient: as in `PreferencesSection`.
    """

    losses = {None: "reward"}
    too_long: ClassVar[TooLong] = "drop"
    learning_rate: float = 1e-4
    center_rewards_coefficient: float | None = None


class DPOTrainer(TRLTrainer):
    """TRL's trainer of DPO and IPO."""

    Config = DPOConfig


class ORPOTrainer(TRLTrainer):
    """TRL's trainer of ORPO."""

    Config = ORPOConfig


class KTOTrainer(TRLTrainer):
    """TRL's trainer of KTO, whose rows are shuffled; mismatched prompts have the completions before theirs."""

    Config = KTOConfig


class CPOTrainer(TRLTrainer):
    """TRL's trainer of CPO, for SimPO."""

    Config = CPOConfig


class RewardTrainer(TRLTrainer):
    """TRL's trainer of reward models, over pairs that may have a `margin`."""

    Config = RewardConfig
