"""LLaMA-Factory's data sets, which dataset_info.json describes, their template, and what is learnt of them."""

from pathlib import Path
from typing import Any

from convert import strict_json
from convert.errors import shorten
from fastjax.config_import.common import TEMPLATES, hold_out, speakers_differ, write_data
from fastjax.config_import.job import Job
from fastjax.config_import.llama_factory_preferences import answers, prompt_of_texts
from fastjax.config_import.preferences import spelling

INFO = "dataset_info.json"


def data(job: Job) -> None:
    """Data sets, their template, and what is learnt of them."""
    plain = job.values.get("stage") == "pt"
    listed = [_described(job, name, plain) for name in job.names("dataset")]
    held_out = [_described(job, name, plain) for name in job.names("eval_dataset")]
    if not listed and not job.refused:
        raise job.wrong("dataset", "at least one data set", None)
    rows = job.integer("max_samples")
    if rows is not None:
        for source in (*listed, *held_out):
            if source["split"].isalnum():
                source["split"] += f"[:{rows}]"
    if job.flag("streaming"):
        for source in listed:
            source["streaming"] = True
    strategy, shares = job.text("mix_strategy") or "concat", job.names("interleave_probs")
    if strategy == "interleave_once":
        job.refused["mix_strategy"] = "data.mixture_ends has first_exhausted and all_exhausted"
    elif strategy != "concat":
        ends = "all_exhausted" if strategy == "interleave_over" else "first_exhausted"
        job.carry("mix_strategy", "data.mixture_ends", ends)
        weights = [job.to_number("interleave_probs", share) for share in shares or ["1"] * len(listed)]
        for source, weight in zip(listed, weights, strict=False):
            source["weight"] = weight
    hold_out(job, "val_size", listed, named=bool(held_out))
    write_data(job, "dataset" if rows is None else "dataset, max_samples", listed)
    if held_out:
        write_data(job, "eval_dataset", held_out, "data.eval")
    _learnt(job)
    template = job.text("template")
    if plain or template in (None, "default"):
        if template is not None and not plain:
            job.not_carried["template"] = "the tokenizer's own is taken; data.chat_template: plain is the nearest"
    elif template in TEMPLATES:
        job.carry("template", "data.chat_template", template)
    elif not any(source.get("texts") for source in (*listed, *held_out)):
        reason = "the tokenizer's own chat template is taken, the folder's; data.chat_template names another, or a file"
        job.not_carried["template"] = reason
    if any(source.get("texts") for source in (*listed, *held_out)) and "data.chat_template" not in job.carried:
        wanted = ", ".join(TEMPLATES)
        job.refused["template"] = f"rows of texts go through data.chat_template: {wanted}; or write them as messages"


def _learnt(job: Job) -> None:
    """The tokens to learn, long rows and packing."""
    plain = job.values.get("stage") == "pt"
    everything, last = job.flag("train_on_prompt"), job.flag("mask_history")
    if everything or last:
        key = "train_on_prompt" if everything else "mask_history"
        job.carry(key, "data.loss_on", "all" if everything else "last_response")
    if everything and last:
        job.not_carried["mask_history"] = "train_on_prompt stands before it"
    packed, neat = job.flag("packing", default=plain), job.flag("neat_packing")
    key = "neat_packing" if neat else "packing"
    note = "documents of a row do not see each other, as with neat_packing" if packed and not (neat or plain) else ""
    job.carry(key, "data.packing", packed or neat, note)
    if plain:
        job.carry("stage", "data.too_long", "split", "stage pt cuts texts into rows")


def _described(job: Job, name: str, plain: bool) -> dict[str, Any]:
    """A data set that dataset_info.json describes, as a section of data.train."""
    info, folder = _info(job, name)
    entry = info.get(name)
    if not isinstance(entry, dict):
        known = shorten(", ".join(info), 300)
        raise job.wrong("dataset", f"names in {folder / INFO} ({known})", name)
    where = f"{INFO}: {shorten(name, 80)}"
    given = job.to_mapping(where, entry)
    hub, file = given.pop("hf_hub_url", None), given.pop("file_name", None)
    for key in ("ms_hub_url", "om_hub_url"):
        given.pop(key, None)
    if hub is None and file is None:
        job.refused[where] = "a data set has hf_hub_url or file_name"
    source: dict[str, Any] = {"path": hub or str(folder / str(file)), "name": given.pop("subset", None)}
    source["split"] = split = str(given.pop("split", "train"))
    if (number := given.pop("num_samples", None)) is not None:
        source["split"] = f"{split}[:{number}]"
    for key in ("script_url", "cloud_file_name", "folder"):
        if given.pop(key, None):
            job.refused[f"{where}.{key}"] = "a data set is a file, a folder or a name on the hub"
    form = given.pop("formatting", "alpaca")
    columns = job.to_texts(f"{where}.columns", given.pop("columns", {}))
    tags = job.to_texts(f"{where}.tags", given.pop("tags", {}))
    for key in ("images", "videos", "audios"):
        if columns.pop(key, None):
            job.refused[f"{where}.columns.{key}"] = "rows of text alone"
    said = answers(job, where, columns, form, bool(given.pop("ranking", False)))
    if said and form == "alpaca":
        source |= {"columns": prompt_of_texts(job, where, columns) | said, "texts": True}
    elif form == "alpaca":
        source["columns"] = _instruction(job, where, columns, plain)
    elif form in ("sharegpt", "openai"):
        found = _conversation(job, where, columns, tags, form)
        prompt = {"prompt" if said and name != "tools" else name: column for name, column in found.items()}
        source["columns"] = prompt | said
    else:
        job.refused[f"{where}.formatting"] = "alpaca, sharegpt and openai there are"
    for key in given:
        job.not_carried[f"{where}.{key}"] = "unknown to this import"
    return source


def _instruction(job: Job, where: str, columns: dict[str, str], plain: bool) -> dict[str, str]:
    prompt = columns.pop("prompt", "instruction")
    if plain:
        return {"text": prompt}
    for key in ("system", "history"):
        if columns.pop(key, None):
            job.refused[f"{where}.columns.{key}"] = "instructions have no such column: write the rows as messages"
    return {
        "instruction": prompt,
        "input": columns.pop("query", "input"),
        "output": columns.pop("response", "output"),
    }


def _conversation(job: Job, where: str, columns: dict[str, str], tags: dict[str, str], form: str) -> dict[str, str]:
    openai = form == "openai"
    keys = (
        tags.get("role_tag", "role" if openai else "from"),
        tags.get("content_tag", "content" if openai else "value"),
    )
    meaning = spelling(job, f"{where}.tags", *keys, {})
    if columns.pop("system", None):
        job.refused[f"{where}.columns.system"] = "the system message is one of the messages: put it there"
    roles = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}
    if differing := speakers_differ({tags[tag]: role for tag, role in roles.items() if tag in tags}):
        job.refused[f"{where}.tags"] = f"{', '.join(differing)} would be read as another role, or as none"
    found = {meaning: columns.pop("messages", "messages" if openai else "conversations")}
    if (tools := columns.pop("tools", None)) is not None:
        found["tools"] = tools
    return found


def _info(job: Job, name: str) -> tuple[dict[str, Any], Path]:
    """dataset_info.json and its folder: dataset_dir, from here or from the file's folder, or the file's folder."""
    given = job.text("dataset_dir")
    if given is not None:
        job.not_needed["dataset_dir"] = f"the paths of {INFO}'s files are in data.train"
    beside = job.file.parent
    for folder in (Path(given or "data"), beside / (given or "data"), beside):
        if (folder / INFO).is_file():
            try:
                info = strict_json.parse((folder / INFO).read_text(encoding="utf-8"))
            except ValueError as error:
                raise job.wrong("dataset", f"JSON in {folder / INFO} ({error})", name) from None
            if not isinstance(info, dict):
                raise job.wrong("dataset", f"an object in {folder / INFO}", info)
            return info, folder
    wanted = f"{INFO}, which describes it, in {given or 'data'} or beside the file"
    raise job.wrong("dataset", wanted, name)
