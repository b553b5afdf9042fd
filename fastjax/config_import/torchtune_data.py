"""torchtune's data sets, by their builders, and what is learnt of them."""

import re
from typing import Any

from convert.errors import shorten, shown
from fastjax.config_import.job import Job
from fastjax.config_import.shared import PAIR, with_files, write_data

_ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}
_PAIR = {"prompt": "input", "completion": "output"}

#: A data set's builder → its kind, its source, its columns, and train_on_input's default there.
_BUILDERS: dict[str, tuple[str, str | None, dict[str, str], bool]] = {
    "alpaca_dataset": ("alpaca", "tatsu-lab/alpaca", _ALPACA, True),
    "alpaca_cleaned_dataset": ("alpaca", "yahma/alpaca-cleaned", _ALPACA, True),
    "instruct_dataset": ("pair", None, _PAIR, False),
    "grammar_dataset": ("pair", "liweili/c4_200m", _PAIR, False),
    "samsum_dataset": ("pair", "Samsung/samsum", {"prompt": "dialogue", "completion": "summary"}, False),
    "slimorca_dataset": ("chat", "Open-Orca/SlimOrca-Dedup", {"conversations": "conversations"}, False),
    "chat_dataset": ("chat", None, {}, False),
    "text_completion_dataset": ("text", None, {"text": "text"}, True),
    "wikitext_dataset": ("text", "EleutherAI/wikitext_document_level", {"text": "page"}, True),
    "cnn_dailymail_articles_dataset": ("text", "ccdv/cnn_dailymail", {"text": "article"}, True),
    "preference_dataset": ("pairs", None, PAIR, False),
    "hh_rlhf_helpful_dataset": ("pairs", "RLHFlow/HH-RLHF-Helpful-standard", PAIR, False),
}
#: Builders of which a part is read that no setting names → what there is instead.
_PARTS = {
    "stack_exchange_paired_dataset": "it reads the folder data/rl alone: fetch its files, and name them in a file of "
    "settings with data.columns: {prompt: question, chosen: response_j, rejected: response_k}"
}
_CONFIGURATIONS = {"wikitext_dataset": "wikitext-103-v1", "cnn_dailymail_articles_dataset": "3.0.0"}
_STYLES = {"sharegpt": "conversations", "openai": "messages"}


def data(job: Job) -> None:
    """Data sets and what is learnt of them."""
    sources: list[dict[str, Any]] = []
    for key, setting in (("dataset", "data.train"), ("dataset_val", "data.eval")):
        given = job.take(key)
        if given is None:
            continue
        places = {key: given} if not isinstance(given, list) else {f"{key}[{n}]": item for n, item in enumerate(given)}
        listed = [source for where, item in places.items() for source in _source(job, where, item)]
        write_data(job, key, listed, setting)
        sources += listed
    if "data.train" not in job.carried:
        raise job.wrong("dataset", "a section with _component_", None)
    on_input = {source["on_input"] for source in sources if "on_input" in source}
    if len(on_input) > 1:
        job.refused["dataset.train_on_input"] = "data.loss_on holds for all data sets"
    if on_input == {True}:
        job.carry("dataset.train_on_input", "data.loss_on", "all")
    job.carry("dataset.packed", "data.packing", any(source.get("packed") for source in sources))


def _source(job: Job, where: str, item: Any) -> list[dict[str, Any]]:
    """A data set as sections of data.train, with whether its rows are packed and prompts are learnt."""
    given = job.checked(where, item)
    component = job.checked(f"{where}._component_", given.pop("_component_", None), str)
    builder = re.sub(r".*\.", "", component)
    if builder not in _BUILDERS:
        known = f"there are {', '.join(_BUILDERS)}"
        job.refused[f"{where}._component_"] = f"{shorten(component, 80)}: {_PARTS.get(builder, known)}"
        return [{"path": ""}]
    kind, path, columns, on_input = _BUILDERS[builder]
    columns = dict(columns)
    if (kind == "pairs") != ("preferences.loss" in job.carried):
        job.refused[f"{where}._component_"] = "rows of pairs are for loss DPOLoss or SimPOLoss, and others are not"
    path = given.pop("source", path)
    if path is None:
        raise job.wrong(f"{where}.source", "the data set", None)
    source: dict[str, Any] = {"path": path, "columns": columns}
    files = job.checked(f"{where}.data_files", given.pop("data_files", None), list[str] | str | None)
    names = (given.pop("name", None), given.pop("subset", None), _CONFIGURATIONS.get(builder))
    source["name"] = next((name for name in names if name is not None), None)
    source["split"] = str(given.pop("split", "train"))
    if kind == "chat":
        style = str(given.pop("conversation_style", "sharegpt"))
        if style not in _STYLES:
            raise job.wrong(f"{where}.conversation_style", "sharegpt or openai", style)
        column = given.pop("conversation_column", None)
        if column is not None or not columns:
            source["columns"] = columns = {_STYLES[style]: column or _STYLES[style]}
    meanings = {"input": "prompt", "output": "completion"} if kind == "pair" else {}
    renamed: dict[str, str] = job.checked(f"{where}.column_map", given.pop("column_map", {}), dict[str, str])
    for field, column in renamed.items():
        if (meaning := meanings.get(field, field)) in columns:
            columns[meaning] = column
    if kind == "text":
        columns["text"] = given.pop("column", _BUILDERS[builder][2]["text"])
        given = {key: value for key, value in given.items() if key not in ("add_eos", "split_across_pack")}
    else:
        source["on_input"] = bool(given.pop("train_on_input", on_input))
    if kind == "alpaca":
        job.not_carried[f"{where}._component_"] = "Alpaca's wording; data.chat_template: alpaca has it"
    source["packed"] = bool(given.pop("packed", False))
    for key, value in given.items():
        if key in ("new_system_prompt", "filter_fn"):
            job.refused[f"{where}.{key}"] = "rows are read as they are; change them beforehand"
        else:
            job.not_carried[f"{where}.{key}"] = f"unknown to this import, {shown(value, 40)}"
    return with_files(source, files)
