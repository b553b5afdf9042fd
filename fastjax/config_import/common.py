"""What the tools share with transformers: optimizers, schedules, warm-up, held-out parts, steps between saves."""

from typing import Any

from convert.errors import shorten, shown
from fastjax.config_import.job import Job
from fastjax.config_import.table import To, number
from fastjax.data.columns import SHAREGPT_ROLES

_PAGED = "its state is not paged; training.offload_optimizer holds it in the host's memory"

NAMES = "adamw, adamw_8bit, adafactor, lion and muon there are"
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
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}

#: Chat templates that both the tools and this program have under these names; others are the tokenizer's own.
TEMPLATES = ("alpaca", "chatml", "gemma", "llama3")

#: Keys that Axolotl has from transformers, and LLaMA-Factory too.
SETTINGS = {
    "lora_dropout": number("lora.lora_dropout"),
    "loraplus_lr_ratio": number("optimizer.loraplus_lr_ratio"),
    "loraplus_lr_embedding": number("optimizer.embedding_learning_rate"),
    "learning_rate": number("optimizer.learning_rate"),
    "weight_decay": number("optimizer.weight_decay"),
    "max_grad_norm": number("optimizer.max_grad_norm"),
    "adam_beta1": number("optimizer.adam_beta1"),
    "adam_beta2": number("optimizer.adam_beta2"),
    "adam_epsilon": number("optimizer.adam_epsilon"),
    "neftune_noise_alpha": number("training.neftune_noise_alpha"),
    "label_smoothing_factor": number("training.label_smoothing_factor"),
    "group_by_length": To("training.group_by_length"),
    "logging_steps": To("training.logging_steps"),
    "seed": To("training.seed"),
    "save_total_limit": To("output.save_total_limit"),
    "load_best_model_at_end": To("output.load_best_model_at_end"),
}

#: The kinds of trackers here, as the tools name them.
TRACKERS = ("tensorboard", "wandb")

PARALLEL = "parallel sizes itself: copies of the model where it fits on one device, else parallel.fsdp"
FLOAT8 = "model.base_compute: float8 computes a frozen base in it, training.qat: float8 trains for serving in it"
KERNELS = "kernels are chosen for the GPU by themselves"
SIXTEEN = "the trained weights have 16 bits there too; float32 keeps small updates"
#: In torchao 0.18 fake quantisation by token has no symmetric form (NotImplementedError).
TOKENS = "int8 inputs are symmetric here, a scale a token; torchao's fake quantiser has a zero point besides"
RECOMPUTE = "model.use_gradient_checkpointing: auto recomputes what the GPU has no memory for"


def optimizer(job: Job, key: str) -> None:
    """Carry an optimizer of transformers over, by default AdamW."""
    name = job.text(key) or "adamw"
    if name in OPTIMIZERS:
        ours, note = OPTIMIZERS[name]
        job.carry(key, "optimizer.name", ours, note)
    else:
        reason = f"there is no {shorten(name, 80)}; {NAMES}"
        job.refused[key] = _SPECTRAL if name == "muon" else reason


def schedule(job: Job, key: str, kwargs: str, *, default: str) -> None:
    """Carry a schedule of transformers over, with its arguments."""
    name = job.text(key) or default
    if name not in SCHEDULES:
        job.refused[key] = f"there is no schedule {shorten(name, 80)}; cosine, linear, constant and wsd there are"
        return
    job.carry(key, "optimizer.lr_scheduler_type", SCHEDULES[name])
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
        for key in (steps, ratio):
            if job.number(key) is not None:
                job.not_needed[key] = "the schedule constant has no warm-up there"
        return
    count, part = job.number(steps), job.number(ratio)
    if count:
        setting = "optimizer.warmup_ratio" if count < 1 else "optimizer.warmup_steps"
        job.carry(steps, setting, count if count < 1 else int(count))
    elif part is not None:
        job.carry(ratio, "optimizer.warmup_ratio", part)


def cadence(job: Job, key: str, setting: str) -> None:
    """Carry a number of steps between two saves or evaluations over; below 1 it is a share of all of them."""
    steps = job.number(key)
    if steps is not None and steps > 0:
        job.carry(key, setting, steps if steps < 1 else int(steps))


def precision(job: Job, sixteen: tuple[tuple[str, str], ...], *, param_dtype: bool) -> None:
    """Carry the flags of 16-bit dtypes over.

    Args:
        job: the import.
        sixteen: pairs of flag and dtype; the first flag that is set wins.
        param_dtype: with it, the trained weights have that dtype too.
    """
    done = False
    for key, dtype in sixteen:
        value = job.take(key)
        if value is None or value is False or done:
            continue
        if value is not True and value not in ("auto", "full"):
            raise job.wrong(key, "true, false or auto", value)
        done = True
        if value == "auto":
            job.not_needed[key] = "model.dtype: null is bfloat16 on a GPU that has it"
        else:
            job.carry(key, "model.dtype", dtype)
        if param_dtype:
            job.carry(key, "model.param_dtype", dtype, SIXTEEN)


def hold_out(job: Job, key: str, sources: list[dict[str, Any]], *, named: bool) -> None:
    """Carry the size of a held-out part over.

    Args:
        job: the import.
        key: of the size, a share or a number of rows.
        sources: the training data.
        named: whether held-out data are named beside it.
    """
    size = job.number(key)
    if size is None:
        return
    if size <= 0 or named:
        job.not_needed[key] = "held-out data are named" if size > 0 else "no held-out data, as here"
    elif any(source.get("streaming") for source in sources):
        job.not_carried[key] = "data that are streamed have no held-out part; name held-out data as data.eval"
    else:
        job.carry(key, "data.val_set_size", int(size) if size >= 1 else size)


def write_data(job: Job, key: str, sources: list[dict[str, Any]], setting: str = "data.train", note: str = "") -> None:
    """Make the setting of data sets, each with its path, name, split, weight and columns."""
    order = ("path", "name", "split", "weight", "streaming", "columns")
    idle = {"split": "train"}
    listed = [
        {name: source[name] for name in order if source.get(name) not in (None, idle.get(name))} for source in sources
    ]
    job.carry(key, setting, listed, note)


def speakers_differ(roles: dict[str, str]) -> list[str]:
    """Speakers who would be read as another role here.

    Args:
        roles: speaker → role.
    """
    return [shown(name, 60) for name, role in roles.items() if SHAREGPT_ROLES.get(name) != role]
