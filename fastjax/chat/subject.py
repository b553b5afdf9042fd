"""A model to talk to, found from the folder of a run, an adapter or a model."""

from pathlib import Path
from typing import Any, NamedTuple

from convert.adapter_config import CONFIG as ADAPTER_CONFIG
from convert.adapter_config import config_from_json
from convert.files import read_json
from convert.trained_over import read_trained_over
from fastjax.errors import ConfigError
from fastjax.runs.folder import RunFolder

#: Settings of a run's model that it is loaded with.
_KEPT = ("load_in_4bit", "dtype", "rope_scaling", "float32_modules", "allow_nonfinite")
_ARRAYS = "adapter_model.safetensors"


class Subject(NamedTuple):
    """A model, perhaps with an adapter.

    Attributes:
        name: to call it by.
        model: folder, or name on the hub.
        adapter: PEFT's folder; None: there is none.
        options: of loading it, by name, as it was trained.
    """

    name: str
    model: str
    adapter: str | None
    options: dict[str, Any]


def find_subject(place: str) -> Subject:
    """The model, perhaps with an adapter, in a place.

    Args:
        place: output folder of a run, a PEFT adapter, a model folder, or a name on the hub.

    Raises:
        ConfigError: a folder with none of them, a run without a result, or an adapter that does not name its base.
        ConvertError: a broken file.
    """
    folder = Path(place)
    if not folder.is_dir():
        return Subject(folder.name, place, None, {"load_in_4bit": False})
    if (folder / "config.json").is_file():
        run = _of_run(folder.parent)
        return run if run is not None and Path(run.model) == folder else _plain(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        run = _of_run(folder.parent)
        return run if run is not None and Path(run.adapter or "") == folder else _of_adapter(folder)
    run = _of_run(folder)
    if run is None:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"{place}: expected the folder of a run, an adapter ({ADAPTER_CONFIG}) or a model (config.json), got one "
            f"with {found}; a checkpoint of training has no model to load: name its run's folder"
        )
    return run


def _plain(folder: Path) -> Subject:
    return Subject(folder.resolve().name, str(folder), None, {"load_in_4bit": False})


def _of_run(folder: Path) -> Subject | None:
    """The result of the run in a folder; None: it is no run's."""
    run = RunFolder(folder, folder / "adapter")
    settings = run.read_settings()
    model = settings.get("model") if settings else None
    if not isinstance(model, dict) or "model_name" not in model:
        return None
    name = folder.resolve().name
    options = {key: model[key] for key in _KEPT if model.get(key) is not None}
    if model.get("full_finetuning"):
        result, named = folder / "model", (str(folder / "model"), None)
        options.pop("rope_scaling", None)  # its config.json has it
    else:
        result, named = run.result, (str(model["model_name"]), str(run.result))
    if not result.is_dir():
        raise ConfigError(
            f"{folder}: expected a run with a result in {result.name}, got one that has not finished; go on with "
            f"fastjax train --config {run.settings} --resume"
        )
    return Subject(name, *named, options)


def _of_adapter(folder: Path) -> Subject:
    file = folder / ADAPTER_CONFIG
    over = read_trained_over(folder / _ARRAYS) if (folder / _ARRAYS).is_file() else None
    base = config_from_json(read_json(file), file).base_model_name_or_path
    if over is not None and base is None:
        base = over.name if over.revision is None else f"{over.name}@{over.revision}"
    if base is None:
        raise ConfigError(
            f"{folder}: expected an adapter that names its base (base_model_name_or_path), got one without; give the "
            f"base first: fastjax chat BASE --adapter {folder}"
        )
    return Subject(folder.resolve().name, base, str(folder), {"load_in_4bit": over is not None and over.when_read})
