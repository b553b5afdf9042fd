"""The base of the trainers with TRL's names: its arguments and methods, over a `Trainer`."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any

from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.runs.context import FineTuned
from fastjax.runs.trainer import Callback, Trainer, TrainerSettings
from fastjax.runs.trl_arguments import SharedArguments, with_names


class TRLTrainer(abc.ABC):
    """A trainer by TRL's arguments; `train()` returns what `Trainer.train` returns.

    Attributes:
        Config: the class of its settings.
        args: the settings.
    """

    Config: type[SharedArguments]

    def __init__(
        self,
        model: LanguageModel,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        **others: Any,
    ):
        """Look at the settings.

        Args:
            model: with an adapter; or with every weight trained, but not for DPO and KTO. A reward model is one that
                `with_score_head` has made.
            args: the settings, a `Config`.
            train_dataset: as of `Trainer`.
            eval_dataset: held-out data, as of `Trainer`.
            processing_class: the tokenizer; None: the model's own.
            tokenizer: its older name.
            callbacks: as of `Trainer`.
            others: names of TRL's; those of the settings (older versions had them here) are taken, those that cannot be
                served are refused with what to use instead.

        Raises:
            ConfigError: settings that contradict each other or the model, or a name that is not served.
        """
        if args is not None and not isinstance(args, self.Config):
            own, name = self.Config.__name__, type(self).__name__
            raise ConfigError(f"{name}: args: expected a {own}, got a {type(args).__name__}")
        self.args: Any = with_names(args or self.Config, others)
        self._tokenizer = processing_class if processing_class is not None else tokenizer
        self._callbacks = callbacks
        held_out = None if self.args.eval_strategy == "no" else eval_dataset
        # An iterator is read here, since its first row may say what the rows are.
        self._data = [list(data) if isinstance(data, Iterator) else data for data in (train_dataset, held_out)]
        self._trainer = self._made(model)

    def _made(self, model: LanguageModel) -> Trainer:
        (train, held_out), settings = self._data, self._settings(model)
        return Trainer(model, self._tokenizer, train, held_out, settings, callbacks=self._callbacks)

    @abc.abstractmethod
    def _settings(self, model: LanguageModel) -> TrainerSettings:
        """The trainer's settings."""

    @property
    def model(self) -> ModelHandle:
        """The model that the trainer was given, trained after `train`."""
        return self._trainer.handle

    def train(self, resume_from_checkpoint: bool = False) -> FineTuned:
        """Train; see `Trainer.train`.

        Args:
            resume_from_checkpoint: go on from the newest checkpoint in the output folder.
        """
        return self._trainer.train(resume=resume_from_checkpoint)

    def save_model(self, output_dir: str) -> None:
        """Write the trained weights; see `language_model.saving.save_pretrained`.

        Args:
            output_dir: the folder.
        """
        self.model.save_pretrained(output_dir)
