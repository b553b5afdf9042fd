"""Whether a folder can be loaded, by the checks of loading itself. No JAX, and no tensor is read."""

import dataclasses
from pathlib import Path

from convert.adapters import CONFIG as ADAPTER_CONFIG
from convert.adapters import config_from_json
from convert.checkpoint import CONFIG
from convert.errors import ConvertError
from convert.files import read_json
from convert.hub import Source
from convert.inspect import Inspection
from convert.model.paths import SCORE, TABLES
from fastjax.errors import ConfigError
from fastjax.execution.opening import open_folder
from fastjax.execution.options import LoadOptions
from fastjax.lora.fit import open_fitting
from fastjax.lora.tables import check_saved


def with_refusals(found: Inspection) -> Inspection:
    """An inspection with what loading the folder refuses; a model without a tokenizer can be loaded here.

    Args:
        found: the inspection; an adapter's is compared with its base where that is a folder on this machine.
    """
    problems = list(found.unsupported)
    try:
        if found.kind == "model":
            open_folder(Source(found.folder), LoadOptions(), tokenizer=False)
        elif not problems:
            _check_adapter(found.folder)
    except (ConfigError, ConvertError) as error:
        problems.append(str(error))
    return dataclasses.replace(found, unsupported=tuple(dict.fromkeys(problems)))


def _check_adapter(folder: Path) -> None:
    adapter = config_from_json(read_json(folder / ADAPTER_CONFIG), folder / ADAPTER_CONFIG)
    base = adapter.base_model_name_or_path
    if base is None or not (Path(base) / CONFIG).is_file():
        check_saved(adapter, (*TABLES, SCORE))
        return
    opened = open_folder(Source(Path(base)), LoadOptions(), weights=False, tokenizer=False)
    open_fitting(folder, opened.config)
