"""A whole run: from its settings to an adapter, or a model, on disk.

This puts the parts together in the order in which mistakes are cheap: the output folder and the data are looked at
before the weights are loaded.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import yaml
from rich.console import Console

from fastjax.data import Batches, Dataset, load_tokenizer, prepare
from fastjax.errors import ConfigError, TrainingError
from fastjax.language_model import FastLanguageModel, LanguageModel
from fastjax.training.config import TrainConfig
from fastjax.training.loop import fit, run_evaluation
from fastjax.training.metrics import Evaluation, JsonLines
from fastjax.training.optimizers import learning_rates, make_optimizer
from fastjax.training.progress import make_progress
from fastjax.training.step import init_state, make_eval_step, make_train_step


class FineTuned(NamedTuple):
    """What a run leaves behind.

    Attributes:
        model: the trained model.
        folder: where it was saved: the adapter's folder, or the whole model's.
        evaluation: the last held-out evaluation; None without held-out data.
    """

    model: LanguageModel
    folder: Path
    evaluation: Evaluation | None


def fine_tune(config: TrainConfig, console: Console | None = None) -> FineTuned:
    """Load, train, save.

    Args:
        config: the settings.
        console: for progress; None: standard output.

    Returns:
        The trained model and where it is.

    Raises:
        ConfigError: settings that contradict each other, the model or the output folder.
        ConvertError: what is wrong with the model's folder.
        DataError: what is wrong with the data.
        TrainingError: a step that is not finite, or a device without enough memory.
        OSError: a file that cannot be read or written.
    """
    console = console or Console()
    folder = _result_folder(config)
    settings_file = folder.parent / "config.yaml"
    settings_file.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), encoding="utf-8")
    train, held_out = _load_data(config, console)
    model = _load_model(config, console)
    settings = config.training
    batches = Batches(
        train.rows,
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        seed=settings.seed,
    )
    steps = settings.max_steps or math.ceil(settings.num_train_epochs * batches.steps_per_epoch)
    optimizer = make_optimizer(config.optimizer, steps)
    train_step = make_train_step(model.graphdef, optimizer, model.trainable_filter)
    eval_step = make_eval_step(model.graphdef, model.trainable_filter)

    def evaluate(trainable) -> Evaluation:
        size = settings.per_device_eval_batch_size or settings.per_device_train_batch_size
        assert held_out is not None
        return run_evaluation(eval_step, trainable, model.frozen, Batches(held_out.rows, size, shuffle=False).epoch())

    state = init_state(model.trainable, optimizer, jax.random.key(settings.seed))
    model = model.replace(trainable=None)  # the state has a copy; of a whole model there should be one
    with contextlib.ExitStack() as stack:
        sinks = [JsonLines(folder.parent / "metrics.jsonl"), make_progress(steps, settings.logging_steps, console)]
        for sink in sinks:
            stack.callback(sink.close)
        stack.enter_context(_memory_advice())
        state, evaluation = fit(
            train_step,
            state,
            model.frozen,
            batches.from_step(0, steps),
            learning_rates=learning_rates(config.optimizer, steps),
            sinks=sinks,
            evaluate=None if held_out is None else evaluate,
            eval_steps=settings.eval_steps,
        )
    model = model.replace(trainable=state.trainable)
    model.save_pretrained(folder)
    return FineTuned(model, folder, evaluation)


def _result_folder(config: TrainConfig) -> Path:
    """Where the result goes, in an output folder that exists now and holds no other result."""
    output = Path(config.output.output_dir)
    folder = output / ("model" if config.model.full_finetuning else "adapter")
    if folder.exists() and not config.output.overwrite_output_dir:
        raise ConfigError(
            f"output.output_dir: expected a folder without a result, given {output}, which holds {folder.name}/ of an "
            "earlier run; name another folder or set output.overwrite_output_dir: true"
        )
    output.mkdir(parents=True, exist_ok=True)
    return folder


def _load_data(config: TrainConfig, console: Console) -> tuple[Dataset, Dataset | None]:
    model, data = config.model, config.data
    if not Path(model.model_name).is_dir():
        raise ConfigError(
            f"model.model_name: expected a folder in Hugging Face format, given {model.model_name}, which is none"
        )
    tokenizer = load_tokenizer(model.model_name)
    datasets = []
    for name, files in (("train", data.train_file), ("held out", data.eval_file)):
        if files is None:
            datasets.append(None)
            continue
        dataset = prepare(files, tokenizer, model.max_seq_length, loss_on=data.loss_on, packing=data.packing)
        console.print(f"{name}: {dataset.statistics}", highlight=False, soft_wrap=True)
        datasets.append(dataset)
    return datasets[0], datasets[1]


def _load_model(config: TrainConfig, console: Console) -> LanguageModel:
    model, _ = FastLanguageModel.from_pretrained(**dataclasses.asdict(config.model))
    if not config.model.full_finetuning:
        arguments = dataclasses.asdict(config.lora)
        if arguments["target_modules"] is None:
            del arguments["target_modules"]
        model = FastLanguageModel.get_peft_model(model, **arguments)
    trained, total = model.num_parameters()
    console.print(
        f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%}), on "
        f"{jax.devices()[0].device_kind}, {model.dtype}",
        highlight=False,
        soft_wrap=True,
    )
    return model


@contextlib.contextmanager
def _memory_advice() -> Iterator[None]:
    """A device out of memory as an error that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(
            f"the device has not enough memory: {str(error).splitlines()[0]}. Lower "
            "training.per_device_train_batch_size (and raise gradient_accumulation_steps as much), lower "
            "model.max_seq_length, or set model.use_gradient_checkpointing: true"
        ) from error
