"""Held-out evaluations of a model between runs, and measurements of a program's own beside those of the loss."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

from convert.errors import shown
from fastjax.data import Batches
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.runs.datasets import Given, read_held_out
from fastjax.runs.messages import say
from fastjax.runs.steps import run_loss
from fastjax.training.config import TrainConfig
from fastjax.training.evaluation import run_evaluation
from fastjax.training.loss import Loss
from fastjax.training.metrics import Evaluation
from fastjax.training.step import make_eval_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def evaluate_model(
    config: TrainConfig,
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerFast",
    console: Console,
    given: Given,
    loss: Loss | None = None,
) -> tuple[Evaluation, int, int]:
    """Evaluate a model on the held-out data of a run's settings, on the device where it lies.

    Args:
        config: the settings; log-probabilities of a reference are computed batch by batch.
        model: with its reference, where the loss has one.
        tokenizer: of the run.
        console: for what is said of the data.
        given: data sets in memory, as of `load_run_data`.
        loss: in place of the settings' own.

    Returns:
        The evaluation, its rows, and its batches.

    Raises:
        ConfigError: there are no held-out data, or settings that do not suit them.
        DataError: what is wrong with the data.
    """
    data = read_held_out(config, tokenizer, lambda text: say(console, text), given)
    if data is None:
        raise ConfigError("evaluate: eval_dataset: expected held-out data here or in the trainer, got none")
    say(console, f"held out: {data.statistics}")
    size = config.training.per_device_eval_batch_size or config.training.per_device_train_batch_size
    batches = Batches(data.rows, size, shuffle=False)
    steps = batches.steps_per_epoch
    eval_step = make_eval_step(model.graphdef, model.trainable_filter, loss=loss or run_loss(config))
    evaluation = run_evaluation(eval_step, model.trainable, model.frozen, batches.shortened(steps).epoch())
    return evaluation, len(data.rows.lengths), steps


def with_measurements(evaluation: Evaluation, given: Any) -> Evaluation:
    """An evaluation with the measurements of a program's own `evaluate`.

    Args:
        evaluation: by the loss.
        given: numbers by names that begin with `eval_`.

    Raises:
        ConfigError: anything else, or a name that the evaluation has itself.
    """
    try:
        extra = {name: float(value) for name, value in given.items() if name.startswith("eval_")}
    except (AttributeError, TypeError, ValueError):
        extra = None
    if extra is None or len(extra) < len(given):
        raise ConfigError(f"evaluate: expected numbers by names that begin with eval_, got {shown(given)}")
    if taken := evaluation.row(0).keys() & extra.keys():
        names = ", ".join(sorted(taken))
        raise ConfigError(f"evaluate: expected names that the evaluation has not itself, got {names}")
    return evaluation._replace(extra={**evaluation.extra, **extra})
