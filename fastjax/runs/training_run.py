"""The last stage of a run: its state on the devices, the steps from the start or from a checkpoint, the result."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.nnx.filterlib import Filter
from jax.sharding import Mesh

from fastjax.data import Batches, Dataset
from fastjax.data.batches import Batch, OwnRows
from fastjax.data.packing import PackedRows
from fastjax.errors import ConfigError, Interrupted, TrainingError
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.language_model.saving import save_pretrained
from fastjax.language_model.variants import with_start
from fastjax.models.decoder import Decoder
from fastjax.parallel import place, row_shardings
from fastjax.parallel.placing import own_rows
from fastjax.parallel.processes import barrier, is_primary, on_host, rank_name
from fastjax.runs.card import training_of
from fastjax.runs.checkpointing import memory_advice
from fastjax.runs.context import FineTuned, Run
from fastjax.runs.held_out import with_measurements
from fastjax.runs.identity import files_of
from fastjax.runs.mesh import open_mesh
from fastjax.runs.messages import warn
from fastjax.runs.references import reference_file, with_references
from fastjax.runs.reporting import Reporting
from fastjax.runs.result import last_evaluation, weight_digests
from fastjax.runs.resume import restore
from fastjax.runs.sample_answers import sample_answers
from fastjax.runs.steps import of_length, tell_gathers
from fastjax.training.cadence import Cadence, Progress, interval
from fastjax.training.evaluation import run_evaluation
from fastjax.training.flops import attended_length, flops_per_token
from fastjax.training.health import GradientCheck, leaf_names, non_finite_rows
from fastjax.training.loop import LoopState, Observer, fit, sent_ahead
from fastjax.training.metrics import Evaluation, Throughput, peak_memories
from fastjax.training.observers import Evaluating, Finite, Metrics, Saving, SinkWriter
from fastjax.training.preferences import document_scores, reference_log_probs
from fastjax.training.signals import SharedStop, StopSignals
from fastjax.training.step import make_eval_step, make_forward, make_probe
from fastjax.training.watchdog import Watchdog
from pallas_kernels.cards import peak_flops


class TrainingRun:
    """The training of a run whose model is loaded."""

    def __init__(self, run: Run):
        """Make the state on the devices; the run's model goes on without its trained arrays.

        Args:
            run: with its model, step and recipe.
        """
        self.run, self.mesh, model = run, open_mesh(run.step.mesh), run.model
        recipe, replicas = run.recipe, run.step.mesh.replicas
        self.train_step = recipe.step(model, self.mesh)
        tell_gathers(model, self.mesh, run.config, run.console)
        self.state, frozen = recipe.start(model, self.train_step, self.mesh, replicas)
        self._how: Any = {"mesh": self.mesh, "compiler_options": recipe.compiler_options}
        self.eval_step = make_eval_step(model.graphdef, model.trainable_filter, loss=recipe.loss, **self._how)
        # Rows of tokens that are not in the first batches get no gradient by right.
        self.check = GradientCheck(
            leaf_names(model.trainable, model.plan), lambda name: name == "embed_tokens.tokens.trainable_tokens_delta"
        )
        self._flops_per_token = _flops_per_token(run)
        run.model = model.replace(frozen=frozen, trainable=None)  # the state has a copy; there should be one
        if run.config.preferences.precompute_ref_log_probs:
            self._add_references()
        if isinstance(run.data.train, Dataset):
            rows = run.config.training.per_device_train_batch_size * replicas
            train = of_process(run.data.train, self.mesh, rows)
            if train is not run.data.train:
                batches: Any = run.data.batches
                run.data = run.data._replace(batches=batches._replace(rows=train.rows))
        if run.step.choice is not None:
            longest = run.data.batches.lengths[-1]
            self.train_step = of_length(longest, run.step.choice.compiled, self.train_step)
        run.reached = self.reached

    def train(self) -> FineTuned:
        """Take the steps, from the start or from a checkpoint, and save the result."""
        run = self.run
        start, position = self._restore()
        with contextlib.ExitStack() as stack:
            stack.callback(run.checkpoints.close)
            reporting = Reporting(run, None if run.earlier is None else start.step)
            for sink in reporting.sinks:
                stack.callback(sink.close)
            if run.resume:
                reporting.tell(start.step, "resumed", _whence(run, start.step))
            if is_primary():
                run.folder.write_settings(run.config)  # after the row of the resumption, or they would lie
            stop = stack.enter_context(StopSignals())
            if self.mesh is not None and jax.process_count() > 1:
                stop = SharedStop(stop, self.mesh)
            if is_primary():
                stack.callback(reporting.write)
            timeout, rank = run.config.training.step_timeout, jax.process_index()
            self.watchdog = Watchdog(timeout, run.folder.path, rank, rank_name())
            stack.enter_context(self.watchdog)
            profile = stack.enter_context(reporting.profile())
            stack.enter_context(memory_advice(run.step))
            if (choice := run.step.choice) is not None:
                reporting.tell(start.step, "checkpointing", str(choice), **choice.row())
            if run.earlier is None:
                self._answer(reporting, 0)
            batches = run.data.batches.from_step(start.step, run.data.total_steps, position)
            observers = self._observers(reporting, start, profile, stop)
            with sent_ahead(batches, self._send) as ready:
                reached = fit(self._step, LoopState(self.state, start), ready, self._cadence(), observers)
            if not reached.complete:
                assert stop.received is not None
                reporting.status = f"interrupted by {stop.received.name}"
                message = (
                    f"{reporting.status} after step {reached.progress.step} of {run.data.total_steps}; its state is "
                    "saved, and --resume goes on"
                )
                reporting.tell(reached.progress.step, "interrupted", message)
                raise Interrupted(message, stop.received)
            self._save(reached, reporting)
        evaluation = reached.evaluation or last_evaluation(run.folder)  # where no step was left to take
        return FineTuned(ModelHandle(run.model), run.folder.result, evaluation, run.config)

    def _restore(self) -> tuple[Progress, Mapping[str, Any] | None]:
        """The progress and the position in the data that the run begins with; the state of a checkpoint is read."""
        run = self.run
        barrier("start")  # before it the others look for checkpoints
        if run.earlier is None:
            if is_primary():
                run.folder.clear()
            return Progress(), None
        like = self.state
        run.earlier, self.state = restore(
            run.checkpoints, run.earlier, lambda step: run.checkpoints.load(step, like), run.console
        )
        return run.earlier.progress, run.earlier.position

    def _observers(self, reporting: Reporting, start: Progress, *others: Observer) -> list[Observer]:
        saving = Saving(self.run.checkpoints, start.step)
        return [
            SinkWriter(reporting.sinks, self.run.ended),
            Metrics(self._throughput(start.seconds), self.run.startup),
            Finite(saving, self._explain),
            self.check,
            self.watchdog,
            *others,
            *([] if self.run.data.held_out is None else [Evaluating(self._evaluate)]),
            saving,
        ]

    def _cadence(self) -> Cadence:
        config, data = self.run.config, self.run.data
        epoch = data.batches.steps_per_epoch
        return Cadence(
            data.total_steps,
            data.held_out is not None,
            interval(config.training.eval_steps, data.total_steps, epoch),
            interval(config.output.save_steps, data.total_steps, epoch),
            config.output.load_best_model_at_end,
            config.training.early_stopping_patience,
            config.training.early_stopping_threshold,
        )

    def _step(self, state: Any, batch: Batch) -> tuple[Any, Any]:
        """A train step, whose state is known to whoever asks when an error has ended the loop."""
        self.state, metrics = self.train_step(state, self.run.model.frozen, batch)
        return self.state, metrics

    def _save(self, reached: LoopState, reporting: Reporting) -> None:
        """Save the result, and let it answer held-out prompts."""
        run, step = self.run, reached.progress.step
        self.watchdog.waits(f"the result, {run.folder.result}")
        training = training_of(run.config, run.folder.metrics, run.data.statistics()) if is_primary() else None
        run.model = with_start(run.model.replace(trainable=self._chosen(reached)), None).replace(training=training)
        save_pretrained(run.model, run.folder.result)  # all processes, of which the first writes
        self._answer(reporting, step)
        self.watchdog.waits("the other processes, after the result")
        reporting.status = "finished"
        base = {"model": run.identity.model, "weights": run.identity.weights}
        files = weight_digests(run.folder.result) if is_primary() else {}
        reporting.peaks = peak_memories(run.step.mesh.size)
        memory = {"memory_bytes_by_device": reporting.peaks} if reporting.peaks else {}
        reporting.tell(step, "finished", f"finished after step {step}", files=files, base=base, **memory)
        barrier("saved")

    def reached(self) -> LanguageModel | None:
        """The model as far as training came; None: the step that failed took its weights with it."""
        if self.run.model.trainable is not None:
            return self.run.model
        trainable = self.state.trainable
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(trainable))
        return None if lost else self.run.model.replace(trainable=trainable)

    def _add_references(self) -> None:
        """Add the log-probabilities of the reference to the data, which begins where the policy does."""
        run, trainable = self.run, self.state.trainable
        of = _log_probs if run.model.full_finetuning else reference_log_probs  # nothing has moved yet
        forward = make_forward(run.model.graphdef, run.model.trainable_filter, of, **self._how)

        def program(batch: Batch) -> Any:
            return on_host(forward(trainable, run.model.frozen, self._send(batch)))

        keep = None
        if run.opened is not None and run.model.folder is not None:
            keep = reference_file(run.config, run.identity, files_of(run.model.folder), run.step.mesh)
        rows, data = self._evaluation_rows(), run.data
        assert isinstance(data.train, Dataset), "preferences are not streamed"
        held_out = None if data.held_out is None else of_process(data.held_out, self.mesh, rows)
        data = data._replace(train=of_process(data.train, self.mesh, rows), held_out=held_out)
        run.data = with_references(data, program, self._without_gradient, keep, run.tell)

    def _evaluation_rows(self) -> int:
        """Rows of a batch without a backward pass, on all devices."""
        training = self.run.config.training
        size = training.per_device_eval_batch_size or training.per_device_train_batch_size
        return size * self.run.step.mesh.replicas

    def _without_gradient(self, rows: PackedRows) -> Batches:
        """Batches without a backward pass, in the order of the rows."""
        batches = Batches(rows, self._evaluation_rows(), shuffle=False)
        return batches.shortened(batches.steps_per_epoch, self.run.step.mesh.token_parts)

    def _send(self, batch: Batch) -> Batch:
        """The batch on the devices, each with its rows."""
        return jax.device_put(batch) if self.mesh is None else place(batch, row_shardings(batch, self.mesh))

    def _evaluate(self, trainable: Any) -> Evaluation:
        run, rows = self.run, self._evaluation_rows()
        assert run.data.held_out is not None
        batches = self._without_gradient(of_process(run.data.held_out, self.mesh, rows).rows).epoch()
        heard = self.watchdog.restart
        evaluation = run_evaluation(self.eval_step, trainable, run.model.frozen, batches, self._send, heard)
        if run.evaluate is None:
            return evaluation
        self.watchdog.waits(None)  # it may take any time
        model = ModelHandle(run.model.replace(trainable=trainable))
        return with_measurements(evaluation, run.evaluate(model))

    def _throughput(self, seconds_before: float) -> Throughput:
        run = self.run
        peak = peak_flops(jax.devices()[0].device_kind, run.model.dtype)
        return Throughput(
            run.data.total_steps,
            steps_per_epoch=run.data.batches.steps_per_epoch,
            flops_per_token=self._flops_per_token,
            peak_flops=None if peak is None else peak * run.step.mesh.size,
            devices=run.step.mesh.size,
            seconds_before=seconds_before,
        )

    def _explain(self, state: Any, batch: Batch, step: int) -> str:
        """The rows of the data that break a step, in words."""
        model, batches = self.run.model, self.run.data.batches
        probe = make_probe(model.graphdef, model.trainable_filter, loss=self.run.recipe.loss, mesh=self.mesh)

        def alone(rows: Batch) -> Any:  # the same row on all devices
            rows = jax.tree.map(lambda array: np.repeat(array, self.run.step.mesh.replicas, axis=1), rows)
            return probe(state, model.frozen, rows)

        places = non_finite_rows(alone, on_host(batch))
        if not places:
            return "No row of the step is at fault alone."
        numbers = batches.row_numbers(step - 1)
        return f"Not finite: {batches.describe_rows(numbers[tuple(zip(*places, strict=True))])}."

    def _chosen(self, reached: LoopState) -> Any:
        """The result's weights: the last, or the best."""
        best, checkpoints = reached.progress.best_step, self.run.checkpoints
        if not self.run.config.output.load_best_model_at_end or best is None or best == reached.progress.step:
            return reached.state.trainable
        try:
            if best not in checkpoints.steps():
                raise TrainingError(f"{checkpoints.folder / str(best)} could not be saved")
            return checkpoints.load(best, reached.state.trainable, "trainable")
        except TrainingError as error:
            raise TrainingError(
                f"output.load_best_model_at_end: the checkpoint of step {best} is the best, but {error}; the last "
                f"state is in {checkpoints.folder}"
            ) from error

    def _answer(self, reporting: Reporting, step: int) -> None:
        """Tell the sample answers of the model as far as training came; what keeps them away is a warning."""
        count, held_out = self.run.config.output.sample_answers, self.run.data.held_out
        model = self.reached()
        if not count or held_out is None or model is None:
            return
        self.watchdog.waits(None)  # compiling takes any time
        try:
            answers = sample_answers(model, held_out.rows, count)
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            warn(self.run.console, f"no sample answers: {str(error).splitlines()[0]}")
            return
        when = " before training" if step == 0 else ", see the report"
        reporting.tell(step, "answered", f"answered {len(answers)} held-out prompts{when}", samples=answers)


def _log_probs(model: Decoder, trainable_filter: Filter, rows: Any) -> Any:
    """The documents' log-probabilities under the model itself."""
    return document_scores(model, trainable_filter, rows).log_probs


def _flops_per_token(run: Run) -> float | None:
    """FLOPs of the mathematics for a token; None: the lengths of the documents are not known."""
    lengths = run.data.document_lengths
    if lengths is None:
        return None
    reference = run.loss is None and run.config.preferences.reference_in_step
    length = attended_length(lengths)
    return flops_per_token(run.model.config, run.model.trainable, length, reference=reference)


def of_process(data: Dataset, mesh: Mesh | None, rows: int) -> Dataset:
    """A data set of whose rows this process builds those of its devices; the same where it has all devices.

    Args:
        data: the data set.
        mesh: of the run; None: one device.
        rows: of a microbatch.
    """
    numbers = np.arange(rows) if mesh is None else own_rows(mesh, rows)
    return data if len(numbers) == rows else data._replace(rows=OwnRows.of(data.rows, numbers, rows))


def _whence(run: Run, step: int) -> str:
    """The start of a resumed run and its changed settings, in words."""
    if run.earlier is None:
        return "no checkpoint to go on from: started from the beginning"
    return f"going on after step {step}, from {run.earlier.where}" + (
        f"; changed since: {'; '.join(run.changed)}" if run.changed else ""
    )
