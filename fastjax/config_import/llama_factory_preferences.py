"""LLaMA-Factory's stages `dpo` and `kto`: the loss with its settings, and ranked or labelled data sets."""

from convert.errors import shorten
from fastjax.config_import.job import Job
from fastjax.config_import.preferences import PAIR, REFERENCE, answer_length, no_dropout, wants
from fastjax.training.config.preferences import WITH_REFERENCE

STAGES = ("dpo", "kto")
#: pref_loss → the loss here.
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_SUM = "no other loss is added to that of preferences"


def preferences(job: Job) -> None:
    """The loss, and the lengths of answers."""
    stage = job.values.get("stage")
    if stage not in STAGES:
        return
    beta = job.number("pref_beta")
    if stage == "kto":
        job.carry("stage", "preferences.loss", "kto")
        for key, setting in (("kto_chosen_weight", "desirable"), ("kto_rejected_weight", "undesirable")):
            weight = job.number(key)
            job.carry(key, f"preferences.{setting}_weight", 1.0 if weight is None else weight)
    else:
        job.not_needed["stage"] = "preferences.loss says it"
        name = job.text("pref_loss") or "sigmoid"
        if name not in _LOSSES:
            job.refused["pref_loss"] = f"{shorten(name, 80)}: {', '.join(_LOSSES)} there are"
        loss = _LOSSES.get(name, "dpo")
        job.carry("pref_loss", "preferences.loss", loss)
        if loss == "simpo":
            gamma = job.number("simpo_gamma")
            job.carry("simpo_gamma", "preferences.gamma", 0.5 if gamma is None else gamma)
        if loss == "dpo" and (smoothing := job.number("dpo_label_smoothing")) is not None:
            job.carry("dpo_label_smoothing", "preferences.label_smoothing", smoothing)
    job.carry("pref_beta", "preferences.beta", 0.1 if beta is None else beta)
    for key, only in (("pref_ftx", 0), ("pref_bco_weight", 0), ("ld_alpha", 1.0)):
        wants(job, key, job.number(key), only, _SUM)
    wants(job, "ref_model", job.text("ref_model"), None, REFERENCE)
    if "lora.adapter" in job.carried and job.carried["preferences.loss"].value in WITH_REFERENCE:
        job.refused["adapter_name_or_path"] = (
            "the reference is the base there, and here the adapter to start from; merge it first (`fastjax convert "
            "merge`)"
        )
    answer_length(job, "cutoff_len", 2048)
    no_dropout(job, "lora_dropout")


def answers(job: Job, where: str, columns: dict[str, str], form: str, ranking: bool) -> dict[str, str]:
    """The columns of a data set's answers; empty: it has no preferences.

    Args:
        job: the import.
        where: the data set's place.
        columns: those that its description names; the ones that are used are removed.
        form: its formatting.
        ranking: whether it is described as ranked.
    """
    stage, tag = job.values.get("stage"), columns.pop("kto_tag", None)
    pair = {name: columns.pop(name, name) for name in PAIR}
    if not ranking and tag is None:
        if stage in STAGES:
            job.refused[where] = "stage dpo takes data sets with ranking: true, stage kto those with columns.kto_tag"
        return {}
    wanted = "dpo" if ranking else "kto"
    if stage != wanted:
        job.refused[where] = f"rows of preferences are for stage {wanted}"
    if ranking:
        return pair
    if form != "alpaca":
        job.refused[f"{where}.formatting"] = (
            "rows of kto have prompt, completion and label: write the last message apart"
        )
    return {"completion": columns.pop("response", "output"), "label": tag or ""}


def prompt_of_texts(job: Job, where: str, columns: dict[str, str]) -> dict[str, str]:
    """The column of the prompt, where it is a text."""
    for key in ("system", "history", "query"):
        if columns.pop(key, None):
            job.refused[f"{where}.columns.{key}"] = "preferences have one column for the prompt: write all of it there"
    return {"prompt": columns.pop("prompt", "instruction")}
