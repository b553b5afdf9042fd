"""A whole run from its settings to an adapter, or a model, on disk: `fastjax train`."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator

import jax
from rich.console import Console

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from fastjax.errors import ConfigError
from fastjax.language_model import ModelHandle
from fastjax.models.paths import adapter_paths
from fastjax.parallel.processes import is_primary
from fastjax.runs.checkpointing import compile_step, memory_advice
from fastjax.runs.context import Evaluate, FineTuned, Run, perform
from fastjax.runs.identity import Identity, base_identity, check_identity
from fastjax.runs.mesh import check_model
from fastjax.runs.messages import warn
from fastjax.runs.model import load_model, tell_model
from fastjax.runs.model_loading import ModelLoading
from fastjax.runs.opening import adapter_notes, located, open_model, pinned
from fastjax.runs.result import damage, finished, last_evaluation
from fastjax.runs.stages import claim, compare_inputs, compare_settings, find_checkpoint, identify, read_data, train
from fastjax.training.config import LoraSection, TrainConfig
from fastjax.training.loss import Loss
from fastjax.training.metrics import read_rows
from fastjax.training.observers import Startup


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
    console = (console or Console()) if is_primary() else Console(quiet=True)
    resume = resume or config.output.resume
    run = Run(config, console, resume, verbose, loss, evaluate)
    inputs = (settle, find_checkpoint, compare_settings, open_folders, read_data, identify)
    return perform(run, (claim, *inputs, compare_inputs, load, train))


def settle(run: Run) -> None:
    """Pin names on the hub; of a run that is finished read the result back, unless it is damaged."""
    run.config = pinned(run.config, run.folder.read_settings() if run.resume else None)
    if not run.resume or not finished(run.folder, run.config):
        return
    done = _read_back(run)
    if isinstance(done, FineTuned):
        run.tell(f"the run in {run.folder.path} is finished: nothing is left to do")
        run.result = done
        return
    run.damage = f"{run.folder.result} is damaged: {done}"
    warn(run.console, f"{run.damage}; looking for a checkpoint to make it again from")


def open_folders(run: Run) -> None:
    """Open the model and the adapter without their weights, and look at what they do not suit."""
    run.opened = open_model(run.config)
    run.tokenizer = run.opened.tokenizer
    check_model(run.config, run.opened, run.meshes)
    for note in adapter_notes(run.config, run.opened):
        run.tell(note)


def load(run: Run) -> None:
    """Compile the step for shapes, and load the model beside what is read back, or behind."""
    opened = run.opened
    assert opened is not None
    with ModelLoading(run.config, opened) as loading, _uncollected():
        began = time.perf_counter()
        run.step = step = compile_step(run, opened, loading)
        compiled = time.perf_counter() - began - loading.waited_seconds
        with memory_advice(step):
            run.model = loading.take(step.policy, step.mesh)
    run.startup = Startup(loading.load_seconds, compiled, loading.overlap_seconds)
    tell_model(run.model, run.console, step.mesh)
    _tell_adapters(run)


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


def _tell_adapters(run: Run) -> None:
    """Say how the adapters' products are computed, where a faster way does not serve them, or all if asked."""
    model, config = run.model, run.config
    if model.lora is None:
        return
    tokens = config.training.per_device_train_batch_size * config.model.max_seq_length
    for path in adapter_paths(model.graphdef, model.trainable, model.frozen, tokens):
        if run.verbose or (path.slower and jax.default_backend() == "gpu"):
            run.tell(path.text)


def _read_back(run: Run) -> FineTuned | str:
    """The result of the finished run in a folder, or the damage to it."""
    config, folder = run.config, run.folder
    if (problem := damage(folder)) is not None:
        return problem
    if config.model.full_finetuning:  # its folder has the tokens and the scaling
        made = dict.fromkeys(("new_tokens", "special_tokens_map", "rope_scaling"))
        model = dataclasses.replace(config.model, model_name=str(folder.result), **made)
        result = dataclasses.replace(config, model=model)
    else:
        if base := read_rows(folder.metrics)[-1].get("base"):
            now = base_identity(open_checkpoint(located(config, "model.model_name").folder))
            check_identity(folder.result, Identity(data="", **base), Identity(data="", **now))
        adapter = LoraSection(adapter=str(folder.result), lora_dropout=config.lora.lora_dropout)
        result = dataclasses.replace(config, lora=adapter)
    try:
        model = load_model(result, open_model(result))
        tell_model(model, run.console)
        return FineTuned(ModelHandle(model), folder.result, last_evaluation(folder), config)
    except (ConfigError, ConvertError, OSError) as error:  # where it is the base's, the run says so again
        return str(error)
