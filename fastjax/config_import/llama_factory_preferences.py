"""LLaMA-Factory's stages `dpo` and `kto`: the loss with its settings, and ranked or labelled data sets."""

from convert.errors import shorten
from fastjax.config_import.job import Job
from fastjax.config_import.preferences import PAIR, REFERENCE, answer_length, carry_loss, no_dropout, wants
from fastjax.training.config.preferences import WITH_REFERENCE

STAGES = ("dpo", "kto")
#: pref_loss → the loss here, and its arguments beside beta.
_LOSSES: dict[str, tuple[str, dict[str, tuple[str, float | None]]]] = {
    "sigmoid": ("dpo", {"label_smoothing": ("dpo_label_smoothing", None)}),
    "ipo": ("ipo", {}),
    "orpo": ("orpo", {}),
    "simpo": ("simpo", {"gamma": ("simpo_gamma", 0.5)}),
}
_WEIGHTS = {"desirable_weight": ("kto_chosen_weight", 1.0), "undesirable_weight": ("kto_rejected_weight", 1.0)}
_SUM = "no other loss is added to that of preferences"


def preferences(job: Job) -> None:
    """The loss, and the lengths of answers."""
    stage = job.values.get("stage")
    if stage not in STAGES:
        return
    beta: dict[str, tuple[str, float | None]] = {"beta": ("pref_beta", 0.1)}
    if stage == "kto":
        carry_loss(job, "stage", "kto", beta | _WEIGHTS)
    else:
        name = job.text("pref_loss") or "sigmoid"
        if name not in _LOSSES:
            job.refused["pref_loss"] = f"{shorten(name, 80)}: {', '.join(_LOSSES)} there are"
        loss, arguments = _LOSSES.get(name, ("dpo", {}))
        carry_loss(job, "pref_loss", loss, beta | arguments)
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
