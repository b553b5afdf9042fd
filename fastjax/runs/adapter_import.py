"""A PEFT adapter as the first checkpoint of a run, from which `fastjax train --resume` goes on.

The trained arrays are the adapter's, the optimizer's state is new, and no data have been used. A run can start from an
adapter by `lora.adapter` too, for which the adapter must stay in its place; the checkpoint needs it no more.
"""

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from convert.adapters import CONFIG, AdapterConfig, config_from_json
from convert.files import atomic_folder, read_json, remove_unfinished
from fastjax.errors import ConfigError
from fastjax.language_model.adapters import add_adapter
from fastjax.language_model.loading import load_opened
from fastjax.lora.fit import open_fitting
from fastjax.parallel import MeshShape
from fastjax.runs.context import Run
from fastjax.runs.fine_tune import open_folders, settle
from fastjax.runs.folder import RunFolder
from fastjax.runs.model import check_vocabulary, with_adapter
from fastjax.runs.settings_changes import listed
from fastjax.runs.stages import identify, read_data
from fastjax.runs.steps import StepRecipe
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.config import LoraSection, TrainConfig


def import_adapter(config: TrainConfig, adapter: str | Path, console: Console | None = None) -> None:
    """Write the output folder of a run that has an adapter and has taken no step.

    Args:
        config: settings of the run, whose output folder is written. A section `lora` without settings becomes the
            adapter's.
        adapter: PEFT's folder.
        console: for progress; None: standard output.

    Raises:
        ConfigError: the output folder exists, or the adapter is none of the run's model and settings (the first
            misfits named).
        ConvertError: what is wrong with the adapter's or the model's folder.
        DataError: what is wrong with the data.
        OSError: the folder cannot be written; nothing is left of it.
    """
    folder = Path(config.output.output_dir)
    if folder.exists():
        raise ConfigError(f"{folder}: expected a new folder for the run, got one that exists")
    if config.model.full_finetuning:
        raise ConfigError("model.full_finetuning: expected false for a run that begins with an adapter, got true")
    if config.preferences.needs_reference:
        raise ConfigError(
            f"preferences.loss: expected none that has a reference, got {config.preferences.loss}, whose reference is "
            "the adapter that a run begins with; name it as lora.adapter of a new run"
        )
    run = Run(_with_lora_of(config, Path(adapter)), console or Console(), meshes=(MeshShape(),))
    for stage in (settle, open_folders, read_data, identify):
        stage(run)
    opened, config = run.opened, run.config
    assert opened is not None
    allow = config.model.allow_nonfinite
    start = open_fitting(Path(adapter), opened.config, opened.new_token_ids, allow_nonfinite=allow)
    base = load_opened(opened, config.model)
    imported = add_adapter(base, start, fake_quantization=False)
    run.model = with_adapter(base, config, opened)
    if run.model.config.vocab_size != imported.config.vocab_size:
        raise ConfigError(
            f"{adapter}: expected an adapter of a model with {run.model.config.vocab_size} tokens, got one of "
            f"{imported.config.vocab_size}; name those that it adds in model.new_tokens"
        )
    check_vocabulary(run.model, run.data)
    state = StepRecipe(config, run.data.total_steps).state(run.model.replace(trainable=imported.trainable))
    remove_unfinished(folder)
    with atomic_folder(folder) as temporary:
        written = RunFolder(temporary, temporary / "adapter")
        checkpoints = Checkpoints(written.checkpoints, extra=run.description)
        try:
            checkpoints.save(state, Progress())
            checkpoints.wait()
        finally:
            checkpoints.close()
        written.write_settings(config)


def _with_lora_of(config: TrainConfig, folder: Path) -> TrainConfig:
    """The settings with an adapter's in the section `lora`, which has none of its own but dropout, or the same."""
    adapter, given = config_from_json(read_json(folder / CONFIG), folder / CONFIG), config.lora
    names = {field.name for field in dataclasses.fields(AdapterConfig)}
    names &= {field.name for field in dataclasses.fields(LoraSection)}
    settings = {name: getattr(adapter, name) for name in names}
    settings |= {name: settings[name] or None for name in ("rank_pattern", "alpha_pattern")}
    if given.lora_dropout is not None:
        settings["lora_dropout"] = given.lora_dropout
    if dataclasses.replace(given, lora_dropout=None) != LoraSection():
        pairs = {name: (settings[name], getattr(given, name)) for name in sorted(names - {"lora_dropout"})}
        differ = {name: pair for name, pair in pairs.items() if _ordered(pair[0]) != _ordered(pair[1])}
        if differ:
            raise ConfigError(
                f"{folder}: expected an adapter as the section lora says: {listed(differ)}; leave the section out to "
                "take the adapter's own settings"
            )
    return dataclasses.replace(config, lora=LoraSection(**settings))


def _ordered(value: Any) -> Any:
    """A setting of which the order of names tells nothing, as PEFT's are sets."""
    return sorted(value) if isinstance(value, list) else value
