"""A PEFT adapter as the first checkpoint of a run, from which `fastjax train --resume` goes on.

The trained arrays are the adapter's, the optimizer's state is new, and no data have been used. A run can start from an
adapter by `lora.adapter` too, for which the adapter must stay in its place; the checkpoint needs it no more.
"""

import dataclasses
from pathlib import Path

from rich.console import Console

from convert.adapters import CONFIG, AdapterConfig, config_from_json
from convert.files import atomic_folder, read_json, remove_unfinished
from fastjax.errors import ConfigError
from fastjax.language_model import LanguageModel
from fastjax.language_model.adapters import add_adapter
from fastjax.lora.fit import open_fitting
from fastjax.lora.sites import adapter_sites
from fastjax.lora.tables import saved_modules
from fastjax.runs.datasets import load_run_data
from fastjax.runs.folder import RunFolder
from fastjax.runs.hub_names import pinned
from fastjax.runs.identity import opened_identity
from fastjax.runs.messages import say
from fastjax.runs.model import check_vocabulary, load_base, with_adapter
from fastjax.runs.opening import open_model
from fastjax.runs.resume import describe
from fastjax.runs.steps import StepRecipe
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints, named_arrays
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
    console = console or Console()
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
    settings = config_from_json(read_json(Path(adapter) / CONFIG), Path(adapter) / CONFIG)
    config = pinned(_with_lora_of(config, settings))
    opened = open_model(config)
    outline = opened.outline
    allow = config.model.allow_nonfinite
    fitting = open_fitting(Path(adapter), outline.config, outline.new_token_ids, allow_nonfinite=allow)
    data = load_run_data(config, opened.tokenizer, lambda text: say(console, text))
    base = load_base(config, opened)
    imported = add_adapter(base, *fitting, fake_quantization=False)
    model = with_adapter(base, config, opened)
    _check_fit(model, imported, adapter)
    check_vocabulary(model, data)
    state = StepRecipe.of(config, data.total_steps).state(model.replace(trainable=imported.trainable))
    remove_unfinished(folder)
    with atomic_folder(folder) as temporary:
        run = RunFolder(temporary, temporary / "adapter")
        checkpoints = Checkpoints(run.checkpoints, extra=describe(config, data, opened_identity(data, opened)))
        try:
            checkpoints.save(state, Progress())
            checkpoints.wait()
        finally:
            checkpoints.close()
        run.write_settings(config)


def _with_lora_of(config: TrainConfig, adapter: AdapterConfig) -> TrainConfig:
    """The settings with the adapter's in the section `lora`, if that has none but its dropout."""
    dropout = config.lora.lora_dropout
    if dataclasses.replace(config.lora, lora_dropout=None) != LoraSection():
        return config
    names = {field.name for field in dataclasses.fields(AdapterConfig)} & {
        field.name for field in dataclasses.fields(LoraSection)
    }
    own = {name: getattr(adapter, name) for name in names}
    own |= {name: own[name] or None for name in ("rank_pattern", "alpha_pattern")}
    own["lora_dropout"] = adapter.lora_dropout if dropout is None else dropout
    return dataclasses.replace(config, lora=LoraSection(**own))


def _check_fit(model: LanguageModel, imported: LanguageModel, adapter: str | Path) -> None:
    """Refuse an adapter unlike the one that the run trains: other modules, ranks, scales or kinds, other tokens."""
    assert model.lora is not None and imported.lora is not None
    if model.config.vocab_size != imported.config.vocab_size:
        raise ConfigError(
            f"{adapter}: expected an adapter of a model with {model.config.vocab_size} tokens, got one of "
            f"{imported.config.vocab_size}; name those that it adds in model.new_tokens"
        )
    wanted, found = _described(model), _described(imported)
    problems = [
        f"{name}: expected {wanted.get(name, 'nothing')}, got {found.get(name, 'nothing')}"
        for name in [*wanted, *(name for name in found if name not in wanted)]
        if wanted.get(name) != found.get(name)
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(
            f"{adapter}: expected an adapter as the section lora says: {'; '.join(problems[:3])}{more}; leave the "
            "section out to take the adapter's own settings"
        )


def _described(model: LanguageModel) -> dict[str, str]:
    """The adapter's parts by name, in words, and its arrays by shape and dtype."""
    assert model.lora is not None
    kind = "DoRA" if model.lora.use_dora else "LoRA"
    described = {
        site.path: f"{kind} of rank {site.rank} and scale {site.scaling:g}"
        for site in adapter_sites(model.lora, model.config)
    }
    described |= dict.fromkeys(saved_modules(model.lora), "the whole table")
    arrays = named_arrays(model.trainable)
    return described | {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
