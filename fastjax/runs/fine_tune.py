"""A whole run: from its settings to an adapter, or a model, on disk.

This puts the parts together in the order in which mistakes are cheap: the output folder, the checkpoint to resume from
and the data are looked at before the weights are loaded.
"""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Iterator

import jax
from rich.console import Console

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from fastjax.errors import ConfigError, TrainingError
from fastjax.language_model import ModelHandle
from fastjax.models.paths import adapter_paths
from fastjax.parallel.processes import barrier, gathered_numbers, in_turn, is_primary
from fastjax.runs.checkpointing import compile_step, memory_advice
from fastjax.runs.datasets import load_run_data
from fastjax.runs.folder import RunFolder, claimed, run_folder
from fastjax.runs.hub_names import located, pinned
from fastjax.runs.identity import Identity, base_identity, check_identity, run_identity
from fastjax.runs.mesh import check_model, run_meshes
from fastjax.runs.messages import say, warn
from fastjax.runs.model import check_vocabulary, load_model, tell_model
from fastjax.runs.model_loading import ModelLoading
from fastjax.runs.opening import adapter_notes, open_model
from fastjax.runs.result import check_result, damage, finished, last_evaluation
from fastjax.runs.resume import Earlier, newest
from fastjax.runs.settings_changes import check_settings
from fastjax.runs.training_run import Evaluate, FineTuned, Own, TrainingRun, describe
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.config import LoraSection, TrainConfig
from fastjax.training.determinism import compiler_options
from fastjax.training.loop import Startup
from fastjax.training.loss import Loss
from fastjax.training.metrics import read_rows
from fastjax.training.profile import check_profile
from fastjax.training.trackers import check_trackers


def fine_tune(
    config: TrainConfig,
    console: Console | None = None,
    *,
    resume: bool = False,
    loss: Loss | None = None,
    evaluate: Evaluate | None = None,
    verbose: bool = False,
) -> FineTuned:
    """Load, train, save.

    Args:
        config: the settings.
        console: for progress; None: standard output.
        resume: go on from the newest whole checkpoint in the output folder; from the start where there is none. The
            result of a finished run with the same settings is read back and nothing is trained. So does
            `output.resume`.
        loss: a loss of your own in place of the settings'; see `training.loss.Loss`.
        evaluate: a measurement of your own at each held-out evaluation.
        verbose: say of every module how it is computed, and not only of those that a faster way does not serve on the
            GPU.

    Returns:
        The trained model and its folder.

    Raises:
        ConfigError: settings that contradict each other, the model, the output folder or the checkpoint.
        ConvertError: what is wrong with the model's folder.
        DataError: what is wrong with the data.
        TrainingError: a step that is not finite, weights without gradient, or a device without enough memory.
        Interrupted: SIGTERM, SIGHUP or SIGINT came; the state is saved.
        OSError: a file that cannot be read or written.
    """
    resume = resume or config.output.resume
    console = (console or Console()) if is_primary() else Console(quiet=True)
    with _shared_folder(config, resume) as folder:
        config = pinned(config, folder.read_settings() if resume else None)
        damaged = None
        if resume and finished(folder, config):
            done = _read_back(config, folder, console)
            if isinstance(done, FineTuned):
                say(console, f"the run in {folder.path} is finished: nothing is left to do")
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
        _check_same(earlier, folder)
        if resume and earlier is None:
            check_result(folder, config)
        meshes, changed = run_meshes(config), []
        replicas = meshes[0].replicas
        if earlier is not None:
            rows = None if earlier.replicas is None else (earlier.replicas, replicas)
            changed += check_settings(earlier.where, earlier.config, dataclasses.asdict(config), rows)
        check_trackers(config.output.report_to)
        opened = open_model(config)
        check_model(config, opened, meshes)
        for note in adapter_notes(config, opened):
            say(console, note)
        now = None if earlier is None else earlier.now
        load = functools.partial(load_run_data, config, opened.tokenizer, functools.partial(say, console), replicas)
        data = in_turn(lambda told: load(now=told or now), lambda data: data.train.now or "")
        check_profile(config.output, data.total_steps)
        for name, became in data.statistics().items():
            say(console, f"{name}: {became}")
        identity = run_identity(data, opened)
        if earlier is not None:
            changed += check_identity(earlier.where, earlier.identity, identity, holds_start=config.holds_start)
        options = compiler_options(config.training.deterministic, folder.path)
        before = None if earlier is None else earlier.checkpointing
        tell = functools.partial(say, console)
        documents = data.documents_per_row
        with ModelLoading(config, opened) as loading, _uncollected():
            began = time.perf_counter()
            step = compile_step(
                config, opened, data.total_steps, loss, options, before, tell, meshes, loading, documents
            )
            compiled = time.perf_counter() - began - loading.waited_seconds
            with memory_advice(step):
                model = loading.take(step.policy, step.mesh)
        startup = Startup(loading.load_seconds, compiled, loading.overlap_seconds)
        tell_model(model, console, step.mesh)
        if model.lora is not None:
            tokens = config.training.per_device_train_batch_size * config.model.max_seq_length
            for path in adapter_paths(model.graphdef, model.trainable, model.frozen, tokens):
                if verbose or (path.slower and jax.default_backend() == "gpu"):
                    say(console, path.text)
        check_vocabulary(model, data)
        checkpoints.extra = describe(config, data, identity, step.policy, replicas)
        run = TrainingRun(config, console, folder, checkpoints, data, identity, model, step, Own(loss, evaluate))
        del model  # its trained arrays: the run has copies
        return run.train(earlier, changed if resume else None, startup)


@contextlib.contextmanager
def _shared_folder(config: TrainConfig, resume: bool) -> Iterator[RunFolder]:
    """The run's folder, which the first process claims for all."""
    if not is_primary():
        barrier("folder")
        yield run_folder(config)
        return
    with claimed(config, resume=resume) as folder:
        barrier("folder")
        yield folder


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """The context in which Python looks for no garbage: tracing makes millions of objects, of which nearly all live."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_same(earlier: Earlier | None, folder: RunFolder) -> None:
    """Refuse processes that would go on from different checkpoints."""
    steps = gathered_numbers(0 if earlier is None else earlier.progress.step)
    if len(set(steps)) > 1:
        raise ConfigError(
            f"output.output_dir: expected a folder that all processes share, got {folder.path}, where they find "
            f"checkpoints of the steps {steps}"
        )


def _read_back(config: TrainConfig, folder: RunFolder, console: Console) -> FineTuned | str:
    """The result of the finished run in a folder, or the damage to it."""
    if (found := damage(folder)) is not None:
        return found
    if config.model.full_finetuning:  # its folder has the new tokens and the scaling
        model = dataclasses.replace(config.model, model_name=str(folder.result), new_tokens=None, rope_scaling=None)
        result = dataclasses.replace(config, model=model)
    else:
        if base := read_rows(folder.metrics)[-1].get("base"):
            now = base_identity(open_checkpoint(located(config, "model.model_name").folder))
            check_identity(folder.result, Identity(data="", **base), Identity(data="", **now))
        adapter = LoraSection(adapter=str(folder.result), lora_dropout=config.lora.lora_dropout)
        result = dataclasses.replace(config, lora=adapter)
    try:
        model = load_model(result, open_model(result))
        tell_model(model, console)
        return FineTuned(ModelHandle(model), folder.result, last_evaluation(folder), config)
    except (ConfigError, ConvertError, OSError) as error:  # where it is the base's, the run says so again
        return str(error)
