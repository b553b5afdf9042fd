"""Axolotl's data sets, by the types of their rows, their chat template, and the loss of preferences (TRL's)."""

from pathlib import Path
from typing import Any

from convert.errors import shorten
from fastjax.config_import import shared
from fastjax.config_import.job import Job
from fastjax.config_import.reasons import NO_RL
from fastjax.config_import.shared import LOSSES, ONE_TEMPLATE, PAIR
from fastjax.data.columns import SHAREGPT_ROLES
from fastjax.data.template import REASONING
from fastjax.training.config.preferences import WITH_REFERENCE

_INSTRUCTION = ("instruction", "input", "output")
_ALPACA = {name: name for name in _INSTRUCTION}
_QUESTION = {"instruction": "question", "output": "answer"}
#: A type of instructions → their columns, and the chat template with its wording, or one that is near.
_INSTRUCTIONS: dict[str, tuple[dict[str, str], str]] = {
    **dict.fromkeys(("alpaca", "alpaca_instruct", "alpaca:instruct"), (_ALPACA, "alpaca")),
    **dict.fromkeys(("alpaca:chat", "alpaca_chat", "alpaca_chat.load"), (_ALPACA, "vicuna")),
    **{"alpaca:phi": (_ALPACA, "phi-3"), "alpaca:chatml": (_ALPACA, "chatml")},
    **{"alpaca_chat.load_qa": (_QUESTION, "vicuna"), "gpteacher": (_ALPACA | {"output": "response"}, "alpaca")},
    "alpaca_w_system.load": (_ALPACA | {"system": "system"}, "alpaca"),
    "alpaca_w_system.load_open_orca": (_QUESTION | {"output": "response", "system": "system_prompt"}, "alpaca"),
}
_KNOWN = ("chat_template", "sharegpt", "completion", *_INSTRUCTIONS)
#: Second part of a type of pairs → the column of the prompt; None: it is what both answers begin with.
_PAIRS: dict[str, str | None] = {
    **{"argilla": "instruction", "argilla_chat": None, "icr": "input", "intel": "question"},
    **{"prompt_pairs": "prompt", "ultra": "prompt"},
}
#: Those of single answers.
_SINGLE = {form: prompt for form, prompt in _PAIRS.items() if form not in ("argilla_chat", "icr")}
#: First part of such a type, which brings a chat template of its own.
_OWN_TEMPLATES = ("chatml", "llama3")
#: Types of messages with two answers → the default column of their prompt; None as in `_PAIRS`.
_MESSAGES = {
    **dict.fromkeys(("chat_template", "chat_template.default"), "messages"),
    **{"chat_template.argilla": "prompt", "chat_template.argilla_chat": None},
}
#: A type of a reward model's pairs → the kind of its rows.
_REWARDS = {"bradley_terry.chat_template": "chat", "bradley_terry.llama3": "llama3"}
#: Loss → its arguments: the keys, and TRL's defaults.
_ARGUMENTS: dict[str, dict[str, tuple[str, float | None]]] = {
    "dpo": {"label_smoothing": ("dpo_label_smoothing", None)},
    "kto": {f"{kind}_weight": (f"kto_{kind}_weight", 1.0) for kind in ("desirable", "undesirable")},
    "simpo": {"gamma": ("simpo_gamma", 0.5)},
    "reward": {"center_rewards_coefficient": ("center_rewards_coefficient", None)},
}
#: Keys of a data set that change nothing, or name what others here say.
_IDLE = ("ds_type", "preprocess_shards", "trust_remote_code", "conversation", "input_format", "chat_template")
#: Keys of a data set whose values have one meaning here → that value.
_FIXED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("train_on_eos", "train_on_eot"), ("turn",)),
    **dict.fromkeys(("template_thinking_key", "field_thinking"), REASONING),
    **{"message_field_training": ("train", "weight"), "split_thinking": (False,), "drop_system_message": (True, False)},
}


def preferences(job: Job) -> None:
    """The loss with its settings, and the lengths of answers; defaults are TRL's."""
    loss = job.take("rl", str)
    if loss is None and job.flag("reward_model"):
        shared.carry_loss(job, "reward_model", "reward", _ARGUMENTS["reward"])
        shared.wants(job, "num_labels", job.integer("num_labels"), 1, "a reward model has one score")
        shared.answer_length(job, "sequence_len", 512)
    elif loss is not None and job.flag("reward_model"):
        job.refused["reward_model"] = "rl names another loss"
    if loss is None or job.choose("rl", LOSSES, "", NO_RL) == "":
        return
    shared.carry_loss(job, "rl", loss, _ARGUMENTS.get(loss, {}))
    given = {key: value for key in ("trl.beta", "rl_beta", "orpo_alpha") if (value := job.number(key)) is not None}
    used, beta = next(iter(given.items()), ("rl_beta", 0.1))
    job.carry(used, "preferences.beta", beta)
    job.not_carried |= {key: f"{used} stands before it" for key in given if key != used}
    job.not_carried |= {f"trl.{key}": "of GRPO" for key in job.mapping("trl") if key != "beta"}
    if loss == "orpo":
        job.carry("rl", "preferences.nll_tokens", "all", "the first term over prompts too, as in TRL")
    if loss == "simpo":
        if job.number("cpo_alpha") == 0:
            job.not_needed["cpo_alpha"] = "SimPO alone, as here"
        else:
            job.refused["cpo_alpha"] = "by it, or by its default of 1, cross-entropy is added; only 0 there is"
    once = "preferences.precompute_ref_log_probs"
    if loss in WITH_REFERENCE and job.flag("precompute_ref_log_probs") and once not in job.carried:
        job.carry("precompute_ref_log_probs", once, True)
    shared.answer_length(job, "sequence_len", 512)


def data(job: Job) -> None:
    """Data sets, their template, and what is learnt of them."""
    whole, streamed = _sources(job, "datasets"), _sources(job, "pretraining_dataset")
    rows_streamed = job.flag("streaming") or None
    listed = [source | {"streaming": rows_streamed} for source in whole]
    listed += [source | {"streaming": True} for source in streamed]
    if not listed and not job.refused:
        raise job.wrong("datasets", "at least one data set", None)
    held_out = _sources(job, "test_datasets")
    roles = {source.get("learnt", ("assistant",)) for source in (*listed, *held_out) if source["kind"] != "text"}
    kinds = {source["kind"] for source in listed}
    _template(job, [*listed, *held_out])
    if held_out:
        shared.write_data(job, "test_datasets", held_out, "data.eval")
    shared.hold_out(job, "val_set_size", listed, named=bool(held_out))
    if listed:
        shared.write_data(job, "datasets" if "datasets" in job.taken else "pretraining_dataset", listed)
    if len(roles) > 1:
        job.refused["datasets[].roles_to_train"] = "data.loss_on holds for all data sets"
    if job.flag("train_on_inputs"):
        job.carry("train_on_inputs", "data.loss_on", "all")
    elif roles - {("assistant",)}:
        job.carry("datasets[].roles_to_train", "data.loss_on", list(roles.pop()))
    usual = "split" if kinds == {"text"} else "drop"
    too_long = job.choose("excess_length_strategy", ("truncate", "split", "drop"), usual)
    job.carry("excess_length_strategy", "data.too_long", too_long)
    job.carry("sample_packing", "data.packing", job.flag("sample_packing", default=bool(streamed)))


def _template(job: Job, sources: list[dict[str, Any]]) -> None:
    kinds, styles = {source["kind"] for source in sources}, {source.get("style") for source in sources}
    name, file = job.take("chat_template", str), job.take("chat_template_jinja", str)
    inner = {str(item["chat_template"]) for item in job.values.get("datasets") or [] if item.get("chat_template")}
    if len(inner | ({name} - {None})) > 1:
        job.refused["datasets[].chat_template"] = ONE_TEMPLATE
    name = name or (inner.pop() if inner else None)
    passed_by = kinds & {*_OWN_TEMPLATES, "texts", "instruction"}  # rows that do not go through that template
    if file is not None:
        if not Path(file).is_file():
            job.refused["chat_template_jinja"] = "data.chat_template takes a file: save the template and name the file"
        job.carry("chat_template_jinja", "data.chat_template", file)
        job.not_needed["chat_template"] = "chat_template_jinja is it"
    elif passed_by - {"instruction"} and len(kinds) > 1:
        job.refused["datasets[].type"] = ONE_TEMPLATE
    elif passed_by and passed_by == kinds:
        (kind,) = kinds
        style = (shared.named_template(str(styles.pop())) if len(styles) == 1 else None) or "alpaca"
        if kind != "texts":
            job.carry("datasets[].type", "data.chat_template", style if kind == "instruction" else kind)
        if styles - {style}:
            job.not_carried["datasets[].type"] = f"its wording: {style}'s is taken; data.chat_template takes a file"
        if name is not None:
            job.not_needed["chat_template"] = "rows of these types do not go through it"
    elif name is not None:
        shared.template(job, "chat_template", name)
    if "instruction" in kinds and kinds != {"instruction"}:
        job.not_carried["datasets[].type"] = f"alpaca's wording: {ONE_TEMPLATE}"


def _sources(job: Job, key: str) -> list[dict[str, Any]]:
    """Data sets as sections of data.train, each with the kind of its rows and the roles that are learnt."""
    plain = key == "pretraining_dataset"
    items = job.take(key, list | str | dict[str, Any] if plain else list) or []
    found = []
    for number, item in enumerate(items if isinstance(items, list) else [items]):
        given = {"path": item} if plain and isinstance(item, str) else job.checked(f"{key}[{number}]", item)
        if plain and given.pop("type", "pretrain") not in ("pretrain", "completion"):
            job.refused[f"{key}[{number}].type"] = "pretraining reads plain text"
        text = {"type": "completion", "field": given.pop("text_column", "text")} if plain else {}
        found += _source(job, f"{key}[{number}]", given | text)
    return found


def _source(job: Job, where: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    path = job.checked(f"{where}.path", given.pop("path", None), str)
    files = job.checked(f"{where}.data_files", given.pop("data_files", None), list[str] | str | None)
    source = {"path": path, "name": given.pop("name", None)}
    if given.get("ds_type") in ("text", "arrow"):
        job.refused[f"{where}.ds_type"] = "files are JSON, CSV or parquet"
    source["split"] = str(given.pop("split", "train"))
    plain = "preferences.loss" not in job.carried and job.values.get("rl") is None
    source |= (_columns if plain else _preference_columns)(job, where, given)
    for key, value in given.items():
        if key in _FIXED and value not in _FIXED[key]:
            job.refused[f"{where}.{key}"] = f"only {str(_FIXED[key][0]).lower()} there is"
        elif key in ("shards", "shards_idx"):
            job.refused[f"{where}.{key}"] = 'a part of the data is its split: "train[:10%]"'
        elif key == "drop_system_message" and value:
            job.not_carried[f"{where}.{key}"] = "system messages stay; take them out of the rows"
        elif key not in (*_FIXED, *_IDLE):
            job.not_carried[f"{where}.{key}"] = "unknown to this import"
    return shared.with_files(source, files)


def _columns(job: Job, where: str, given: dict[str, Any]) -> dict[str, Any]:
    """The kind of a data set's rows and their columns, whose keys are removed from `given`."""
    kind = given.pop("type", None)
    if isinstance(kind, dict):
        for key in filter(kind.get, ("system_prompt", "system_format", "format", "no_input_format")):
            job.refused[f"{where}.type.{key}"] = "rows go through data.chat_template, which takes a Jinja file"
        named = {name: kind.get(f"field_{name}") or name for name in _INSTRUCTION}
        system = {"system": kind["field_system"]} if kind.get("field_system") else {}
        return {"kind": "chat", "columns": named | system}
    if kind == "completion":
        return {"kind": "text", "columns": {"text": given.pop("field", "text")}}
    if kind is None:
        return {"kind": "tokens", "columns": {"input_ids": "input_ids"}}
    if kind in _INSTRUCTIONS:
        columns, style = _INSTRUCTIONS[kind]
        return {"kind": "instruction", "style": style, "columns": columns}
    if kind not in ("chat_template", "chat_template.default", "sharegpt"):
        job.refused[f"{where}.type"] = f"{kind} is not supported; {', '.join(_KNOWN)} or fields there are"
        return {"kind": "chat"}
    usual = ("conversations", "from", "value") if kind == "sharegpt" else ("messages", "role", "content")
    columns = {_speech(job, where, given, *usual[1:]): given.pop("field_messages", None) or usual[0]}
    learnt = given.pop("roles_to_train", ["assistant"])
    roles = [SHAREGPT_ROLES.get(str(name)) for name in learnt] if isinstance(learnt, list) else []
    if not roles or None in roles:
        job.refused[f"{where}.roles_to_train"] = f"expected some of {', '.join(SHAREGPT_ROLES)}"
    if (tools := given.pop("field_tools", None)) is not None:
        columns["tools"] = tools
    return {"kind": "chat", "columns": columns, "learnt": tuple(sorted(set(filter(None, roles))))}


def _speech(job: Job, where: str, given: dict[str, Any], role: str, content: str) -> str:
    """The meaning of a column of messages, whose parts are named so unless `given` says otherwise."""
    key = f"{where}.message_property_mappings"
    names = job.checked(key, given.pop("message_property_mappings", {}), dict[str, str])
    role = given.pop("message_field_role", None) or names.pop("role", role)
    content = given.pop("message_field_content", None) or names.pop("content", content)
    meaning = shared.spelling(job, key, role, content, names)
    roles = job.checked(f"{where}.roles", given.pop("roles", {}))
    listed = {role: names if isinstance(names, list) else [names] for role, names in roles.items()}
    shared.check_speakers(job, f"{where}.roles", {str(name): role for role, names in listed.items() for name in names})
    return meaning


def _preference_columns(job: Job, where: str, given: dict[str, Any]) -> dict[str, Any]:
    """The kind and the columns of a data set of preferences; their keys are removed from `given`."""
    kind, single = given.pop("type", None), job.values.get("rl") == "kto"
    if isinstance(kind, dict):  # texts, whose columns it lists
        kind = job.checked(f"{where}.type", kind)
        names = ("prompt", "completion", "label") if single else ("prompt", *PAIR)
        for key, only in {**{f"{name}_format": f"{{{name}}}" for name in names}, "field_system": None}.items():
            shared.wants(job, f"{where}.type.{key}", kind.pop(key, None), only, "texts are as they are")
        columns = job.checked(where, {name: kind.pop(f"field_{name}", None) or name for name in names}, dict[str, str])
        job.not_carried |= {f"{where}.type.{key}": "unknown to this import" for key in kind}
        return {"kind": "texts", "columns": columns}
    prompts, messages = (_SINGLE, {}) if single else (_PAIRS, _MESSAGES)
    template = next((name for name in _OWN_TEMPLATES if str(kind).startswith(f"{name}.")), None)
    if template and (form := str(kind).removeprefix(f"{template}.")) in prompts:
        answers = {"completion": "completion", "label": "label"} if single else PAIR
        if form == "argilla" and not single:
            answers = {name: f"{name}_response" for name in PAIR}
        prompt = {} if prompts[form] is None else {"prompt": prompts[form]}
        return {"kind": template, "columns": prompt | answers}
    if (style := _REWARDS.get(str(kind))) is not None and job.flag("reward_model"):
        return {"kind": style, "columns": {"prompt": "input", **PAIR}}
    if isinstance(kind, str) and kind in messages:
        _speech(job, where, given, "role", "content")
        fields = {name: given.pop(f"field_{name}", name) for name in (messages[kind], *PAIR) if name is not None}
        fields = job.checked(where, fields, dict[str, str])
        columns = {"prompt" if name == messages[kind] else name: column for name, column in fields.items()}
        return {"kind": "chat", "columns": columns}
    known = ", ".join([*(f"{template}.{form}" for template in _OWN_TEMPLATES for form in prompts), *messages])
    reason = f"is not supported with rl: {shorten(str(job.values.get('rl')), 80)}; {known} and fields there are"
    job.refused[f"{where}.type"] = f"{shorten(str(kind), 80)} {reason}"
    return {"kind": "chat"}
