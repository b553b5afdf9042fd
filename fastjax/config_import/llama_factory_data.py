"""LLaMA-Factory's data sets, which dataset_info.json describes, their template, and the stages of preferences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert import strict_json
from convert.errors import shorten
from fastjax.config_import import shared
from fastjax.config_import.job import Job
from fastjax.config_import.reasons import REFERENCE
from fastjax.config_import.shared import PAIR
from fastjax.training.config.preferences import WITH_REFERENCE

INFO = "dataset_info.json"
#: Stages of preferences.
STAGES = ("dpo", "kto", "rm")
#: pref_loss, or stage kto → the loss here, and its arguments beside beta.
_LOSSES: dict[str, tuple[str, dict[str, tuple[str, float | None]]]] = {
    "sigmoid": ("dpo", {"label_smoothing": ("dpo_label_smoothing", None)}),
    "ipo": ("ipo", {}),
    "orpo": ("orpo", {}),
    "simpo": ("simpo", {"gamma": ("simpo_gamma", 0.5)}),
}
_BETA: dict[str, tuple[str, float | None]] = {"beta": ("pref_beta", 0.1)}
_WEIGHTS = {"desirable_weight": ("kto_chosen_weight", 1.0), "undesirable_weight": ("kto_rejected_weight", 1.0)}
#: The other stages of preferences → the same.
_STAGED: dict[str, tuple[str, Mapping[str, Any]]] = {"kto": ("kto", _WEIGHTS), "rm": ("reward", {})}


def preferences(job: Job) -> None:
    """The loss of preferences, and the lengths of answers."""
    stage = job.values.get("stage")
    if stage not in STAGES:
        return
    carry_preferences(job, stage)
    for key, only in (("pref_ftx", 0), ("pref_bco_weight", 0), ("ld_alpha", 1.0)):
        shared.wants(job, key, job.number(key), only, "no other loss is added to that of preferences")
    shared.wants(job, "ref_model", job.take("ref_model", str), None, REFERENCE)
    if "lora.adapter" in job.carried and job.carried["preferences.loss"].value in WITH_REFERENCE:
        reason = "the reference is the base there, and here the adapter to start from; merge it first"
        job.refused["adapter_name_or_path"] = f"{reason} (`fastjax convert merge`)"


def carry_preferences(job: Job, stage: str) -> None:
    """Carry the loss of a stage over, and the longest answer."""
    key, loss, arguments = "stage", *_STAGED.get(stage, ("dpo", {}))
    if stage == "dpo":
        key, (loss, arguments) = "pref_loss", _LOSSES[job.choose("pref_loss", _LOSSES, "sigmoid")]
    shared.carry_loss(job, key, loss, {} if loss == "reward" else {**_BETA, **arguments})
    shared.answer_length(job, "cutoff_len", 2048)


def data(job: Job) -> None:
    """Data sets, their template, and what is learnt of them."""
    plain = job.values.get("stage") == "pt"
    listed = [_described(job, name, plain) for name in job.names("dataset")]
    held_out = [_described(job, name, plain) for name in job.names("eval_dataset")]
    if not listed and not job.refused:
        raise job.wrong("dataset", "at least one data set", None)
    rows, streamed = job.integer("max_samples"), job.flag("streaming")
    for source in (*listed, *held_out):
        if rows is not None and source["split"].isalnum():
            source["split"] += f"[:{rows}]"
    mixtures = ("concat", "interleave_under", "interleave_over")
    strategy, shares = job.choose("mix_strategy", mixtures, "concat"), job.names("interleave_probs")
    if strategy != "concat":
        ends = "all_exhausted" if strategy == "interleave_over" else "first_exhausted"
        job.carry("mix_strategy", "data.mixture_ends", ends)
        weights = [job.to_number("interleave_probs", share) for share in shares or ["1"] * len(listed)]
        for source, weight in zip(listed, weights, strict=False):
            source["weight"] = weight
    listed = [source | {"streaming": streamed or None} for source in listed]
    shared.hold_out(job, "val_size", listed, named=bool(held_out))
    shared.write_data(job, "dataset" if rows is None else "dataset, max_samples", listed)
    if held_out:
        shared.write_data(job, "eval_dataset", held_out, "data.eval")
    _learnt(job, plain)
    template = job.take("template", str)
    texts = any(source.get("texts") for source in (*listed, *held_out))  # which need a template
    if template == "default" and not plain:
        job.not_carried["template"] = "the tokenizer's own is taken; data.chat_template: plain is the nearest"
    elif template is not None and not plain:
        shared.template(job, "template", template)
    if texts and "data.chat_template" not in job.carried:
        job.refused["template"] = "rows of texts go through data.chat_template, a name or a file, or are messages"


def _learnt(job: Job, plain: bool) -> None:
    """The tokens to learn, long rows and packing."""
    for key, tokens in (("mask_history", "last_response"), ("train_on_prompt", "all")):
        if job.flag(key):
            job.carry(key, "data.loss_on", tokens)
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
    given = job.checked(where, entry)
    hub, file, *_ = (given.pop(key, None) for key in ("hf_hub_url", "file_name", "ms_hub_url", "om_hub_url"))
    if hub is None and file is None:
        job.refused[where] = "a data set has hf_hub_url or file_name"
    source: dict[str, Any] = {"path": hub or str(folder / str(file)), "name": given.pop("subset", None)}
    source["split"] = str(given.pop("split", "train"))
    if (number := given.pop("num_samples", None)) is not None:
        source["split"] += f"[:{number}]"
    columns = job.checked(f"{where}.columns", given.pop("columns", {}), dict[str, str])
    tags = job.checked(f"{where}.tags", given.pop("tags", {}), dict[str, str])
    _refuse(job, where, given, "script_url cloud_file_name folder", "data are a file, a folder or a name on the hub")
    _refuse(job, f"{where}.columns", columns, "images videos audios", "rows of text alone")
    form = given.pop("formatting", "alpaca")
    answers = _answers(job, where, columns, form, bool(given.pop("ranking", False)))
    if form == "alpaca":
        source |= {"columns": _prompt(job, f"{where}.columns", columns, plain, answers), "texts": bool(answers)}
    elif form in ("sharegpt", "openai"):
        texts = _conversation(job, where, columns, tags, form)
        asks = "prompt" if answers.keys() >= PAIR.keys() else "messages"
        aside = ("tools", "system")
        prompt = {asks if answers and name not in aside else name: column for name, column in texts.items()}
        source["columns"] = prompt | answers
    else:
        job.refused[f"{where}.formatting"] = "alpaca, sharegpt and openai there are"
    job.not_carried |= {f"{where}.{key}": "unknown to this import" for key in given}
    return source


def _refuse(job: Job, where: str, given: dict[str, Any], keys: str, why: str) -> None:
    """Refuse keys that are not off; they are removed from `given`."""
    job.refused |= {f"{where}.{key}": why for key in keys.split() if given.pop(key, None)}


def _answers(job: Job, where: str, columns: dict[str, str], form: str, ranking: bool) -> dict[str, str]:
    """The columns of a data set's answers, which are removed from `columns`; empty: it has no preferences."""
    stage, tag = job.values.get("stage"), columns.pop("kto_tag", None)
    pair = {name: columns.pop(name, name) for name in PAIR}
    wanted = ("dpo", "rm") if ranking else ("kto",)
    if not ranking and tag is None:
        if stage in STAGES:
            job.refused[where] = "stages dpo and rm take rows with ranking: true, stage kto those with columns.kto_tag"
        return {}
    if stage not in wanted:
        job.refused[where] = f"rows of preferences are for stage {' or '.join(wanted)}"
    if ranking:
        return pair
    return {"label": tag or ""} | ({"completion": columns.pop("response", "output")} if form == "alpaca" else {})


def _prompt(job: Job, where: str, columns: dict[str, str], plain: bool, answers: dict[str, str]) -> dict[str, str]:
    """The columns of texts, instructions or preferences."""
    prompt = columns.pop("prompt", "instruction")
    if plain:
        return {"text": prompt}
    if answers:
        _refuse(job, where, columns, "history query", "preferences have one column for the prompt: write all there")
        named = {"prompt": prompt, **answers}
    else:
        usual = {"input": columns.pop("query", "input"), "output": columns.pop("response", "output")}
        named = {"instruction": prompt, **usual}
    return named | {name: columns.pop(name) for name in ("system", "history") if name in columns}


def _conversation(job: Job, where: str, columns: dict[str, str], tags: dict[str, str], form: str) -> dict[str, str]:
    usual = ("messages", "role", "content") if form == "openai" else ("conversations", "from", "value")
    meaning = shared.spelling(job, f"{where}.tags", tags.get("role_tag", usual[1]), tags.get("content_tag", usual[2]))
    roles = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}
    shared.check_speakers(job, f"{where}.tags", {tags[tag]: role for tag, role in roles.items() if tag in tags})
    named = {meaning: columns.pop("messages", usual[0])}
    return named | {name: columns.pop(name) for name in ("tools", "system") if name in columns}


def _info(job: Job, name: str) -> tuple[dict[str, Any], Path]:
    """dataset_info.json and its folder: dataset_dir, from here or from the file's folder, or the file's folder."""
    given = job.take("dataset_dir", str)
    if given is not None:
        job.not_needed["dataset_dir"] = f"the paths of {INFO}'s files are in data.train"
    beside = job.file.parent
    if given is not None and given.startswith(("REMOTE:", "ONLINE")):
        raise job.wrong("dataset_dir", f"a folder: fetch {INFO} from the hub, and name its folder", given)
    for folder in (Path(given or "data"), beside / (given or "data"), beside):
        if (folder / INFO).is_file():
            return shared.described(job, "dataset", folder / INFO, strict_json.parse), folder
    raise job.wrong("dataset", f"{INFO}, which describes it, in {given or 'data'} or beside the file", name)
