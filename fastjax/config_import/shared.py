"""Keys that several tools have: those of transformers, chat templates, data sets, and losses of preferences."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from convert.errors import shorten, shown
from fastjax.config_import.job import Job
from fastjax.config_import.reasons import NAMES
from fastjax.data.columns import SHAREGPT_ROLES
from fastjax.data.named_templates import NAMED_TEMPLATES, SAME_TEMPLATES
from fastjax.training.config.preferences import WITH_REFERENCE

_PAGED = "its state is not paged; training.offload_optimizer holds it in the host's memory"

_SPECTRAL = (
    "its updates have a spectral norm of the learning rate there; with optimizer.name: muon they have AdamW's size, so "
    "set it by hand with a learning rate of AdamW's"
)

#: An optimizer here, and in what the tools' differs → its names in transformers, bitsandbytes or torch.
_SPELLINGS = {
    ("adamw", ""): "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_anyprecision "
    "optimi_adamw adamw adamw_torch_npu_fused flash_adamw",
    ("adamw", _PAGED): "paged_adamw paged_adamw_32bit",
    ("adamw_8bit", ""): "adamw_bnb_8bit adamw_8bit",
    ("adamw_8bit", "its state in 8 bits, block by block"): "adamw_torch_8bit ao_adamw_8bit ao_adamw_fp8",
    ("adamw_8bit", "its state in 8 bits instead of 4"): "adamw_torch_4bit ao_adamw_4bit",
    ("adamw_8bit", _PAGED): "paged_adamw_8bit",
    ("adafactor", ""): "adafactor",
    ("lion", ""): "lion lion_32bit paged_lion paged_lion_32bit flash_lion",
    ("lion", "its state in 32 bits instead of 8"): "lion_8bit paged_lion_8bit",
}
OPTIMIZERS = {name: ours for ours, names in _SPELLINGS.items() for name in names.split()}

#: A schedule's name in transformers → its name here.
SCHEDULES = {name: name for name in ("cosine", "linear", "constant")} | {"warmup_stable_decay": "wsd"}
SCHEDULES |= {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}

#: Keys that Axolotl has from transformers, and LLaMA-Factory too.
SETTINGS = {
    "lora": "lora_dropout",
    "optimizer": "loraplus_lr_ratio loraplus_lr_embedding:embedding_learning_rate learning_rate weight_decay "
    "max_grad_norm adam_beta1 adam_beta2 adam_epsilon",
    "training": "neftune_noise_alpha label_smoothing_factor group_by_length logging_steps seed",
    "output": "save_total_limit load_best_model_at_end",
}

#: A chat template by names of the tools alone → its name here.
_TEMPLATES = {"qwen3_nothink": "qwen3-instruct", "qwen": "qwen-2.5", "llama2": "llama", "mistral_v3_tekken": "mistral"}

#: The kinds of trackers here, as the tools name them.
TRACKERS = ("tensorboard", "wandb")

SIXTEEN = "the trained weights have 16 bits there too; float32 keeps small updates"
#: In torchao 0.18 fake quantisation by token has no symmetric form (NotImplementedError).
TOKENS = "int8 inputs are symmetric here, a scale a token; torchao's fake quantiser has a zero point besides"

#: The losses that the tools have too, by their names here.
LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")
ONE_TEMPLATE = "all rows of a run go through one chat template"
PAIR = {"chosen": "chosen", "rejected": "rejected"}


def base_model(job: Job, key: str, revision_key: str) -> None:
    """Carry the base model over, at its revision."""
    name, revision = job.take(key, str), job.take(revision_key, str)
    if name is None:
        raise job.wrong(key, "a folder or a name on the hub", name)
    if revision in (None, "main"):
        job.carry(key, "model.model_name", name)
    else:
        job.carry(f"{key}, {revision_key}", "model.model_name", f"{name}@{revision}")


def template(job: Job, key: str, name: str) -> None:
    """Carry a chat template over by its name: one that there is, or the tokenizer's own where it is its model's."""
    if (ours := named_template(name)) is not None:
        job.carry(key, "data.chat_template", ours)
    elif name == "tokenizer_default":
        job.not_needed[key] = "data.chat_template: null is the tokenizer's own"
    elif re.sub("nothink$", "", _letters(name)) in _letters(job.carried["model.model_name"].value):
        job.not_needed[key] = "this model's, which is its tokenizer's own"
    else:
        job.not_carried[key] = "the tokenizer's own is taken; data.chat_template names another, or a file"


def named_template(name: str) -> str | None:
    """The chat template that there is by a name, whose punctuation does not count; None: there is none."""
    known = {_letters(other): ours for other, ours in {**SAME_TEMPLATES, **_TEMPLATES}.items()}
    known |= {_letters(ours): ours for ours in NAMED_TEMPLATES}
    return name if name in NAMED_TEMPLATES else known.get(_letters(name))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]|unified", "", text.lower())


def optimizer(job: Job, key: str) -> None:
    """Carry an optimizer of transformers over, by default AdamW."""
    name = job.take(key, str) or "adamw"
    if name in OPTIMIZERS:
        ours, note = OPTIMIZERS[name]
        job.carry(key, "optimizer.name", ours, note)
    else:
        job.refused[key] = _SPECTRAL if name == "muon" else f"there is no {shorten(name, 80)}; {NAMES}"


def schedule(job: Job, key: str, kwargs: str, *, default: str) -> None:
    """Carry a schedule of transformers over, with its arguments."""
    name = job.take(key, str) or default
    if name not in SCHEDULES:
        job.refused[key] = f"there is no schedule {shorten(name, 80)}; cosine, linear, constant and wsd there are"
        return
    flat = job.values.get("cosine_min_lr_ratio") == 1
    job.carry(key, "optimizer.lr_scheduler_type", "constant" if flat else SCHEDULES[name])
    for argument, value in job.mapping(kwargs).items():
        where = f"{kwargs}.{argument}"
        if argument in ("min_lr_ratio", "min_lr_rate"):
            job.carry(where, "optimizer.min_lr_ratio", job.to_number(where, value))
        elif argument == "min_lr" and (top := job.to_number("learning_rate", job.values.get("learning_rate") or 0)):
            job.carry(where, "optimizer.min_lr_ratio", job.to_number(where, value) / top)
        else:
            job.refused[where] = "no argument of the schedules here (optimizer.min_lr_ratio, optimizer.decay_ratio)"


def warmup(job: Job, steps: str, ratio: str) -> None:
    """Carry warm-up over, which transformers reads as steps from 1 on and as a part of them below; steps win."""
    if job.values.get("lr_scheduler", job.values.get("lr_scheduler_type")) == "constant":
        given = [key for key in (steps, ratio) if job.number(key) is not None]
        job.not_needed |= dict.fromkeys(given, "the schedule constant has no warm-up there")
        return
    count, share = job.number(steps), job.number(ratio)
    if count:
        setting = "optimizer.warmup_ratio" if count < 1 else "optimizer.warmup_steps"
        job.carry(steps, setting, count if count < 1 else int(count))
    else:
        job.carry_given(ratio, "optimizer.warmup_ratio", share)


def betas(job: Job, key: str, default: list[float]) -> None:
    """Carry AdamW's two betas over."""
    given = job.take(key, list) or default
    if len(given) not in (0, 2):
        raise job.wrong(key, "two numbers", given)
    for number, beta in enumerate(given, start=1):
        job.carry(key, f"optimizer.adam_beta{number}", job.to_number(key, beta))


def described(job: Job, key: str, file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """A file that describes data sets, which a key names."""
    try:
        return job.checked(str(file), parse(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise job.wrong(key, f"valid content of {file} ({error})", job.values.get(key)) from None


def cadence(job: Job, key: str, setting: str) -> None:
    """Carry a number of steps between two saves or evaluations over; below 1 it is a share of all of them."""
    steps = job.number(key)
    if steps is not None and steps > 0:
        job.carry(key, setting, steps if steps < 1 else int(steps))


def precision(job: Job, flags: Mapping[str, str], *, param_dtype: bool) -> None:
    """Carry flags of dtypes over, of which the first that is set wins; with `param_dtype` for trained weights too."""
    values = {key: job.take(key, bool | Literal["auto", "full"]) for key in flags}
    key, value = next(((key, value) for key, value in values.items() if value), ("", None))
    if value == "auto":
        job.not_needed[key] = "model.dtype: null is bfloat16 on a GPU that has it"
    elif value:
        job.carry(key, "model.dtype", flags[key])
    if value and param_dtype:
        job.carry(key, "model.param_dtype", flags[key], SIXTEEN)


def fake_quantisation(job: Job, key: str, weights: str | None, size: Any, activations: str | None, start: Any) -> None:
    """Carry quantisation-aware training over; weights is None where there is no such, int4 is in groups of a size."""
    weights = f"int4-{size}" if weights == "int4" else weights
    if weights is None or weights.startswith("int4-") and size not in (32, 128):
        job.refused[key] = "training.qat has int4 in groups of 32 or 128 (inputs in int8), fp8, nvfp4 and mxfp4"
        return
    section = {"weights": weights, "activations": activations, "start_step": start or None}
    given = {name: value for name, value in section.items() if value is not None}
    job.carry(key, "training.qat", given, TOKENS if activations == "int8" else "")


def hold_out(job: Job, key: str, sources: list[dict[str, Any]], *, named: bool) -> None:
    """Carry the size of a held-out part over, unless the data are streamed, or held-out data are named beside it."""
    size = job.number(key)
    if size is not None and (size <= 0 or named):
        job.not_needed[key] = "held-out data are named" if size > 0 else "no held-out data, as here"
    elif size is not None and any(source.get("streaming") for source in sources):
        job.not_carried[key] = "data that are streamed have no held-out part; name held-out data as data.eval"
    elif size is not None:
        job.carry(key, "data.val_set_size", int(size) if size >= 1 else size)


def write_data(job: Job, key: str, sources: list[dict[str, Any]], setting: str = "data.train") -> None:
    """Make the setting of data sets, each with its path, name, split, weight and columns."""
    order = ("path", "name", "data_files", "split", "weight", "streaming", "columns")
    told = [{name: source[name] for name in order if source.get(name) is not None} for source in sources]
    for source in told:
        if source.get("split") == "train":
            del source["split"]
    job.carry(key, setting, told)


def with_files(source: dict[str, Any], files: Any) -> list[dict[str, Any]]:
    """A data set with files of its own, one name or several; each by itself where `path` names their kind."""
    names = [files] if isinstance(files, str) else files
    if names is None or source["path"] not in ("json", "csv", "parquet"):
        return [source | {"data_files": names}]
    return [source | {"path": name} for name in names]


def check_speakers(job: Job, where: str, roles: Mapping[str, str]) -> None:
    """Refuse names of speakers that would be read as another role here, or as none."""
    if differing := [shown(name, 60) for name, role in roles.items() if SHAREGPT_ROLES.get(name) != role]:
        job.refused[where] = f"{', '.join(differing)} would be read as another role, or as none"


def spelling(job: Job, key: str, role: Any, content: Any, others: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The meaning of a column of messages by the names of their parts; other names are refused."""
    meaning = {("role", "content"): "messages", ("from", "value"): "conversations"}.get((str(role), str(content)))
    if meaning is None or any(name != value for name, value in others.items()):
        job.refused[key] = "messages have role and content, or from and value"
    return meaning or "messages"


def carry_loss(job: Job, key: str, loss: str, arguments: Mapping[str, tuple[str, float | None]]) -> None:
    """Carry a loss of preferences over; arguments: setting → the tool's key, and its default (None: the setting's)."""
    job.carry(key, "preferences.loss", loss)
    for setting, (argument, default) in arguments.items():
        job.carry_given(argument, f"preferences.{setting}", job.number(argument, default))
    if loss in WITH_REFERENCE and job.carried["model.full_finetuning"].value:
        note = "every weight is trained: the reference's log-probabilities are computed before"
        job.carry(key, "preferences.precompute_ref_log_probs", True, note)


def answer_length(job: Job, key: str, default: int, note: str = "") -> None:
    """Carry the longest answer over, with its prompt; a row has room for two of them. Its adapter has no dropout."""
    length = job.integer(key, default)
    job.carry(key, "preferences.max_length", length, note)
    job.carry(key, "model.max_seq_length", 2 * length, "a row has both answers of a pair, each with its prompt")
    if job.number("lora_dropout") is not None:
        job.not_needed["lora_dropout"] = f"{job.tool.name} trains on preferences without dropout"


def wants(job: Job, key: str, value: Any, only: Any, why: str) -> None:
    """Refuse a value, unless it is absent, off or the one that there is."""
    if value and value != only:
        job.refused[key] = why
    elif value is not None:
        job.not_needed[key] = "so it is here"
