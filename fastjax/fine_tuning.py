"""A whole run: from its settings to an adapter, or a model, on disk.

This puts the parts together in the order in which mistakes are cheap: the output folder, the checkpoint to go on from
and the data are looked at before the weights are loaded.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from convert.errors import ConvertError
from fastjax.data import Batches
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError, Interrupted, TrainingError
from fastjax.language_model import FastLanguageModel, LanguageModel
from fastjax.models.paths import adapter_paths
from fastjax.training.checkpoint import Checkpoints, Progress
from fastjax.training.config import LoraSection, TrainConfig
from fastjax.training.datasets import RunData, load_run_data
from fastjax.training.determinism import compiler_options
from fastjax.training.device import device_use
from fastjax.training.flops import attended_length, flops_per_token, peak_flops
from fastjax.training.health import GradientCheck, leaf_names, non_finite_rows
from fastjax.training.identity import Identity, base_identity, check_identity, run_identity
from fastjax.training.loop import Cadence, Fitted, fit, run_evaluation
from fastjax.training.loss import Loss, loss_sums
from fastjax.training.metrics import Evaluation, JsonLines, Sink, Throughput, Tolerant, read_rows
from fastjax.training.model_check import load_run_tokenizer, lora_arguments
from fastjax.training.optimizers import learning_rates, make_optimizer
from fastjax.training.origins import pinned
from fastjax.training.progress import make_progress
from fastjax.training.report import default_settings, describe_environment, usage, write_report
from fastjax.training.resume import (
    Earlier,
    check_result,
    check_settings,
    damage,
    finished,
    newest,
    restore,
    warn,
    weight_digests,
)
from fastjax.training.run_folder import RunFolder, claimed
from fastjax.training.signals import StopSignals
from fastjax.training.step import TrainState, init_state, make_eval_step, make_probe, make_train_step
from fastjax.training.trackers import check_trackers, make_trackers

#: A user's own held-out evaluation: of a model, to numbers by names that begin with `eval_`.
Evaluate = Callable[[LanguageModel], Mapping[str, float]]


class FineTuned(NamedTuple):
    """What a run leaves behind.

    Attributes:
        model: the trained model.
        folder: where it was saved: the adapter's folder, or the whole model's.
        evaluation: the last held-out evaluation; None without held-out data.
        config: the settings, with names on the hub at their commit.
    """

    model: LanguageModel
    folder: Path
    evaluation: Evaluation | None
    config: TrainConfig


def fine_tune(
    config: TrainConfig,
    console: Console | None = None,
    *,
    resume: bool = False,
    loss: Loss | None = None,
    evaluate: Evaluate | None = None,
) -> FineTuned:
    """Load, train, save.

    Args:
        config: the settings.
        console: for progress; None: standard output.
        resume: go on from the newest whole checkpoint in the output folder; from the start where there is none. Where
            the run there is finished, with the same settings, its result is read back and nothing is trained.
        loss: a loss of your own in place of the cross-entropy; see `training.loss.Loss`.
        evaluate: what else to measure at each held-out evaluation.

    Returns:
        The trained model and where it is.

    Raises:
        ConfigError: settings that contradict each other, the model, the output folder or the checkpoint.
        ConvertError: what is wrong with the model's folder.
        DataError: what is wrong with the data.
        TrainingError: a step that is not finite, weights without gradient, or a device without enough memory.
        Interrupted: SIGTERM, SIGHUP or SIGINT came; the state is saved.
        OSError: a file that cannot be read or written.
    """
    console = console or Console()
    with claimed(config, resume=resume) as folder:
        config = pinned(config, folder.read_settings() if resume else None)
        damaged = None
        if resume and finished(folder, config):
            done = _read_back(config, folder, console)
            if isinstance(done, FineTuned):
                _say(console, f"the run in {folder.path} is finished: nothing is left to do")
                return done
            damaged = f"{folder.result} is damaged: {done}"
            warn(console, f"{damaged}; looking for a checkpoint to make it again from")
        checkpoints = Checkpoints(folder.checkpoints, keep=config.output.save_total_limit)
        earlier = newest(checkpoints, console) if resume else None
        if damaged is not None and earlier is None:
            raise TrainingError(
                f"{damaged}; there is no checkpoint to make it again from. To train again, replace it "
                "(output.overwrite_output_dir: true, without --resume)"
            )
        if resume and earlier is None:
            check_result(folder, config)
        changed = [] if earlier is None else check_settings(earlier, dataclasses.asdict(config))
        check_trackers(config.output.report_to)
        tokenizer = load_run_tokenizer(config)
        data = load_run_data(config, tokenizer, lambda text: _say(console, text))
        for name, became in data.statistics().items():
            _say(console, f"{name}: {became}")
        identity = run_identity(config, data, tokenizer)
        if earlier is not None:
            changed += check_identity(earlier.where, earlier.identity, identity)
        model = load_model(config, console).replace(tokenizer=tokenizer)
        if model.lora is not None:
            tokens = config.training.per_device_train_batch_size * config.model.max_seq_length
            for line in adapter_paths(model.graphdef, model.trainable, model.frozen, tokens):
                _say(console, line)
        check_vocabulary(model, data)
        checkpoints.extra = describe(config, data, identity)
        run = _Run(config, console, folder, checkpoints, data, identity, model, loss, evaluate)
        return run.train(earlier, changed if resume else None)


class _Run:
    """A run whose settings, data and model are there."""

    def __init__(
        self,
        config: TrainConfig,
        console: Console,
        folder: RunFolder,
        checkpoints: Checkpoints,
        data: RunData,
        identity: Identity,
        model: LanguageModel,
        loss: Loss | None,
        evaluate: Evaluate | None,
    ):
        self.config, self.console, self.folder, self.checkpoints, self.data = config, console, folder, checkpoints, data
        training, self.identity, self.user_evaluate = config.training, identity, evaluate
        self.loss = loss or functools.partial(loss_sums, neftune_noise_alpha=training.neftune_noise_alpha)
        options = compiler_options(training.deterministic, folder.path)
        optimizer = make_optimizer(config.optimizer, data.total_steps)
        self.train_step = make_train_step(
            model.graphdef,
            optimizer,
            model.trainable_filter,
            loss=self.loss,
            accumulation_dtype=training.accumulation_dtype,
            loss_scale_window=training.loss_scale_window,
            compiler_options=options,
        )
        self.eval_step = make_eval_step(
            model.graphdef, model.trainable_filter, loss=self.loss, compiler_options=options
        )
        self.state = initial_state(config, model, data.total_steps)
        # Rows of tokens that the first batches do not have get no gradient by right.
        self.check = GradientCheck(
            leaf_names(model.trainable, model.plan), lambda name: name == "embed_tokens.tokens.trainable_tokens_delta"
        )
        lengths = data.document_lengths
        self.flops_per_token = None
        if lengths is not None:
            self.flops_per_token = flops_per_token(model.config, model.trainable, attended_length(lengths))
        self.model = model.replace(trainable=None)  # the state has a copy; of a whole model there should be one

    def train(self, earlier: Earlier | None, changed: list[str] | None) -> FineTuned:
        """Take the steps, from the start or from a checkpoint, and save the result."""
        config, total = self.config, self.data.total_steps
        start, position = Progress(), None
        if earlier is None:
            self.folder.clear()
        else:
            like = self.state
            earlier, self.state = restore(
                self.checkpoints, earlier, lambda step: self.checkpoints.load(step, like), self.console
            )
            start, position = earlier.progress, earlier.position
        evaluations = {} if self.data.held_out is None else {"evaluate": self._evaluate}
        with contextlib.ExitStack() as stack:
            stack.callback(self.checkpoints.close)
            sinks = self._sinks(None if earlier is None else start.step)
            for sink in sinks:
                stack.callback(sink.close)
            if changed is not None:
                _tell(sinks, start.step, "resumed", _whence(start.step, earlier, changed))
            self.folder.write_settings(config)  # after the row that says that the run here goes on, or they would lie
            stop = stack.enter_context(StopSignals())
            status = "failed"
            stack.callback(lambda: self._report(status))
            stack.enter_context(_memory_advice())
            fitted = fit(
                self.train_step,
                self.state,
                self.model.frozen,
                self.data.batches.from_step(start.step, total, position),
                learning_rates=learning_rates(config.optimizer, total),
                start=start,
                cadence=Cadence(
                    config.training.eval_steps,
                    config.output.save_steps,
                    config.output.load_best_model_at_end,
                    config.training.early_stopping_patience,
                    config.training.early_stopping_threshold,
                ),
                sinks=sinks,
                throughput=self._throughput(start),
                checkpoints=self.checkpoints,
                stop=stop,
                check=self.check,
                explain=self._explain,
                **evaluations,
            )
            if not fitted.complete:
                assert stop.received is not None
                status = f"interrupted by {stop.received.name}"
                message = (
                    f"{status} after step {fitted.progress.step} of {total}; its state is saved, and --resume goes on"
                )
                _tell(sinks, fitted.progress.step, "interrupted", message)
                raise Interrupted(message, stop.received)
            self.model = self.model.replace(trainable=self._chosen(fitted))
            self.model.save_pretrained(self.folder.result)
            status = "finished"
            message = f"finished after step {fitted.progress.step}"
            base = {"model": self.identity.model, "weights": self.identity.weights}
            files = weight_digests(self.folder.result)
            _tell(sinks, fitted.progress.step, status, message, files=files, base=base)
        evaluation = fitted.evaluation or _last_evaluation(self.folder)  # where no step was left to take
        return FineTuned(self.model, self.folder.result, evaluation, config)

    def _evaluate(self, trainable: Any) -> Evaluation:
        training, held_out = self.config.training, self.data.held_out
        assert held_out is not None
        size = training.per_device_eval_batch_size or training.per_device_train_batch_size
        batches = Batches(held_out.rows, size, shuffle=False).epoch()
        found = run_evaluation(self.eval_step, trainable, self.model.frozen, batches)
        if self.user_evaluate is None:
            return found
        extra = {
            name: float(value) for name, value in self.user_evaluate(self.model.replace(trainable=trainable)).items()
        }
        wrong = [name for name in extra if not name.startswith("eval_")]
        if wrong:
            raise ConfigError(f"evaluate: expected numbers by names that begin with eval_, given {', '.join(wrong)}")
        return found._replace(extra=extra)

    def _sinks(self, resume_step: int | None) -> list[Sink]:
        """What takes the rows: the file first, so that a tracker that fails cannot keep a row from it."""
        output, total = self.config.output, self.data.total_steps
        name = output.run_name or Path(output.output_dir).name
        file = Tolerant(JsonLines(self.folder.metrics, resume_step), str(self.folder.metrics), self.console)
        trackers = make_trackers(
            output.report_to, self.folder.path, name, dataclasses.asdict(self.config), resume_step, self.console
        )
        progress = make_progress(total, self.config.training.logging_steps, self.console)
        return [file, *trackers, Tolerant(progress, "the progress", Console(stderr=True))]

    def _throughput(self, start: Progress) -> Throughput:
        return Throughput(
            self.data.total_steps,
            steps_per_epoch=self.data.batches.steps_per_epoch,
            flops_per_token=self.flops_per_token,
            peak_flops=peak_flops(jax.devices()[0].device_kind, self.model.dtype),
            seconds_before=start.seconds,
        )

    def _explain(self, state: Any, batch: Batch, step: int) -> str:
        """Which rows of the data break a step."""
        probe = make_probe(self.model.graphdef, self.model.trainable_filter, loss=self.loss)
        places = non_finite_rows(lambda rows: probe(state, self.model.frozen, rows), batch)
        if not places:
            return "No row of the step is at fault alone."
        numbers = self.data.batches.row_numbers(step - 1)
        return f"Not finite: {self.data.batches.describe_rows(numbers[tuple(zip(*places, strict=True))])}."

    def _chosen(self, fitted: Fitted) -> Any:
        """The weights that are the result: the last, or the best."""
        best = fitted.progress.best_step
        if not self.config.output.load_best_model_at_end or best is None or best == fitted.progress.step:
            return fitted.state.trainable
        try:
            if best not in self.checkpoints.steps():
                raise TrainingError(f"{self.checkpoints.folder / str(best)} could not be saved")
            return self.checkpoints.load(best, fitted.state).trainable
        except TrainingError as error:
            raise TrainingError(
                f"output.load_best_model_at_end: the checkpoint of step {best} is the best, but {error}; the last "
                f"state is in {self.checkpoints.folder}"
            ) from error

    def _usage(self) -> list[str]:
        return usage(self.config, self.folder.result, self.model.hf_config, str(self.model.dtype))

    def _report(self, status: str) -> None:
        write_report(
            self.folder.path,
            config=dataclasses.asdict(self.config),
            defaults=default_settings(),
            statistics=self.data.statistics(),
            environment=describe_environment(),
            result=self._usage() if status == "finished" else [],
            status=status,
            console=self.console,
        )


def describe(config: TrainConfig, data: RunData, identity: Identity) -> Callable[[int], dict[str, Any]]:
    """What a checkpoint of a run keeps beside its state, by step.

    Args:
        config: the run.
        data: its data.
        identity: of the run.
    """
    stored = {"config": dataclasses.asdict(config), **identity._asdict()}
    return lambda step: {**stored, "position": data.batches.position(step)}


def initial_state(config: TrainConfig, model: LanguageModel, total_steps: int) -> TrainState:
    """The state of a run before its first step.

    Args:
        config: the run.
        model: with what is trained as it begins.
        total_steps: of the run.
    """
    scale = config.training.initial_loss_scale if model.dtype == jnp.float16 else None
    key = jax.random.key(config.training.seed)
    return init_state(model.trainable, make_optimizer(config.optimizer, total_steps), key, scale)


def load_model(config: TrainConfig, console: Console) -> LanguageModel:
    """The model of a run as it begins, with its adapter.

    Args:
        config: the run.
        console: for a line about the model.
    """
    model, _ = FastLanguageModel.from_pretrained(**dataclasses.asdict(config.model))
    model = adapted(model, config)
    trained, total = model.num_parameters()
    device = device_use()
    _say(
        console,
        f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%}), on {device.used}, {model.dtype}",
    )
    if device.idle is not None:
        _say(console, f"idle: {device.idle}")
    return model


def adapted(model: LanguageModel, config: TrainConfig) -> LanguageModel:
    """A run's base model with the adapter that it begins with, fresh or from a folder.

    Args:
        model: the base.
        config: the run.
    """
    if config.lora.adapter is not None:
        model = FastLanguageModel.load_adapter(
            model, config.lora.adapter, config.lora.lora_dropout, config.model.allow_nonfinite
        )
    elif not config.model.full_finetuning:
        model = FastLanguageModel.get_peft_model(model, **lora_arguments(config.lora))
    return model


def check_vocabulary(model: LanguageModel, data: RunData) -> None:
    """Refuse data with tokens that the model has no rows for.

    Args:
        model: the run's.
        data: the run's.

    Raises:
        ConfigError: there are such.
    """
    if data.max_token_id >= model.config.vocab_size:
        raise ConfigError(
            f"model.model_name: expected an embedding for every token of the data, given {model.config.vocab_size} "
            f"rows for token {data.max_token_id}; the tokenizer has more tokens than the model: name them in "
            "model.new_tokens"
        )


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _read_back(config: TrainConfig, folder: RunFolder, console: Console) -> FineTuned | str:
    """What the finished run in a folder has left, or what is wrong with it."""
    if (found := damage(folder)) is not None:
        return found
    if config.model.full_finetuning:  # its folder has the new tokens and the scaling
        model = dataclasses.replace(config.model, model_name=str(folder.result), new_tokens=None, rope_scaling=None)
        result = dataclasses.replace(config, model=model)
    else:
        if base := read_rows(folder.metrics)[-1].get("base"):
            check_identity(folder.result, Identity(data="", **base), Identity(data="", **base_identity(config)))
        adapter = LoraSection(adapter=str(folder.result), lora_dropout=config.lora.lora_dropout)
        result = dataclasses.replace(config, lora=adapter)
    try:
        return FineTuned(load_model(result, console), folder.result, _last_evaluation(folder), config)
    except (ConfigError, ConvertError, OSError) as error:  # where it is the base's, the run says so again
        return str(error)


def _last_evaluation(folder: RunFolder) -> Evaluation | None:
    evaluations = [row for row in read_rows(folder.metrics) if "eval_loss" in row]
    return Evaluation.from_row(evaluations[-1]) if evaluations else None


def _tell(sinks: list[Sink], step: int, event: str, message: str, **more: Any) -> None:
    for sink in sinks:
        sink.write({"step": step, "event": event, "message": message, **more})


def _whence(step: int, earlier: Earlier | None, changed: list[str]) -> str:
    """Where a run goes on, and what is new."""
    if earlier is None:
        return "no checkpoint to go on from: started from the beginning"
    return f"going on after step {step}, from {earlier.where}" + (
        f"; changed since: {'; '.join(changed)}" if changed else ""
    )


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
