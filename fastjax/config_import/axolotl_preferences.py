"""Axolotl's runs over preferences: the loss, which TRL computes, and data sets by the types of their rows."""

from typing import Any

from convert.errors import shorten
from fastjax.config_import.common import speakers_differ
from fastjax.config_import.job import Job
from fastjax.config_import.preferences import (
    LOSSES,
    NO_RL,
    PAIR,
    SYSTEM,
    answer_length,
    carry_loss,
    no_dropout,
    spelling,
    wants,
)
from fastjax.training.config.preferences import WITH_REFERENCE

#: Types' second part → the columns of their pairs.
_PAIRS: dict[str, dict[str, str]] = {
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "argilla_chat": PAIR,
    "icr": {"prompt": "input", **PAIR},
    "intel": {"prompt": "question", **PAIR},
    "prompt_pairs": {"prompt": "prompt", **PAIR},
    "ultra": {"prompt": "prompt", **PAIR},
}
#: Likewise → the columns of their single answers.
_SINGLE = {
    name: {"prompt": prompt, "completion": "completion", "label": "label"}
    for name, prompt in (
        ("argilla", "instruction"),
        ("intel", "question"),
        ("prompt_pairs", "prompt"),
        ("ultra", "prompt"),
    )
}
#: Types' first part, where it brings a chat template of its own.
OWN_TEMPLATES = ("chatml", "llama3")
#: Types of messages → the default column of their prompt; None: it is what both answers begin with.
_MESSAGES = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "chat_template.argilla": "prompt",
    "chat_template.argilla_chat": None,
}


#: Loss → its arguments: the keys, and TRL's defaults.
_ARGUMENTS: dict[str, dict[str, tuple[str, float | None]]] = {
    "dpo": {"label_smoothing": ("dpo_label_smoothing", None)},
    "kto": {f"{kind}_weight": (f"kto_{kind}_weight", 1.0) for kind in ("desirable", "undesirable")},
    "simpo": {"gamma": ("simpo_gamma", 0.5)},
}


def preferences(job: Job) -> None:
    """The loss with its settings, and the lengths of answers; defaults are TRL's."""
    loss = job.text("rl")
    if loss is None:
        return
    if loss not in LOSSES:
        job.refused["rl"] = f"{shorten(loss, 80)}: {NO_RL}"
        return
    carry_loss(job, "rl", loss, _ARGUMENTS.get(loss, {}))
    _beta(job)
    if loss == "orpo":
        job.carry("rl", "preferences.nll_tokens", "all", "the first term over prompts too, as in TRL")
    if loss == "simpo":
        if job.number("cpo_alpha") == 0:
            job.not_needed["cpo_alpha"] = "SimPO alone, as here"
        else:
            job.refused["cpo_alpha"] = "by it, or by its default of 1, cross-entropy is added; only 0 there is"
    if loss in WITH_REFERENCE and job.flag("precompute_ref_log_probs"):
        job.carry("precompute_ref_log_probs", "preferences.precompute_ref_log_probs", True)
    answer_length(job, "sequence_len", 512)
    no_dropout(job, "lora_dropout")


def _beta(job: Job) -> None:
    given = {"trl.beta": job.mapping("trl").pop("beta", None), "rl_beta": job.number("rl_beta")}
    given["orpo_alpha"] = job.number("orpo_alpha")
    used = next((key for key, value in given.items() if value is not None), "rl_beta")
    beta = given[used]
    job.carry(used, "preferences.beta", 0.1 if beta is None else job.to_number(used, beta))
    for key, value in given.items():
        if value is not None and key != used:
            job.not_carried[key] = f"{used} stands before it"
    for key in job.mapping("trl"):
        if key != "beta":
            job.not_carried[f"trl.{key}"] = "of GRPO"


def columns(job: Job, where: str, given: dict[str, Any]) -> dict[str, Any]:
    """The kind of a data set's rows and their columns, whose keys are removed from `given`."""
    kind, single = given.pop("type", None), job.values.get("rl") == "kto"
    if isinstance(kind, dict):
        return _own_texts(job, where, job.to_mapping(f"{where}.type", kind), single)
    forms, messages = (_SINGLE, {}) if single else (_PAIRS, _MESSAGES)
    for template in OWN_TEMPLATES:
        for form, found in forms.items():
            if kind == f"{template}.{form}":
                if "prompt" in found:
                    job.not_carried[f"{where}.type"] = SYSTEM
                return {"kind": template, "columns": dict(found)}
    if isinstance(kind, str) and kind in messages:
        return {"kind": "chat", "columns": _conversation(job, where, given, messages[kind])}
    known = ", ".join([*(f"chatml.{form}" for form in forms), *(f"llama3.{form}" for form in forms), *messages])
    job.refused[f"{where}.type"] = (
        f"{shorten(str(kind), 80)} is not supported with rl: {shorten(str(job.values['rl']), 80)}; {known} and fields "
        "there are"
    )
    return {"kind": "chat"}


def _conversation(job: Job, where: str, given: dict[str, Any], prompt: str | None) -> dict[str, str]:
    """Columns of messages, of which an answer is the last."""
    names = job.to_texts(f"{where}.message_property_mappings", given.pop("message_property_mappings", {}))
    own = f"{where}.message_property_mappings"
    spelling(job, own, names.pop("role", "role"), names.pop("content", "content"), names)
    check_roles(job, where, given.pop("roles", {}))
    told = {name: given.pop(f"field_{name}", None) for name in ("messages", *PAIR) if name in (prompt, *PAIR)}
    texts = job.to_texts(where, {name: value for name, value in told.items() if value is not None})
    found = {name: texts.get(name, name) for name in PAIR}
    return found if prompt is None else {"prompt": texts.get(prompt, prompt), **found}


def check_roles(job: Job, where: str, roles: Any) -> None:
    """Refuse names of speakers that would be read as another role than a data set's `roles` says, or as none."""
    told = job.to_mapping(f"{where}.roles", roles)
    named = {
        str(name): role for role, listed in told.items() for name in (listed if isinstance(listed, list) else [listed])
    }
    if differing := speakers_differ(named):
        job.refused[f"{where}.roles"] = f"{', '.join(differing)} would be read as another role, or as none"


def _own_texts(job: Job, where: str, fields: dict[str, Any], single: bool) -> dict[str, Any]:
    """A data set of texts whose type lists its columns."""
    names = ("prompt", "completion", "label") if single else ("prompt", *PAIR)
    given = dict(fields)
    for name in names:
        own = given.pop(f"{name}_format", None)
        wants(job, f"{where}.type.{name}_format", own, f"{{{name}}}", "texts are as they are")
    wants(job, f"{where}.type.field_system", given.pop("field_system", None), None, SYSTEM)
    found = {name: given.pop(f"field_{name}", None) or name for name in names}
    for key in given:
        job.not_carried[f"{where}.type.{key}"] = "unknown to this import"
    return {"kind": "texts", "columns": job.to_texts(f"{where}.type", found)}
