"""Export of a run's checkpoint: an adapter for PEFT, or the model after full fine-tuning."""

from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from fastjax.errors import ConfigError
from fastjax.language_model.saving import save_pretrained
from fastjax.runs.card import training_of
from fastjax.runs.folder import claimed
from fastjax.runs.model import load_model
from fastjax.runs.opening import open_model
from fastjax.runs.resume import newest, restore
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.config import TrainConfig


def export_checkpoint(
    config: TrainConfig,
    folder: str | Path,
    *,
    step: int | None = None,
    force: bool = False,
    console: Console | None = None,
) -> int:
    """Write the trained weights of a checkpoint, as the run itself does at its end.

    Args:
        config: settings of the run, whose output folder has the checkpoints.
        folder: the result.
        step: of the checkpoint; None: the newest that is not damaged.
        force: replace an existing adapter or model.
        console: for warnings; None: standard error.

    Returns:
        The checkpoint's step.

    Raises:
        ConfigError: no such checkpoint, one of another version or model, a run that is at work, or a folder that is
            taken.
        TrainingError: the checkpoint, or every one, is damaged.
    """
    folder, console = Path(folder), console or Console(stderr=True)
    if folder.exists() and not (force and folder.is_dir()):
        raise ConfigError(f"{folder}: expected a new folder (--force replaces what is there), got one that exists")
    with claimed(config, resume=True) as run:
        checkpoints = Checkpoints(run.checkpoints)
        try:
            steps = checkpoints.steps()
            if not steps or step not in (None, *steps):
                wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
                raise ConfigError(f"{run.checkpoints}: expected {wanted}, got {steps or 'none'}")
            earlier = newest(checkpoints, console) if step is None else None
            model = load_model(config, open_model(config))
            trained: Any = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), model.trainable
            )

            def load(chosen: int) -> Any:
                return checkpoints.load(chosen, trained, "trainable")

            if earlier is None:
                assert step is not None, "without a step there is a newest checkpoint"
                learnt = load(step)
            else:
                earlier, learnt = restore(checkpoints, earlier, load, console)
                step = earlier.progress.step
            training = training_of(config, run.metrics, {}, until=step)
            save_pretrained(model.replace(trainable=learnt, training=training), folder)
        finally:
            checkpoints.close()
    return step
