"""The training of a run whose settings, data and model are there: steps, evaluations, checkpoints, report, result."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from fastjax.data import Batches, Dataset
from fastjax.data.batches import Batch, OwnRows
from fastjax.errors import ConfigError, Interrupted, TrainingError
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.language_model.saving import save_pretrained
from fastjax.language_model.variants import with_start
from fastjax.parallel import place, row_shardings
from fastjax.parallel.placing import own_rows
from fastjax.parallel.processes import barrier, is_primary, on_host, rank_name
from fastjax.planning.collectives import collectives
from fastjax.runs.checkpointing import RunStep, memory_advice
from fastjax.runs.datasets import RunData, train_batches
from fastjax.runs.folder import RunFolder
from fastjax.runs.identity import Identity, files_of
from fastjax.runs.mesh import open_mesh
from fastjax.runs.messages import say, warn
from fastjax.runs.model import initial_state
from fastjax.runs.references import reference_file, with_references
from fastjax.runs.result import last_evaluation, weight_digests
from fastjax.runs.resume import Earlier, restore
from fastjax.runs.sample_answers import sample_answers
from fastjax.runs.steps import of_length, on_mesh, run_loss, run_step, tell_gathers
from fastjax.training.cadence import Cadence, Progress, interval
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.config import TrainConfig
from fastjax.training.determinism import compiler_options
from fastjax.training.flops import attended_length, flops_per_token
from fastjax.training.health import GradientCheck, leaf_names, non_finite_rows
from fastjax.training.loop import Fitted, Startup, fit, run_evaluation
from fastjax.training.loss import Loss
from fastjax.training.metrics import Evaluation, JsonLines, Sink, Throughput, Tolerant, peak_memories
from fastjax.training.optimizers import learning_rates
from fastjax.training.preferences import reference_log_probs
from fastjax.training.profile import StepProfile
from fastjax.training.progress import make_progress
from fastjax.training.report import default_settings, describe_environment, describe_peaks, usage, write_report
from fastjax.training.signals import SharedStop, StopSignals
from fastjax.training.step import make_eval_step, make_forward, make_probe
from fastjax.training.trackers import Place, make_trackers
from fastjax.training.watchdog import Watchdog
from pallas_kernels.cards import peak_flops

#: A user's own held-out evaluation: of a model, to numbers by names that begin with `eval_`.
Evaluate = Callable[[ModelHandle], Mapping[str, float]]


class FineTuned(NamedTuple):
    """A finished run.

    Attributes:
        model: the trained model.
        folder: the adapter's folder, or the whole model's.
        evaluation: the last held-out evaluation; None without held-out data.
        config: the settings, with names on the hub at their commit.
    """

    model: ModelHandle
    folder: Path
    evaluation: Evaluation | None
    config: TrainConfig


class Own(NamedTuple):
    """What a program brings to a run beside its settings.

    Attributes:
        loss: in place of the settings' own; see `training.loss.Loss`.
        evaluate: a measurement at each held-out evaluation.
        optimizer: in place of the settings' own, and the learning rates of all steps, float32 [total_steps].
        sinks: take the rows behind the run's own.
        ended: whether the run is to end; asked before each step.
        in_memory: whether the model came from the program, and may not be what its folder holds.
    """

    loss: Loss | None = None
    evaluate: Evaluate | None = None
    optimizer: tuple[optax.GradientTransformation, np.ndarray] | None = None
    sinks: Sequence[Sink] = ()
    ended: Callable[[], bool] = lambda: False
    in_memory: bool = False


class TrainingRun:
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
        step: RunStep,
        own: Own,
    ):
        self.config, self.console, self.folder, self.checkpoints, self.data = config, console, folder, checkpoints, data
        self.identity, self.own = identity, own
        self.loss = own.loss or run_loss(config)
        rule = None if own.optimizer is None else own.optimizer[0]
        options = compiler_options(config.training.deterministic, folder.path)
        self.mesh = open_mesh(step.mesh)
        total = data.total_steps
        self.step, self.train_step = step, run_step(config, model, total, self.loss, options, self.mesh, rule)
        self.eval_step = make_eval_step(
            model.graphdef, model.trainable_filter, loss=self.loss, mesh=self.mesh, compiler_options=options
        )
        self.peaks: list[int] = []
        tell_gathers(model, self.mesh, config, console)
        if self.mesh is None:
            self.state = initial_state(config, model, total, optimizer=rule)
        else:
            self.state, frozen = on_mesh(
                config, model, total, self.train_step, step.mesh.replicas, data.documents_per_row
            )
            model = model.replace(frozen=frozen)
        if config.preferences.precompute_ref_log_probs:
            self.data = self._with_references(model, options)
        if isinstance(self.data.train, Dataset):
            rows = config.training.per_device_train_batch_size * step.mesh.replicas
            train = of_process(self.data.train, self.mesh, rows)
            if train is not self.data.train:
                self.data = self.data._replace(batches=train_batches(config, train, step.mesh.replicas))
        if step.choice is not None:
            self.train_step = of_length(config.model.max_seq_length, step.choice.compiled, self.train_step)
        # Rows of tokens that are not in the first batches get no gradient by right.
        self.check = GradientCheck(
            leaf_names(model.trainable, model.plan), lambda name: name == "embed_tokens.tokens.trainable_tokens_delta"
        )
        lengths = data.document_lengths
        self.flops_per_token = None
        if lengths is not None:
            reference = own.loss is None and config.preferences.reference_in_step
            self.flops_per_token = flops_per_token(
                model.config, model.trainable, attended_length(lengths), reference=reference
            )
        self.model = model.replace(trainable=None)  # the state has a copy; of a whole model there should be one

    def train(self, earlier: Earlier | None, changed: list[str] | None, startup: Startup) -> FineTuned:
        """Take the steps, from the start or from a checkpoint, and save the result."""
        config, total = self.config, self.data.total_steps
        rates = None if self.own.optimizer is None else self.own.optimizer[1]
        start, position = Progress(), None
        barrier("start")  # before it the others look for checkpoints
        if earlier is None:
            if is_primary():
                self.folder.clear()
        else:
            like = self.state
            earlier, self.state = restore(
                self.checkpoints, earlier, lambda step: self.checkpoints.load(step, like), self.console
            )
            start, position = earlier.progress, earlier.position
        with contextlib.ExitStack() as stack:
            stack.callback(self.checkpoints.close)
            sinks = self._sinks(None if earlier is None else start.step)
            for sink in sinks:
                stack.callback(sink.close)
            if changed is not None:
                _tell(sinks, start.step, "resumed", _whence(start.step, earlier, changed))
            if is_primary():
                self.folder.write_settings(config)  # after the row of the resumption, or they would lie
            stop = stack.enter_context(StopSignals())
            if self.mesh is not None and jax.process_count() > 1:
                stop = SharedStop(stop, self.mesh)
            status = "failed"
            if is_primary():
                stack.callback(lambda: self._report(status))
            timeout, rank = config.training.step_timeout, jax.process_index()
            watchdog = Watchdog(timeout, self.folder.path, rank, rank_name(), self._collectives)
            stack.enter_context(watchdog)
            profile = stack.enter_context(self._profile(sinks, rank))
            stack.enter_context(memory_advice(self.step))
            if (choice := self.step.choice) is not None:
                _tell(sinks, start.step, "checkpointing", str(choice), **choice.row())
            evaluations = {}
            if self.data.held_out is not None:
                evaluations["evaluate"] = lambda trainable: self._evaluate(trainable, watchdog)
            fitted = fit(
                self._step,
                self.state,
                self.model.frozen,
                self.data.batches.from_step(start.step, total, position),
                learning_rates=learning_rates(config.optimizer, total) if rates is None else rates,
                start=start,
                cadence=Cadence(
                    interval(config.training.eval_steps, total, self.data.batches.steps_per_epoch),
                    interval(config.output.save_steps, total, self.data.batches.steps_per_epoch),
                    config.output.load_best_model_at_end,
                    config.training.early_stopping_patience,
                    config.training.early_stopping_threshold,
                ),
                sinks=sinks,
                throughput=self._throughput(start),
                startup=startup,
                send=self._send,
                watch=watchdog.watch,
                profile=profile,
                checkpoints=self.checkpoints,
                stop=stop,
                check=self.check,
                explain=self._explain,
                ended=self.own.ended,
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
            watchdog.watch(f"the result, {self.folder.result}")
            self.model = with_start(self.model.replace(trainable=self._chosen(fitted)), None)
            save_pretrained(self.model, self.folder.result)  # all processes, of which the first writes
            watchdog.watch(None)
            self._sample(sinks, fitted.progress.step)
            watchdog.watch("the other processes, after the result")
            status = "finished"
            message = f"finished after step {fitted.progress.step}"
            base = {"model": self.identity.model, "weights": self.identity.weights}
            files = weight_digests(self.folder.result) if is_primary() else {}
            self.peaks = peak_memories(self.step.mesh.size)
            memory = {"memory_bytes_by_device": self.peaks} if self.peaks else {}
            _tell(sinks, fitted.progress.step, status, message, files=files, base=base, **memory)
            barrier("saved")
        evaluation = fitted.evaluation or last_evaluation(self.folder)  # where no step was left to take
        return FineTuned(ModelHandle(self.model), self.folder.result, evaluation, config)

    def reached(self) -> LanguageModel | None:
        """The model as far as training came; None: the step that failed took its weights with it."""
        if self.model.trainable is not None:
            return self.model
        trainable = self.state.trainable
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(trainable))
        return None if lost else self.model.replace(trainable=trainable)

    def _step(self, state: Any, frozen: Any, batch: Batch) -> tuple[Any, Any]:
        """A train step, whose state is known to whoever asks when an error has ended the loop."""
        self.state, metrics = self.train_step(state, frozen, batch)
        return self.state, metrics

    def _with_references(self, model: LanguageModel, options: Any) -> RunData:
        """The data with the log-probabilities of the reference, which begins where the policy does."""
        config, trainable = self.config, self.state.trainable
        how: Any = {"mesh": self.mesh, "compiler_options": options}
        forward = make_forward(model.graphdef, model.trainable_filter, reference_log_probs, **how)

        def program(batch: Batch) -> Any:
            return on_host(forward(trainable, model.frozen, self._send(batch)))

        keep = None
        if not self.own.in_memory and model.folder is not None:
            keep = reference_file(config, self.identity, files_of(model.folder), self.step.mesh)
        rows, data = self._evaluation_rows(), self.data
        assert isinstance(data.train, Dataset), "preferences are not streamed"
        held_out = None if data.held_out is None else of_process(data.held_out, self.mesh, rows)
        data = data._replace(train=of_process(data.train, self.mesh, rows), held_out=held_out)
        return with_references(data, program, rows, keep, lambda text: say(self.console, text))

    def _evaluation_rows(self) -> int:
        """Rows of a batch without a backward pass, on all devices."""
        training = self.config.training
        size = training.per_device_eval_batch_size or training.per_device_train_batch_size
        return size * self.step.mesh.replicas

    def _send(self, batch: Batch) -> Batch:
        """The batch on the devices, each with its rows."""
        return jax.device_put(batch) if self.mesh is None else place(batch, row_shardings(batch, self.mesh))

    def _collectives(self) -> str:
        """The collectives of the step, where it was compiled before its first call."""
        choice, devices = self.step.choice, self.step.mesh.size
        found = [] if choice is None or devices == 1 else collectives(choice.compiled.as_text(), devices)
        return "a step has " + ", ".join(f"{one.kind} × {one.times}" for one in found) if found else ""

    def _evaluate(self, trainable: Any, watchdog: Watchdog) -> Evaluation:
        held_out = self.data.held_out
        assert held_out is not None
        rows = self._evaluation_rows()
        batches = Batches(of_process(held_out, self.mesh, rows).rows, rows, shuffle=False).epoch()
        found = run_evaluation(self.eval_step, trainable, self.model.frozen, batches, self._send, watchdog.restart)
        if self.own.evaluate is None:
            return found
        watchdog.watch(None)  # it may take any time
        model = ModelHandle(self.model.replace(trainable=trainable))
        extra = {name: float(value) for name, value in self.own.evaluate(model).items()}
        wrong = [name for name in extra if not name.startswith("eval_")]
        if wrong:
            raise ConfigError(f"evaluate: expected numbers by names that begin with eval_, got {', '.join(wrong)}")
        return found._replace(extra={**found.extra, **extra})

    def _sinks(self, resume_step: int | None) -> list[Sink]:
        """The file first, so that a tracker that fails cannot keep a row from it."""
        if not is_primary():
            return []
        output, total = self.config.output, self.data.total_steps
        name = output.run_name or Path(output.output_dir).name
        file = Tolerant(JsonLines(self.folder.metrics, resume_step), str(self.folder.metrics), self.console)
        trackers = make_trackers(
            output.report_to,
            self.folder.path,
            name,
            dataclasses.asdict(self.config),
            resume_step,
            self.console,
            Place(output.project, output.entity, output.tags),
        )
        progress = make_progress(total, self.config.training.logging_steps, self.console)
        return [file, *trackers, Tolerant(progress, "the progress", Console(stderr=True)), *self.own.sinks]

    def _profile(self, sinks: list[Sink], rank: int) -> StepProfile:
        """The trace of this process's steps; of one that is not chosen there is none."""
        output = self.config.output

        def tell(step: int, message: str) -> None:
            _tell(sinks, step, "profile", message)
            if not is_primary():  # which alone has sinks
                say(Console(stderr=True), message)

        return StepProfile(self.folder.profile, output.profile_steps if rank == output.profile_rank else (), rank, tell)

    def _throughput(self, start: Progress) -> Throughput:
        peak = peak_flops(jax.devices()[0].device_kind, self.model.dtype)
        return Throughput(
            self.data.total_steps,
            steps_per_epoch=self.data.batches.steps_per_epoch,
            flops_per_token=self.flops_per_token,
            peak_flops=None if peak is None else peak * self.step.mesh.size,
            devices=self.step.mesh.size,
            seconds_before=start.seconds,
        )

    def _explain(self, state: Any, batch: Batch, step: int) -> str:
        """The rows of the data that break a step, in words."""
        probe = make_probe(self.model.graphdef, self.model.trainable_filter, loss=self.loss, mesh=self.mesh)

        def alone(rows: Batch) -> Any:  # the same row on all devices
            rows = jax.tree.map(lambda array: np.repeat(array, self.step.mesh.replicas, axis=1), rows)
            return probe(state, self.model.frozen, rows)

        places = non_finite_rows(alone, on_host(batch))
        if not places:
            return "No row of the step is at fault alone."
        numbers = self.data.batches.row_numbers(step - 1)
        return f"Not finite: {self.data.batches.describe_rows(numbers[tuple(zip(*places, strict=True))])}."

    def _chosen(self, fitted: Fitted) -> Any:
        """The result's weights: the last, or the best."""
        best = fitted.progress.best_step
        if not self.config.output.load_best_model_at_end or best is None or best == fitted.progress.step:
            return fitted.state.trainable
        try:
            if best not in self.checkpoints.steps():
                raise TrainingError(f"{self.checkpoints.folder / str(best)} could not be saved")
            return self.checkpoints.load_part(best, "trainable", fitted.state.trainable)
        except TrainingError as error:
            raise TrainingError(
                f"output.load_best_model_at_end: the checkpoint of step {best} is the best, but {error}; the last "
                f"state is in {self.checkpoints.folder}"
            ) from error

    def _sample(self, sinks: list[Sink], step: int) -> None:
        """Tell the sample answers; the result is there, so what keeps them away is a warning."""
        count, held_out = self.config.output.sample_answers, self.data.held_out
        if not count or held_out is None:
            return
        try:
            found = sample_answers(self.model, held_out.rows, count)
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            warn(self.console, f"no sample answers: {str(error).splitlines()[0]}")
            return
        _tell(sinks, step, "answered", f"answered {len(found)} held-out prompts, see the report", samples=found)

    def _usage(self) -> list[str]:
        return usage(self.config, self.folder.result, self.model.hf_config, str(self.model.dtype))

    def _report(self, status: str) -> None:
        environment = describe_environment(self.step.mesh) | {"gradient checkpointing": self.step.policy}
        if self.peaks:
            each = "device" if jax.process_count() == 1 else "process"
            environment[f"peak memory by {each}"] = describe_peaks(self.peaks)
        write_report(
            self.folder.path,
            config=dataclasses.asdict(self.config),
            defaults=default_settings(),
            statistics=self.data.statistics(),
            environment=environment,
            result=self._usage() if status == "finished" else [],
            status=status,
            console=self.console,
        )


def of_process(data: Dataset, mesh: Mesh | None, rows: int) -> Dataset:
    """A data set of whose rows this process builds those of its devices; the same where it has all devices.

    Args:
        data: the data set.
        mesh: of the run; None: one device.
        rows: of a microbatch.
    """
    own = np.arange(rows) if mesh is None else own_rows(mesh, rows)
    return data if len(own) == rows else data._replace(rows=OwnRows.of(data.rows, own, rows))


def describe(
    config: TrainConfig, data: RunData, identity: Identity, policy: str | None = None, replicas: int | None = None
) -> Callable[[int], dict[str, Any]]:
    """The JSON that a checkpoint of a run keeps beside its state, by step.

    Args:
        config: the run.
        data: its data.
        identity: of the run.
        policy: of rematerialisation; None: it is not chosen yet.
        replicas: parts in which the devices take a step's rows; None: no step was taken.
    """
    stored = {"config": dataclasses.asdict(config), **identity._asdict(), "checkpointing": policy, "replicas": replicas}
    stored |= {"now": data.train.now}
    return lambda step: {**stored, "position": data.batches.position(step)}


def _tell(sinks: list[Sink], step: int, event: str, message: str, **more: Any) -> None:
    for sink in sinks:
        sink.write({"step": step, "event": event, "message": message, **more})


def _whence(step: int, earlier: Earlier | None, changed: list[str]) -> str:
    """The start of a resumed run and its changed settings, in words."""
    if earlier is None:
        return "no checkpoint to go on from: started from the beginning"
    return f"going on after step {step}, from {earlier.where}" + (
        f"; changed since: {'; '.join(changed)}" if changed else ""
    )
