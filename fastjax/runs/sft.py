"""`SFTTrainer` and `SFTConfig`: TRL's names for a run of `Trainer`, as far as they mean the same.

The defaults are TRL's and transformers' where a name is theirs. A name that is not served says what to use instead.
"""

import dataclasses
from typing import Any

from fastjax.data.records import ChatRecord, Record, TextRecord, TokenRecord
from fastjax.data.settings import PARTS
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.trainer import TrainerSettings, first_record
from fastjax.runs.trl import SharedArguments, TRLTrainer, arguments


@arguments
class SFTConfig(SharedArguments):
    """TRL's settings of supervised fine-tuning; each means what it means there. Further ones: `SharedArguments`.

    Attributes:
        max_length: tokens of a row, at most the model's max_seq_length; None: that. The last has a target too, the
            token behind it: of a row that is cut, one target more than in TRL, which counts that token.
        packing: put several examples into one row, which do not see each other.
        dataset_text_field: the column of plain texts.
        completion_only_loss: learn completions alone; None: where rows have them.
        assistant_only_loss: learn the assistant's messages alone; without it, of conversations, every token.
        router_aux_loss_coef: as in `TrainingSection`; None: 0.
    """

    packing: bool = False
    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    router_aux_loss_coef: float | None = None

    @property
    def columns(self) -> dict[str, str] | None:
        """The names of columns, as of `DataSection`."""
        return None if self.dataset_text_field == "text" else {"text": self.dataset_text_field}

    def settings(
        self, model: LanguageModel, conversations: bool = False, parts: dict[str, str] | None = None, **more: Any
    ) -> TrainerSettings:
        """The trainer's settings.

        Args:
            model: that is trained.
            conversations: whether rows are such, without a prompt of their own.
            parts: what begins instructions and responses in rows of text; None: these are learnt whole.
            more: as of `SharedArguments.settings`.

        Raises:
            ConfigError: a dtype or length that the model does not have.
        """
        whole = not self.assistant_only_loss if conversations else self.completion_only_loss is False
        loss_on = parts or ("all" if whole else "responses")
        return super().settings(model, max_seq_length=self.max_length, loss_on=loss_on, **more)


class SFTTrainer(TRLTrainer):
    """TRL's trainer of supervised fine-tuning."""

    Config = SFTConfig

    def __init__(
        self,
        model: LanguageModel,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **named: Any,
    ):
        """Look at the settings; see `TRLTrainer`."""
        self._parts: dict[str, str] | None = None
        if "max_seq_length" in named:
            named["max_length"] = named.pop("max_seq_length")
        super().__init__(model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **named)

    def _settings(self, model: LanguageModel) -> TrainerSettings:
        first = self._first()
        return self.args.settings(model, isinstance(first, ChatRecord) and not first.prompt, self._parts)

    def _first(self) -> Record | None:
        """The first example, which says what the rows are."""
        return None if self._data[0] is None else first_record(self._data[0], "train_dataset", self.args.columns)


def train_on_responses_only(
    trainer: SFTTrainer, instruction_part: str = "", response_part: str = "", **others: Any
) -> SFTTrainer:
    """Unsloth's name for a trainer that learns the answers alone; the trainer itself is changed and returned.

    Of conversations and of prompts with completions the chat template says where these are. Of rows of text that hold
    conversations they are what stands between a response_part and the next instruction_part.

    Args:
        trainer: of conversations, prompts with completions, or texts.
        instruction_part: the text that begins an instruction; needed for rows of text.
        response_part: the text that begins a response; needed for rows of text.
        others: further arguments of Unsloth's; none is needed, and none is served but num_proc.

    Raises:
        ConfigError: rows of text without both parts, or of token ids; or another argument.
    """
    if unknown := sorted(set(others) - {"num_proc"}):
        raise ConfigError(
            f"train_on_responses_only: expected instruction_part, response_part and num_proc, got {', '.join(unknown)}"
        )
    if not isinstance(trainer, SFTTrainer):
        raise ConfigError(f"train_on_responses_only: trainer: expected a SFTTrainer, got a {type(trainer).__name__}")
    first = trainer._first()
    if isinstance(first, TokenRecord):
        raise ConfigError(
            "train_on_responses_only: expected rows of conversations or texts, got token ids (input_ids), of which "
            "labels, completion_mask or assistant_masks say what is learnt"
        )
    parts: dict[str, str] = dict(zip(PARTS, (instruction_part, response_part), strict=True))
    if not isinstance(first, TextRecord) or first.prompt:
        parts = {}
    for name, part in parts.items():
        if not part:
            raise ConfigError(
                f"train_on_responses_only: {name}: expected the text that begins one, since the rows are plain texts, "
                "got none; give it, or rows of conversations (messages)"
            )
    trainer.args = dataclasses.replace(trainer.args, assistant_only_loss=True, completion_only_loss=None)
    trainer._parts = parts or None
    trainer._trainer = trainer._made(trainer.model)
    return trainer
