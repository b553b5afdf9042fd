"""What trainers with TRL's names have in common: its methods, over a `Trainer`."""

from fastjax.language_model import ModelHandle
from fastjax.runs.context import FineTuned
from fastjax.runs.trainer import Trainer


class TRLTrainer:
    """TRL's methods; a subclass makes `_trainer` of its arguments. `train()` returns what `Trainer.train` returns."""

    _trainer: Trainer

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
