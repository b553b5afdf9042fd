"""LLaMA-Factory's settings (hiyouga/LLaMA-Factory, src/llamafactory/hparams).

What its own arguments do not name are transformers' TrainingArguments, with their defaults.
"""

from fastjax.config_import import shared
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.llama_factory_data import STAGES, data, preferences
from fastjax.config_import.reasons import LOG, METHOD


def _base(job: Job) -> None:
    shared.base_model(job, "model_name_or_path", "model_revision")
    for key in ("add_tokens", "add_special_tokens"):
        if tokens := job.names(key):
            job.carry_more(key, "model.new_tokens", list(dict.fromkeys(tokens)))
    if job.flag("split_special_tokens"):
        job.carry("split_special_tokens", "data.special_tokens", "text")


def _method(job: Job) -> None:
    """The stage, and LoRA, QLoRA or full fine-tuning."""
    job.choose("stage", ("sft", "pt", *STAGES), "sft")
    rank, alpha = job.integer("lora_rank", 8), job.number("lora_alpha")
    job.carry("lora_rank", "lora.r", rank)
    note = f"{job.tool.name}'s default: twice the rank" if alpha is None else ""
    job.carry("lora_alpha", "lora.lora_alpha", 2 * (rank or 8) if alpha is None else alpha, note)
    method(job, "finetuning_type", "lora", "quantization_bit", "quantization_method", "lora_target", "")


def method(job: Job, key: str, default: str, bits: str, how: str, targets: str, section: str) -> None:
    """Carry over what is trained, by LoRA's keys and those of a section, and the bits of the base."""
    kind = job.choose(key, ("lora", "full", "freeze"), default, METHOD)
    job.carry(key, "model.full_finetuning", kind != "lora")
    if kind == "freeze":
        _unfrozen(job, section)
    count = job.number(bits)
    note = {4: "", 8: "the base in 16 bits instead of 8"}.get(count, "the base in 16 bits")
    job.carry(bits, "model.load_in_4bit", count == 4 and kind == "lora", note)
    if count not in (None, 4, 8):
        job.refused[bits] = "a base in 16 or 4 bits, 8 is held in 16"
    if count is not None:
        job.choose(how, ("bnb", "auto"), "bnb", "4 bits are bitsandbytes' NF4")
    names, start = job.names(targets), f"{section}adapter_name_or_path"
    if names not in ([], ["all"]):  # lora.target_modules: null is every projection
        job.carry(targets, "lora.target_modules", names)
    adapters = job.names(start)
    if adapters and (len(adapters) > 1 or job.values.get("create_new_adapter") or kind != "lora"):
        job.refused[start] = "one adapter to go on from; merge others first (`fastjax convert merge`)"
    elif adapters:
        job.carry(start, "lora.adapter", adapters[0])


def _unfrozen(job: Job, section: str) -> None:
    """Carry over which layers, from the end or the beginning, and which modules beside them are trained."""
    key = f"{section}freeze_trainable_layers"
    count, modules = job.integer(key, 2), job.names(f"{section}freeze_trainable_modules") or ["all"]
    layers = range(-count, 0) if count > 0 else range(-count)
    inner = [""] if "all" in modules else [f"(.*[.])?{name}[.]" for name in modules]
    names = [f"model.layers.{layer}.{module}" for layer in layers for module in inner]
    extra = [f"(model.)?{name}[.]" for name in job.names(f"{section}freeze_extra_modules")]
    job.carry(key, "model.unfrozen_parameters", [*names, *extra])


def _schedule(job: Job) -> None:
    shared.schedule(job, "lr_scheduler_type", "lr_scheduler_kwargs", default="linear")
    shared.warmup(job, "warmup_steps", "warmup_ratio")
    shared.optimizer(job, "optim")
    if job.flag("use_muon"):
        job.carry("use_muon", "optimizer.name", "muon")
    steps = job.integer("max_steps")
    if steps is not None and steps > 0:
        job.carry("max_steps", "training.max_steps", steps)
    reason = "rows are shuffled (random), or of similar length in a step (group_by_length)"
    if job.choose("train_sampling_strategy", ("random", "group_by_length"), "random", reason) == "group_by_length":
        job.carry("train_sampling_strategy", "training.group_by_length", True)


def _precision(job: Job) -> None:
    pure = job.flag("pure_bf16")
    if pure:
        job.carry("pure_bf16", "model.param_dtype", "bfloat16", "float32 keeps small updates")
    shared.precision(job, {"bf16": "bfloat16", "fp16": "float16"}, param_dtype=False)
    if pure and "model.dtype" not in job.carried:
        job.carry("pure_bf16", "model.dtype", "bfloat16")


def _checkpoints(job: Job) -> None:
    """When to save and to evaluate, and the trackers."""
    for kind, setting in (("save", "output.save_steps"), ("eval", "training.eval_steps")):
        keys = [f"{kind}_strategy", *(["evaluation_strategy"] if kind == "eval" else [])]
        key, strategy = next(((key, value) for key in keys if (value := job.take(key, str))), (keys[0], None))
        if strategy == "epoch":
            job.carry(key, setting, "epoch")
        elif strategy == "best":
            job.not_carried[key] = "output.load_best_model_at_end keeps the best checkpoint"
        if strategy in ("no", "epoch", "best"):
            job.number(f"{kind}_steps")
        else:
            shared.cadence(job, f"{kind}_steps", setting)
    if job.values.get("save_steps") is None and job.values.get("save_strategy") in (None, "steps"):
        job.carry("save_steps", "output.save_steps", 500)
    trackers = job.names("report_to")
    known = [name for name in shared.TRACKERS if name in trackers or trackers == ["all"]]
    job.carry_given("report_to", "output.report_to", known or None)
    if others := [name for name in trackers if name not in (*shared.TRACKERS, "none", "all")]:
        job.not_carried[f"report_to: {', '.join(others)}"] = LOG


SETTINGS = {
    "model": "cutoff_len:max_seq_length",
    "lora": "use_rslora use_dora additional_target:modules_to_save",
    "training": "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs "
    "early_stopping_steps:early_stopping_patience moe_aux_loss_coef:router_aux_loss_coef "
    "full_determinism:deterministic",
    "output": "output_dir overwrite_output_dir run_name",
}

DEFAULTS = {"cutoff_len": 2048, "learning_rate": 5e-5, "per_device_train_batch_size": 8, "num_train_epochs": 3.0}
DEFAULTS |= {"output_dir": "saves"}

_MARKS = "model_name_or_path stage finetuning_type cutoff_len template dataset_dir lora_target"
_MARKS += " per_device_train_batch_size num_train_epochs"
_GROUPS = (_base, _method, _schedule, _precision, _checkpoints, preferences, data)

LLAMA_FACTORY = Tool("llama-factory", _MARKS, _GROUPS, (shared.SETTINGS, SETTINGS), DEFAULTS)
