"""A PEFT adapter as the first checkpoint of a run, from which `fastjax train --resume` goes on.

What is trained is the adapter's, the optimizer's state is new, and no data have been used. A run can start from an
adapter by `lora.adapter` too, for which the adapter has to stay where it is; the checkpoint needs it no more.
"""

import dataclasses
from pathlib import Path

from rich.console import Console

from convert.adapters import AdapterConfig, read_adapter
from convert.files import atomic_folder, remove_unfinished
from fastjax.errors import ConfigError
from fastjax.fine_tuning import adapted, check_vocabulary, describe, initial_state
from fastjax.language_model import FastLanguageModel, LanguageModel
from fastjax.lora.sites import adapter_sites
from fastjax.lora.tables import saved_modules
from fastjax.training.checkpoint import Checkpoints, Progress, named_arrays
from fastjax.training.config import LoraSection, TrainConfig
from fastjax.training.datasets import load_run_data
from fastjax.training.identity import run_identity
from fastjax.training.model_check import load_run_tokenizer
from fastjax.training.origins import pinned
from fastjax.training.run_folder import RunFolder


def import_adapter(config: TrainConfig, adapter: str | Path, console: Console | None = None) -> None:
    """Write the output folder of a run that has an adapter and has taken no step.

    Args:
        config: settings of the run, whose output folder is written. Where the section `lora` says nothing, it becomes
            what the adapter's settings say.
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
        raise ConfigError(f"{folder}: expected a new folder for the run, given one that exists")
    if config.model.full_finetuning:
        raise ConfigError("model.full_finetuning: expected false for a run that begins with an adapter, given true")
    settings, _ = read_adapter(adapter, allow_nonfinite=config.model.allow_nonfinite)
    config = pinned(_with_lora_of(config, settings))
    tokenizer = load_run_tokenizer(config)
    data = load_run_data(config, tokenizer, lambda text: console.print(text, highlight=False, markup=False))
    base, _ = FastLanguageModel.from_pretrained(**dataclasses.asdict(config.model))
    given = FastLanguageModel.load_adapter(base, adapter, allow_nonfinite=config.model.allow_nonfinite)
    model = adapted(base, config)
    _check_fit(model, given, adapter)
    check_vocabulary(model, data)
    state = initial_state(config, model.replace(trainable=given.trainable), data.total_steps)
    remove_unfinished(folder)
    with atomic_folder(folder) as temporary:
        run = RunFolder(temporary, temporary / "adapter")
        checkpoints = Checkpoints(run.checkpoints, extra=describe(config, data, run_identity(config, data, tokenizer)))
        try:
            checkpoints.save(state, Progress())
            checkpoints.wait()
        finally:
            checkpoints.close()
        run.write_settings(config)


def _with_lora_of(config: TrainConfig, adapter: AdapterConfig) -> TrainConfig:
    """The settings with the adapter's in the section `lora`, where that says nothing but how it is trained."""
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


def _check_fit(model: LanguageModel, given: LanguageModel, adapter: str | Path) -> None:
    """Refuse an adapter that is not what the run trains: other modules, ranks, scales or kinds, other tokens."""
    assert model.lora is not None and given.lora is not None
    if model.config.vocab_size != given.config.vocab_size:
        raise ConfigError(
            f"{adapter}: expected an adapter of a model with {model.config.vocab_size} tokens, given one of "
            f"{given.config.vocab_size}; name those that it adds in model.new_tokens"
        )
    wanted, found = _described(model), _described(given)
    problems = [
        f"{name}: expected {wanted.get(name, 'nothing')}, given {found.get(name, 'nothing')}"
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
    """What is trained, by name, and at last the arrays themselves, which must be alike."""
    assert model.lora is not None
    kind = "DoRA" if model.lora.use_dora else "LoRA"
    described = {
        site.path: f"{kind} of rank {site.rank} and scale {site.scaling:g}"
        for site in adapter_sites(model.lora, model.config)
    }
    described |= dict.fromkeys(saved_modules(model.lora), "the whole table")
    arrays = named_arrays(model.trainable)
    return described | {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
