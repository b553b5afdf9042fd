"""Needs of an imported run that its settings do not show: a family that there is, files from the network."""

import glob
from pathlib import Path

from convert.errors import ConvertError
from convert.families import FAMILIES, family_for
from convert.families.not_supported import unsupported_by_name
from convert.files import read_json
from convert.hub import split
from fastjax.config_import.job import Job


def note_needs(job: Job) -> None:
    """Note a base model whose family there is not, and a model and data that are no files here."""
    model = job.carried["model.model_name"]
    name, revision = split(model.value)
    folder = Path(name).expanduser()
    config = next((file for file in (folder / "config.json", *_kept(name, revision)) if file.is_file()), None)
    said = []
    if config is not None:
        try:
            family_for(read_json(config), config)
        except ConvertError as error:
            said.append(f"not supported: {error}")
    elif family := unsupported_by_name(name):
        said.append(f"by its name of a kind that is not supported, {family}; there are {', '.join(FAMILIES)}")
    if config is None and not folder.is_dir():
        said.append("no folder here: it comes from the hub, over the network, as the run begins")
    if said:
        job.notes[model.key] = "; ".join(said)
    for line in (job.carried[setting] for setting in ("data.train", "data.eval") if setting in job.carried):
        if away := [path for source in line.value if not _is_here(path := source["path"])]:
            listed = ", ".join(dict.fromkeys(away))
            job.notes[line.key] = f"no file here: `datasets` fetches over the network, as the run begins: {listed}"


def _kept(name: str, revision: str | None) -> list[Path]:
    """config.json of a model on the hub, where the hub's cache has it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # no name of the hub's
        return []
    return [Path(found)] if isinstance(found, str) else []


def _is_here(path: str) -> bool:
    there = str(Path(path).expanduser())
    return Path(there).exists() or (glob.has_magic(there) and bool(glob.glob(there, recursive=True)))
