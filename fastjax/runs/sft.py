"""`SFTTrainer` and `SFTConfig`: TRL's names for a run of `Trainer`, as far as they mean the same.

The defaults are TRL's and transformers' where a name is theirs. A name that is not served says what to use instead.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastjax.data.columns import parse_row
from fastjax.data.records import ChatRecord, Record, TextRecord, TokenRecord
from fastjax.data.settings import PARTS
from fastjax.data.template_parts import template_parts
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.encoded_rows import EncodedRows
from fastjax.runs.trainer import TrainerSettings, first_row
from fastjax.runs.trl import TRLTrainer
from fastjax.runs.trl_arguments import SharedArguments, arguments


@arguments
class SFTConfig(SharedArguments):
    """TRL's settings of supervised fine-tuning; each means what it means there. Further ones: `SharedArguments`.

    Attributes:
        max_length: tokens of a row, at most the model's max_seq_length; None: that. The last has a target too, the
            token behind it: of a row that is cut, one target more than in TRL, which counts that token.
        packing: put several examples into one row, which do not see each other.
        dataset_text_field: the column of plain texts, which are learnt where rows have it, whatever else they have.
        completion_only_loss: learn completions alone; None: where rows have them.
        assistant_only_loss: learn the assistant's messages alone; without it, of conversations, every token.
        router_aux_loss_coef: as in `TrainingSection`; None: 0.
    """

    packing: bool = False
    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    router_aux_loss_coef: float | None = None

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
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        formatting_func: Callable[[Any], Any] | None = None,
        **named: Any,
    ):
        """Look at the settings.

        Args:
            model: as of `TRLTrainer`.
            args: as of `TRLTrainer`.
            train_dataset: as of `TRLTrainer`.
            eval_dataset: as of `TRLTrainer`.
            formatting_func: makes a row's text; or, of columns that are lists, as of a batch, a list of texts.
            named: further arguments of `TRLTrainer`.
        """
        self._parts: dict[str, str] | None = None
        self._formatting = formatting_func
        super().__init__(model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **named)

    def _settings(self, model: LanguageModel) -> TrainerSettings:
        first, columns = self._first()
        conversations = isinstance(first, ChatRecord) and not first.prompt
        if isinstance(first, TextRecord) and self.args.assistant_only_loss and not (self._parts or first.prompt):
            raise ConfigError(
                "SFTConfig: assistant_only_loss: expected false over rows of texts, which do not say what the "
                "assistant wrote, got true; give rows of messages, or call train_on_responses_only(trainer, …)"
            )
        if self.args.completion_only_loss and isinstance(first, ChatRecord | TextRecord) and not first.prompt:
            instead = "assistant_only_loss=True" if conversations else "train_on_responses_only(trainer, …)"
            raise ConfigError(
                "SFTConfig: completion_only_loss: expected none or false over rows without a prompt and a completion, "
                f"got true; use {instead}"
            )
        return self.args.settings(model, conversations, self._parts, columns=columns)

    def _rows(self, data: Any) -> Any:
        made = data if self._formatting is None else _formatted(data, self._formatting)
        return super()._rows(made)

    def _unused(self) -> Iterator[str]:
        yield from super()._unused()
        asked, there = self.args.max_length, self._trainer.model.max_seq_length
        if asked is not None and there < asked != type(self.args).max_length:
            yield f"max_length: {asked}, but the model was loaded for rows of {there} (max_seq_length), which hold"

    def _first(self) -> tuple[Record | None, dict[str, str] | None]:
        """The first example, which says what the rows are, and the columns that are read."""
        data, field = self._data[0], self.args.dataset_text_field
        row = None if data is None else first_row(data, "train_dataset")
        has_text = row is not None and row.get(field) is not None and row.get("input_ids") is None
        columns = {"text": field} if has_text or field != "text" else None
        return None if row is None else parse_row(row, "train_dataset row 0", columns), columns

    @property
    def train_dataset(self) -> EncodedRows:
        """The training rows as token ids and labels, each encoded when it is asked for."""
        return self._trainer.encoded("train")

    @property
    def eval_dataset(self) -> EncodedRows | None:
        """The held-out rows, as `train_dataset`; None: there are none."""
        return None if self._data[1] is None else self._trainer.encoded("eval", self._data[1])


def _formatted(data: Any, function: Callable[[Any], Any]) -> Any:
    """Rows of the texts that a function makes of rows in memory."""
    if data is None:
        return None
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ConfigError("formatting_func: expected rows in memory, got a data set's name; load it with datasets")
    rows: list[dict[str, Any]] = []
    for row in data:
        made = function(row)
        made = function({name: [value] for name, value in row.items()}) if isinstance(made, list) else [made]
        if not all(isinstance(text, str) for text in made):
            raise ConfigError(f"formatting_func: expected a function that gives a text, or a list of texts, got {made}")
        rows += [{"text": text} for text in made]
    return rows


def train_on_responses_only(
    trainer: SFTTrainer,
    instruction_part: str | None = None,
    response_part: str | None = None,
    force_match: bool = True,
    **others: Any,
) -> SFTTrainer:
    """Unsloth's name for a trainer that learns the answers alone; the trainer itself is changed and returned.

    Of conversations and of prompts with completions the chat template says where these are. Of rows of text that hold
    conversations they are what stands between a response_part and the next instruction_part.

    Args:
        trainer: of conversations, prompts with completions, or texts.
        instruction_part: the text that begins an instruction, in rows of text; None: that of the chat template.
        response_part: the text that begins a response; None as there.
        force_match: the parts are found as they are written.
        others: further arguments of Unsloth's; none is needed, and none is served but num_proc.

    Raises:
        ConfigError: rows of text, and a chat template that does not say their parts; rows of token ids; or another
            argument.
    """
    if unknown := sorted(set(others) - {"num_proc"}) + ([] if force_match else ["force_match=False"]):
        raise ConfigError(
            f"train_on_responses_only: expected instruction_part, response_part and num_proc, got {', '.join(unknown)}"
        )
    if not isinstance(trainer, SFTTrainer):
        raise ConfigError(f"train_on_responses_only: trainer: expected a SFTTrainer, got a {type(trainer).__name__}")
    first, _ = trainer._first()
    if isinstance(first, TokenRecord):
        raise ConfigError(
            "train_on_responses_only: expected rows of conversations or texts, got token ids (input_ids), of which "
            "labels, completion_mask or assistant_masks say what is learnt"
        )
    trainer._parts = None
    if isinstance(first, TextRecord) and not first.prompt:
        found = (instruction_part, response_part)
        if not all(found):
            found = template_parts(trainer.processing_class)
        trainer._parts = {name: str(part) for name, part in zip(PARTS, found, strict=True)}
    trainer.args = dataclasses.replace(trainer.args, assistant_only_loss=True, completion_only_loss=None)
    trainer._make(trainer.model)
    return trainer
