"""Training from Python: a model, data in memory or in files, settings made in the program, over the loop of a run."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from convert.errors import shown
from fastjax.data.pipeline import open_data, timed_encoder
from fastjax.data.settings import DataOptions, DataSource
from fastjax.data.sources import OpenSource, given_rows, open_sources
from fastjax.errors import ConfigError
from fastjax.execution.language_model import check_model, on_device
from fastjax.execution.options import Length, LoadOptions
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.language_model.handle import handle_of, value_of
from fastjax.language_model.variants import with_checkpointing, with_fake_quantization, with_start
from fastjax.models.leaves import leaf_at
from fastjax.options import describe, fits
from fastjax.parallel import place
from fastjax.runs.checkpointing import compile_step
from fastjax.runs.context import Evaluate, FineTuned, Run, perform
from fastjax.runs.encoded_rows import EncodedRows
from fastjax.runs.held_out import evaluate_model, with_measurements
from fastjax.runs.mesh import open_mesh, suited_meshes
from fastjax.runs.messages import say
from fastjax.runs.model import tell_model
from fastjax.runs.result import finished
from fastjax.runs.stages import claim, compare_inputs, compare_settings, find_checkpoint, identify, read_data, train
from fastjax.runs.steps import Optimizer
from fastjax.training.config import (
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerConfig,
    OutputSection,
    ParallelSection,
    PreferencesSection,
    TrainConfig,
    TrainingSection,
)
from fastjax.training.loss import Loss
from fastjax.training.metrics import Evaluation, Row, Sink
from fastjax.training.observers import Startup
from fastjax.training.placement import weight_shardings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: A data set: a path or its description, a `datasets.Dataset`, or an iterable of dicts.
Data = str | Path | DataSource | Iterable[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _RunSettings:
    output: OutputSection | str | os.PathLike[str]
    training: TrainingSection = dataclasses.field(default_factory=TrainingSection)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    preferences: PreferencesSection = dataclasses.field(default_factory=PreferencesSection)
    parallel: ParallelSection = dataclasses.field(default_factory=ParallelSection)
    max_seq_length: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainerSettings(DataOptions, _RunSettings):
    """The settings of a trainer; further ones are those of `DataOptions`.

    Attributes:
        output: the output folder, or the whole section.
        training: length, batches, evaluation.
        optimizer: the rule of the updates and its schedule, where the trainer gets none of your own.
        preferences: learning from chosen and rejected answers.
        parallel: the devices, by what they split; all of them where it names none.
        max_seq_length: tokens of a row, where these are fewer than the model's; None: as many.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        sections = {"training": TrainingSection, "optimizer": OptimizerConfig}
        sections |= {"preferences": PreferencesSection, "parallel": ParallelSection}
        for name, section in sections.items():
            if not isinstance(value := getattr(self, name), section):
                raise ConfigError(f"settings.{name}: expected a {section.__name__}, got {shown(value, 80)}")
        if not isinstance(self.output, OutputSection | str | os.PathLike):
            raise ConfigError(f"settings.output: expected a folder or an OutputSection, got {shown(self.output, 80)}")
        if not fits(self.max_seq_length, Length | None):
            length = describe(Length | None)
            raise ConfigError(f"settings.max_seq_length: expected {length}, got {shown(self.max_seq_length, 80)}")


class Event(NamedTuple):
    """Something that a callback is told.

    Attributes:
        name: "step", "evaluation", or that of a row of metrics.jsonl with an event: "started", "saved", "finished", …
        step: the number of the step.
        values: the row.
        end: makes the step that is under way the last one, which is evaluated and saved as a last one is.
    """

    name: str
    step: int
    values: Mapping[str, Any]
    end: Callable[[], None]


Callback = Callable[[Event], None]


class Trainer:
    """Fine-tunes a model that is in memory, on all devices of this process.

    The run is that of `fastjax train`: the same loop, checkpoints, `metrics.jsonl`, report and result in the output
    folder. The model has been loaded on one device, and is there again when the run has ended; `fastjax train` loads
    the weights in parts.

    Attributes:
        model: the model as this trainer has it, trained after `train`.
        handle: the model as it was given, where it is a handle; it becomes the trained one, also by an error.
    """

    handle: ModelHandle
    _placed: LanguageModel | None

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: "PreTrainedTokenizerFast | None" = None,
        train_dataset: Data | Sequence[str | DataSource] | None = None,
        eval_dataset: Data | Sequence[str | DataSource] | None = None,
        settings: TrainerSettings | None = None,
        *,
        optimizer: Optimizer | None = None,
        loss: Loss | None = None,
        evaluate: Evaluate | None = None,
        callbacks: Sequence[Callback] = (),
        sinks: Sequence[Sink] = (),
        console: Console | None = None,
        **others: Any,
    ):
        """Look at the settings; nothing is read yet.

        Args:
            model: with an adapter, or with every weight trained.
            tokenizer: None: the model's own.
            train_dataset: a path, a description, several of these; a `datasets.Dataset` or an iterable of dicts.
            eval_dataset: held-out data of the same kinds; None: no evaluation.
            settings: of the run.
            optimizer: in place of the settings' own; without a schedule the rows have no learning rate.
            loss: in place of the settings' own; see `training.loss.Loss`.
            evaluate: a measurement of your own at each held-out evaluation.
            callbacks: functions that are told each event, in the order of the rows; what they raise ends the run.
            sinks: further receivers of the rows.
            console: for progress; None: standard output.
            others: refused; names of transformers' are those of `SFTTrainer`.

        Raises:
            ConfigError: settings that contradict each other or the model, or no data.
        """
        if others:
            raise ConfigError(
                f"Trainer: {next(iter(others))}: unknown; expected settings=TrainerSettings(…). SFTTrainer has the "
                "names of transformers' and TRL's trainers"
            )
        check_model(value_of(model))
        tokenizer = tokenizer if tokenizer is not None else model.tokenizer  # pyright: ignore[reportAssignmentType]
        for name, value in (("train_dataset", train_dataset), ("settings", settings), ("tokenizer", tokenizer)):
            if value is None:
                raise ConfigError(f"Trainer: {name}: expected one, got none")
        assert settings is not None and tokenizer is not None
        if not isinstance(settings, TrainerSettings):
            raise ConfigError(
                f"Trainer: settings: expected TrainerSettings, got a {type(settings).__name__}; the trainers by TRL's "
                "names, such as SFTTrainer, take such as args"
            )
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ConfigError(
                "Trainer: tokenizer: expected the one that FastLanguageModel.from_pretrained gave, or another fast one "
                f"of transformers', got a {type(tokenizer).__name__}"
            )
        self.handle, self._settings, self._tokenizer = handle_of(model), settings, tokenizer
        if jax.process_count() > 1:
            raise ConfigError(f"Trainer: expected one process, got {jax.process_count()}; use fastjax launch")
        self._paths: dict[str, Any] = {
            "train": "train_dataset",
            "eval": None if eval_dataset is None else "eval_dataset",
        }
        given: dict[str, list[OpenSource]] = {}
        for name, data in (("train", train_dataset), ("eval", eval_dataset)):
            if data is not None:
                self._paths[name], given[name] = self._source(data, f"{name}_dataset")
        self._console, self._ended = console or Console(), False
        observers = [_CallbackSink(callback, self._end) for callback in callbacks]
        self._brought: dict[str, Any] = {"loss": loss, "evaluate": evaluate, "optimizer": optimizer, "given": given}
        self._brought |= {"sinks": (*sinks, *observers), "ended": lambda: self._ended}
        self._take(self.handle.value)

    def _take(self, model: LanguageModel) -> None:
        """Look at the model, and make it what this trainer trains."""
        settings = self._settings
        if model.lora is None and not model.full_finetuning:
            raise ConfigError(
                "Trainer: model: expected one with an adapter (FastLanguageModel.get_peft_model) or with "
                "full_finetuning=True, got one of which nothing is trained"
            )
        qat = settings.training.quantization
        self._taken, aware = model, model.quantization_aware
        if qat is not None and aware is not None:
            asked = (qat.weights, qat.activations, tuple(qat.modules_to_not_quantize))
            if asked != (aware.weights, aware.activations, tuple(aware.modules_to_not_quantize)):
                raise ConfigError(
                    f"training.qat: expected that of the model, {aware.weights} with inputs in {aware.activations}, "
                    f"got {qat.weights} with inputs in {qat.activations}; load the model again for another"
                )
        if qat is not None and model.quantization_aware is None:
            model = with_fake_quantization(model, qat.weights, qat.activations, qat.modules_to_not_quantize)
        if settings.max_seq_length is not None:
            model = model.with_options(max_seq_length=min(settings.max_seq_length, model.max_seq_length))
        self.config = _config(model, settings, self._paths)
        if settings.preferences.needs_reference and model.quantization_aware is not None:
            raise ConfigError(
                "Trainer: model: expected one without quantisation-aware training with a loss of preferences that has "
                "a reference, got one with it"
            )
        begun = self.config.holds_start or (settings.preferences.needs_reference and _is_trained(model))
        self._start = model.trainable if begun else None
        if self._brought["loss"] is None or settings.preferences.scores:
            _check_head(model, settings.preferences)
        self.model = ModelHandle(model.replace(tokenizer=self._tokenizer))

    def train(self, resume: bool = False) -> FineTuned:
        """Train, and save the result.

        Args:
            resume: go on from the newest whole checkpoint in the output folder; from the start where there is none.
                So does `output.resume`.

        Returns:
            The trained model and its folder; `self.model` is it, too, and so is the model that the trainer was given,
            where that is `FastLanguageModel`'s.

        Raises:
            ConfigError: settings that contradict the output folder or the checkpoint, or a run that is finished.
            DataError: what is wrong with the data.
            TrainingError: a step that is not finite, weights without gradient, or a device without enough memory.
            Interrupted: SIGTERM, SIGHUP or SIGINT came; the state is saved.
            OSError: a file that cannot be read or written.
        """
        if self.handle.value is not self._taken:
            self._take(self.handle.value)  # another trainer has trained it since
        self._ended, self._placed = False, None
        run = Run(self.config, self._console, resume or self.config.output.resume, **self._brought)
        run.meshes = suited_meshes(self.config, self.model.value, run.tell)
        run.tokenizer, run.start = self._tokenizer, self._start
        run.model = with_start(self.model.value, self._start)
        if (aware := run.model.quantization_aware) is not None and self._settings.training.qat is None:
            run.tell(f"training.qat: null, and the model is trained for {aware.weights} already: it goes on so")
        try:
            inputs = (find_checkpoint, compare_settings, read_data, identify, compare_inputs)
            result = perform(run, (claim, _refuse_finished, *inputs, _compile, self._spread, train))
        except BaseException:  # also what a callback raises
            if (left := run.reached() or self._placed) is not None:
                self._keep(left)
            raise
        self._keep(result.model.value)
        return result._replace(model=self.model)

    def evaluate(self, eval_dataset: Data | Sequence[str | DataSource] | None = None) -> tuple[Evaluation, int, int]:
        """Evaluate the model as it is, on the one device where it lies.

        Args:
            eval_dataset: as of the trainer; None: the trainer's.

        Returns:
            The evaluation, its rows, and its batches of per_device_eval_batch_size.

        Raises:
            ConfigError: there are no such data, or settings that do not suit them.
            DataError: what is wrong with the data.
            OSError: a file that cannot be read.
        """
        if self.handle.value is not self._taken:
            self._take(self.handle.value)
        config, given = self.config, self._brought["given"]
        if eval_dataset is not None:
            path, rows = self._source(eval_dataset, "eval_dataset")
            given = {**given, "eval": rows}
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=path, val_set_size=None))
        if config.preferences.precompute_ref_log_probs:
            if self.model.full_finetuning:
                raise ConfigError(
                    "evaluate: preferences.precompute_ref_log_probs: expected false where every weight is trained, "
                    "since the reference is there before training alone, got true; evaluate by eval_steps"
                )
            computed = dataclasses.replace(config.preferences, precompute_ref_log_probs=False)
            config = dataclasses.replace(config, preferences=computed)
        model = with_start(self.model.value, self._start)
        loss, evaluate = self._brought["loss"], self._brought["evaluate"]
        evaluation, rows, steps = evaluate_model(config, model, self._tokenizer, self._console, given, loss)
        if evaluate is not None:
            evaluation = with_measurements(evaluation, evaluate(self.model))
        return evaluation, rows, steps

    def _source(self, data: Any, name: str) -> tuple[Any, list[OpenSource]]:
        """A data set as the settings name it, and its rows where it is in memory."""
        if (named := _named(data)) is not None:
            return named, []
        return name, [given_rows(data, name, self._settings.columns)]

    def tell(self, text: str) -> None:
        """Say a line on the console."""
        say(self._console, text)

    def encoded(self, name: str, rows: Any = None) -> EncodedRows:
        """The rows of a data set as they are learnt, to look at.

        Args:
            name: "train" or "eval".
            rows: the data set, where the trainer has it not; None: it has.

        Raises:
            ConfigError: no such data set, or settings that do not suit it.
            OSError: a file that cannot be read.
        """
        data, tokenizer = self.config.data, self._tokenizer
        path, given = (
            (data.sources(name), self._brought["given"].get(name)) if rows is None else self._source(rows, name)
        )
        opened = open_data(given or path, tokenizer, data)
        return EncodedRows(opened, lambda: timed_encoder(tokenizer, data, None)[0])

    def _spread(self, run: Run) -> None:
        """Put the weights on the run's devices, also those of the handle: one device would hold them twice."""
        if (mesh := open_mesh(run.step.mesh)) is None:
            return
        tell_model(run.model, run.console, run.step.mesh)
        frozen = run.model.frozen
        run.model = run.model.replace(frozen=place(frozen, weight_shardings(frozen, run.model.config, mesh)))
        self._placed = with_start(run.model, None)
        self._hold(ModelHandle(self._placed))

    def _keep(self, model: LanguageModel) -> None:
        """Hold a model that a run has left, on one device."""
        self._hold(ModelHandle(on_device(with_start(model, None), jax.local_devices()[0])))

    def _hold(self, model: ModelHandle) -> None:
        """A model as this trainer's and as that of whoever holds the handle it was given."""
        self.handle.become(model)
        self.model, self._taken = model, self.handle.value

    def _end(self) -> None:
        self._ended = True


class _CallbackSink:
    """A callback as a sink."""

    def __init__(self, callback: Callback, end: Callable[[], None]):
        self._callback, self._end = callback, end

    def write(self, row: Row) -> None:
        """Tell the event that the row is."""
        name = str(row.get("event") or ("step" if "loss" in row else "evaluation"))
        self._callback(Event(name, int(row["step"] or 0), row, self._end))

    def close(self) -> None:
        """Nothing: there is no more to tell."""


def first_row(data: Data, name: str) -> Mapping[str, Any] | None:
    """The first row of a data set; None: it has none.

    Args:
        data: as of `Trainer`, no iterator.
        name: of the data set, for errors.

    Raises:
        ConfigError: it is no data set.
        DataError: a row that cannot be read.
        OSError: a file that cannot be read.
    """
    named = _named(data)
    opened = [given_rows(data, name)] if named is None else open_sources(named)
    return next((row for row, _ in opened[0].rows()), None)


def _named(data: Any) -> Any:
    """The data set as the settings name it; None: it is in memory."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, DataSource):
        return [data]
    if isinstance(data, Sequence) and data and all(isinstance(one, str | Path | DataSource) for one in data):
        return [one if isinstance(one, DataSource) else str(one) for one in data]
    return None


def _config(model: LanguageModel, settings: TrainerSettings, paths: Mapping[str, Any]) -> TrainConfig:
    """The settings of the run, those that the model is already made by included."""
    if model.source is not None:
        name = "@".join(model.source)
    else:
        name = "random weights" if model.folder is None else str(model.folder)
    options = {field.name: getattr(model.options, field.name) for field in dataclasses.fields(LoadOptions)}
    # The model in memory has them, also when the run is resumed.
    options |= dict.fromkeys(("new_tokens", "special_tokens_map", "rope_scaling"))
    section = ModelSection(name, **options)
    lora = LoraSection()
    if model.lora is not None:
        known = {field.name for field in dataclasses.fields(LoraSection)}
        lora = LoraSection(**{key: value for key, value in dataclasses.asdict(model.lora).items() if key in known})
    output = settings.output
    if not isinstance(output, OutputSection):
        output = OutputSection(os.fspath(output))
    data = DataSection(
        **paths, **{field.name: getattr(settings, field.name) for field in dataclasses.fields(DataOptions)}
    )
    return TrainConfig(
        section,
        data,
        output,
        lora,
        settings.optimizer,
        settings.training,
        parallel=settings.parallel,
        preferences=settings.preferences,
    )


def _is_trained(model: LanguageModel) -> bool:
    """Whether an adapter whose fresh products are zero has others."""
    leaves = jax.tree_util.tree_leaves_with_path(model.trainable)
    return any(bool(jnp.any(leaf)) for path, leaf in leaves if leaf_at(path).kind in ("lora_B", "lora_embedding_A"))


def _check_head(model: LanguageModel, preferences: PreferencesSection) -> None:
    """Refuse a reward model for a loss over logits, and one with logits for that of a reward model."""
    if preferences.scores and not model.config.scored:
        raise ConfigError(
            "Trainer: model: expected a reward model with preferences.loss: reward, got one with logits; make it by "
            "model.with_score_head(), before FastLanguageModel.get_peft_model"
        )
    if model.config.scored and not preferences.scores:
        raise ConfigError(
            f"Trainer: model: expected one with logits with preferences.loss: {preferences.loss or 'null'}, got a "
            "reward model"
        )


def _refuse_finished(run: Run) -> None:
    if run.resume and finished(run.folder, run.config):
        raise ConfigError(
            f"resume: the run in {run.folder.path} is finished, its result is {run.folder.result}; load it "
            "(FastLanguageModel.load_adapter, or from_pretrained after full fine-tuning) or train anew"
        )


def _compile(run: Run) -> None:
    """Compile the step for the model, which gets its policy of rematerialisation."""
    began, model = time.perf_counter(), run.model
    run.step = compile_step(run, model)
    chosen = with_checkpointing(model, run.step.policy)
    run.model = chosen.replace(options=model.options)  # a later run chooses anew
    run.startup = Startup(began - run.began, time.perf_counter() - began)
