"""Axolotl's data sets, by the types of their rows, and their chat template."""

from pathlib import Path
from typing import Any

from fastjax.config_import import axolotl_preferences
from fastjax.config_import.common import TEMPLATES, hold_out, write_data
from fastjax.config_import.job import Job
from fastjax.config_import.preferences import ONE_TEMPLATE, spelling
from fastjax.data.columns import SHAREGPT_ROLES


def data(job: Job) -> None:
    """Data sets, their template, and what is learnt of them."""
    listed = [_source(job, f"datasets[{n}]", item) for n, item in enumerate(job.listed("datasets"))]
    single = isinstance(job.values.get("pretraining_dataset"), str | dict)
    streamed = [job.take("pretraining_dataset")] if single else job.listed("pretraining_dataset")
    listed += [_pretraining(job, f"pretraining_dataset[{n}]", item) for n, item in enumerate(streamed)]
    if not listed and not job.refused:
        raise job.wrong("datasets", "at least one data set", None)
    held_out = [_source(job, f"test_datasets[{n}]", item) for n, item in enumerate(job.listed("test_datasets"))]
    chats = [source for source in (*listed, *held_out) if source["kind"] != "text"]
    roles = {tuple(source.pop("learnt", ("assistant",))) for source in chats}
    kinds = {source.pop("kind") for source in listed}
    _template(job, kinds | {source.pop("kind") for source in held_out})
    if held_out:
        write_data(job, "test_datasets", held_out, "data.eval")
    hold_out(job, "val_set_size", listed, named=bool(held_out))
    if listed:
        write_data(job, "datasets" if "datasets" in job.taken else "pretraining_dataset", listed)
    if len(roles) > 1:
        job.refused["datasets[].roles_to_train"] = "data.loss_on holds for all data sets"
    if job.flag("train_on_inputs"):
        job.carry("train_on_inputs", "data.loss_on", "all")
    elif roles - {("assistant",)}:
        job.carry("datasets[].roles_to_train", "data.loss_on", list(roles.pop()))
    too_long = job.text("excess_length_strategy") or ("split" if kinds == {"text"} else "drop")
    if too_long == "raise":
        job.refused["excess_length_strategy"] = "data.too_long has truncate, split and drop"
    job.carry("excess_length_strategy", "data.too_long", too_long)
    packed = job.flag("sample_packing", default=bool(streamed))
    job.carry("sample_packing", "data.packing", packed)


#: Kinds of preferences whose rows do not go through the chat template that the file names.
_OWN = frozenset((*axolotl_preferences.OWN_TEMPLATES, "texts"))


def _template(job: Job, kinds: set[str]) -> None:
    name, file = job.text("chat_template"), job.text("chat_template_jinja")
    inner = {str(item["chat_template"]) for item in job.values.get("datasets") or [] if item.get("chat_template")}
    if len(inner | ({name} - {None})) > 1:
        job.refused["datasets[].chat_template"] = ONE_TEMPLATE
    name = name or (inner.pop() if inner else None)
    if file is not None:
        if not Path(file).is_file():
            job.refused["chat_template_jinja"] = "data.chat_template takes a file: save the template and name the file"
        job.carry("chat_template_jinja", "data.chat_template", file)
        job.not_needed["chat_template"] = "chat_template_jinja is it"
    elif kinds & _OWN and len(kinds) > 1:
        job.refused["datasets[].type"] = ONE_TEMPLATE
    elif kinds & _OWN:
        (kind,) = kinds
        if kind != "texts":
            job.carry("datasets[].type", "data.chat_template", kind)
        if name is not None:
            job.not_needed["chat_template"] = "rows of these types do not go through it"
    elif kinds == {"instruction"}:
        job.carry("datasets[].type", "data.chat_template", "alpaca")
        if name is not None:
            job.not_needed["chat_template"] = "rows of type alpaca do not go through it"
    elif name in TEMPLATES:
        job.carry("chat_template", "data.chat_template", name)
    elif name == "tokenizer_default":
        job.not_needed["chat_template"] = "data.chat_template: null is the tokenizer's own"
    elif name is not None:
        job.not_carried["chat_template"] = "the tokenizer's own is taken; data.chat_template names another, or a file"
    if "instruction" in kinds and kinds != {"instruction"}:
        job.not_carried["datasets[].type"] = f"alpaca's wording: {ONE_TEMPLATE}"


#: Keys of a data set that change nothing, or name what others here say.
_IDLE = ("ds_type", "preprocess_shards", "trust_remote_code", "conversation", "input_format", "chat_template")
#: Keys of a data set whose values have one meaning here → that value.
_FIXED: dict[str, tuple[Any, ...]] = {
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "message_field_training": ("train", "weight"),
    "drop_system_message": (False,),
    "template_thinking_key": ("reasoning_content",),
    "field_thinking": ("reasoning_content",),
    "split_thinking": (False,),
}


def _source(job: Job, where: str, item: Any) -> dict[str, Any]:
    """A data set as a section of data.train, and the kind of its rows."""
    given = job.to_mapping(where, item)
    source: dict[str, Any] = {"path": given.pop("path", None), "name": given.pop("name", None)}
    if not isinstance(source["path"], str):
        raise job.wrong(f"{where}.path", "a string", source["path"])
    files = given.pop("data_files", None)
    if files is not None:
        one = isinstance(files, str) or (isinstance(files, list) and len(files) == 1)
        if source["path"] not in ("json", "csv", "parquet") or not one:
            job.refused[f"{where}.data_files"] = "a data set is a file, a glob pattern or a name: name each as its path"
        else:
            source["path"] = files if isinstance(files, str) else files[0]
    if given.get("ds_type") in ("text", "arrow"):
        job.refused[f"{where}.ds_type"] = "files are JSON, CSV or parquet"
    source["split"] = str(given.pop("split", "train"))
    source |= _columns(job, where, given)
    for key, value in given.items():
        if key in _FIXED and value not in _FIXED[key]:
            job.refused[f"{where}.{key}"] = f"only {str(_FIXED[key][0]).lower()} there is"
        elif key in ("shards", "shards_idx"):
            job.refused[f"{where}.{key}"] = 'a part of the data is its split: "train[:10%]"'
        elif key not in _FIXED and key not in _IDLE:
            job.not_carried[f"{where}.{key}"] = "unknown to this import"
    return source


def _columns(job: Job, where: str, given: dict[str, Any]) -> dict[str, Any]:
    """The kind of a data set's rows and their columns, whose keys are removed from `given`."""
    if job.values.get("rl") is not None:
        return axolotl_preferences.columns(job, where, given)
    kind = given.pop("type", None)
    if isinstance(kind, dict):
        return _own_instructions(job, where, job.to_mapping(f"{where}.type", kind))
    if kind == "completion":
        return {"kind": "text", "columns": {"text": given.pop("field", "text")}}
    if kind == "alpaca":
        return {"kind": "instruction", "columns": {name: name for name in ("instruction", "input", "output")}}
    if kind not in ("chat_template", "chat_template.default", "sharegpt"):
        job.refused[f"{where}.type"] = f"{kind} is not supported; chat_template, alpaca, completion or fields there are"
        return {"kind": "chat"}
    names = job.to_texts(f"{where}.message_property_mappings", given.pop("message_property_mappings", {}))
    old = kind == "sharegpt"
    role = given.pop("message_field_role", None) or names.pop("role", "from" if old else "role")
    content = given.pop("message_field_content", None) or names.pop("content", "value" if old else "content")
    column = given.pop("field_messages", None) or ("conversations" if old else "messages")
    meaning = spelling(job, f"{where}.message_property_mappings", role, content, names)
    axolotl_preferences.check_roles(job, where, given.pop("roles", {}))
    learnt = given.pop("roles_to_train", ["assistant"])
    told = [SHAREGPT_ROLES.get(str(name)) for name in learnt] if isinstance(learnt, list) else []
    if not told or None in told:
        job.refused[f"{where}.roles_to_train"] = f"expected some of {', '.join(SHAREGPT_ROLES)}"
    columns = {meaning: column}
    if (tools := given.pop("field_tools", None)) is not None:
        columns["tools"] = tools
    return {"kind": "chat", "columns": columns, "learnt": sorted(set(filter(None, told)))}


def _own_instructions(job: Job, where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A data set of instructions whose type lists its columns."""
    columns = {name: fields.get(f"field_{name}") or name for name in ("instruction", "input", "output")}
    for key in ("system_prompt", "system_format", "field_system", "format", "no_input_format"):
        if fields.get(key):
            job.refused[f"{where}.type.{key}"] = (
                "rows go through a chat template: data.chat_template takes a Jinja file"
            )
    return {"kind": "chat", "columns": columns}


def _pretraining(job: Job, where: str, item: Any) -> dict[str, Any]:
    """A data set of plain text that is streamed."""
    given = {"path": item} if isinstance(item, str) else job.to_mapping(where, item)
    source = {key: given.pop(key) for key in ("path", "name") if key in given}
    source["split"] = str(given.pop("split", "train"))
    source |= {"kind": "text", "streaming": True, "columns": {"text": given.pop("text_column", "text")}}
    if given.pop("type", "pretrain") not in ("pretrain", "completion"):
        job.refused[f"{where}.type"] = "pretraining reads plain text"
    for key in given:
        job.not_carried[f"{where}.{key}"] = "unknown to this import"
    return source
