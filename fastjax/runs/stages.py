"""The stages that all training runs have, in the order in which mistakes are cheap.

The output folder, the checkpoint to resume from and the data are looked at before weights are loaded. A model in
folders (`fine_tune`) and one in memory (`trainer`) have stages of their own between them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

from convert.checkpoint import open_checkpoint
from fastjax.errors import ConfigError, TrainingError
from fastjax.parallel.processes import barrier, gathered_numbers, in_turn, is_primary
from fastjax.runs.context import Run
from fastjax.runs.datasets import load_run_data
from fastjax.runs.folder import RunFolder, claimed, run_folder
from fastjax.runs.identity import base_identity, check_identity, digest, run_identity
from fastjax.runs.mesh import run_meshes
from fastjax.runs.model import check_vocabulary
from fastjax.runs.result import check_result
from fastjax.runs.resume import newest
from fastjax.runs.settings_changes import check_settings
from fastjax.runs.steps import StepRecipe
from fastjax.runs.training_run import TrainingRun
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.compiled import reproducible
from fastjax.training.config import TrainConfig
from fastjax.training.profile import check_profile
from fastjax.training.trackers import check_trackers


def claim(run: Run) -> None:
    """Claim the output folder."""
    run.folder = run.exits.enter_context(_shared_folder(run.config, run.resume))


def find_checkpoint(run: Run) -> None:
    """Find the checkpoint to resume from."""
    folder = run.folder
    run.checkpoints = Checkpoints(folder.checkpoints, keep=run.config.output.save_total_limit)
    run.earlier = newest(run.checkpoints, run.console) if run.resume else None
    if run.damage is not None and run.earlier is None:
        raise TrainingError(
            f"{run.damage}; there is no checkpoint to make it again from. To train again, replace it "
            "(output.overwrite_output_dir: true, without --resume)"
        )
    steps = gathered_numbers(0 if run.earlier is None else run.earlier.progress.step)
    if len(set(steps)) > 1:
        raise ConfigError(
            f"output.output_dir: expected a folder that all processes share, got {folder.path}, where they find "
            f"checkpoints of the steps {steps}"
        )
    if run.resume and run.earlier is None:
        check_result(folder, run.config)


def compare_settings(run: Run) -> None:
    """Compare the settings with the checkpoint's, and choose the meshes that there are devices for."""
    run.meshes = run.meshes or run_meshes(run.config)
    if (earlier := run.earlier) is not None:
        rows = None if earlier.replicas is None else (earlier.replicas, run.meshes[0].replicas)
        run.changed += check_settings(earlier.where, earlier.config, dataclasses.asdict(run.config), rows)
    check_trackers(run.config.output.report_to)


def read_data(run: Run) -> None:
    """Read, encode and pack the data."""
    now, before = (None, {}) if run.earlier is None else (run.earlier.now, run.earlier.position)
    shape = run.meshes[0]
    options = {"parts": shape.token_parts, "before": before}
    load = functools.partial(load_run_data, run.config, run.tokenizer, run.tell, shape.replicas, run.given, **options)
    run.data = in_turn(lambda told: load(now=told or now), lambda data: data.train.now or "")
    check_profile(run.config.output, run.data.total_steps)
    for name, became in run.data.statistics().items():
        run.tell(f"{name}: {became}")


def identify(run: Run) -> None:
    """Take the fingerprints of the inputs; of a model in memory what it has learnt before is there as its reference."""
    adapter = None
    if run.opened is not None:
        weights, started = run.opened.weights, run.opened.adapter
        assert weights is not None, "the base's weights are on this machine"
        base, adapter = base_identity(weights.checkpoint), None if started is None else started.arrays
    elif run.model.folder is not None:
        base = base_identity(open_checkpoint(run.model.folder))
    else:
        base = {"model": digest(str(sorted(run.model.hf_config.items())))}
    run.identity = run_identity(run.data, run.tokenizer, base, adapter, run.start)


def compare_inputs(run: Run) -> None:
    """Compare the inputs with the checkpoint's, and make the recipe of the step."""
    if (earlier := run.earlier) is not None:
        holds_start = run.config.holds_start
        run.changed += check_identity(earlier.where, earlier.identity, run.identity, holds_start=holds_start)
    run.recipe = StepRecipe(
        run.config,
        run.data.total_steps,
        loss=run.loss,
        optimizer=run.optimizer,
        compiler_options=reproducible(run.config.training.deterministic, run.folder.path),
        documents_per_row=run.data.documents_per_row,
        longest=run.data.batches.lengths[-1],
    )


def train(run: Run) -> None:
    """Take the steps, and save the result."""
    check_vocabulary(run.model, run.data)
    run.checkpoints.extra = run.description
    run.result = TrainingRun(run).train()


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
