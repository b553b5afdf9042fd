"""torchtune's settings (pytorch/torchtune, recipes/configs), of its recipes of supervised fine-tuning and DPO.

A section names the function that takes it (`_component_`), and a value may refer to another (`${output_dir}`), as
OmegaConf has it.
"""

import re

from convert.errors import shorten
from fastjax.config_import import shared
from fastjax.config_import.job import Job, Tool
from fastjax.config_import.reasons import NO_RL
from fastjax.config_import.references import resolved
from fastjax.config_import.torchtune_data import data

#: A component's last name → the optimizer's name in transformers.
_OPTIMIZERS = {
    **{"AdamW": "adamw_torch", "AdamW8bit": "adamw_torch_8bit", "AdamWFp8": "ao_adamw_fp8"},
    **{"AdamW4bit": "adamw_torch_4bit", "PagedAdamW": "paged_adamw", "PagedAdamW32bit": "paged_adamw_32bit"},
    "PagedAdamW8bit": "paged_adamw_8bit",
}

#: torchtune's projections → PEFT's names, and those of families whose projections are fused in their folders.
_PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_FUSED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"), "output_proj": "o_proj"}
_MLP, _FUSED_MLP = ["gate_proj", "up_proj", "down_proj"], ["gate_up_proj", "down_proj"]
_FUSING = ("phi3", "phi4")

#: A loss of pairs → its name here, and its arguments with torchtune's defaults.
_SMOOTHING = {"label_smoothing": ("loss.label_smoothing", 0.0)}
_PAIRED: dict[str, tuple[str, dict[str, tuple[str, float]]]] = {
    "DPOLoss": ("dpo", {"beta": ("loss.beta", 0.1), **_SMOOTHING}),
    "SimPOLoss": ("simpo", {"beta": ("loss.beta", 2.0), "gamma": ("loss.gamma", 0.5), **_SMOOTHING}),
}

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _component(job: Job, section: str) -> tuple[str, str]:
    """The last name of a section's component, and the one before it; "": there is none."""
    name = job.take(f"{section}._component_", str) or ""
    words = re.fullmatch(r"(?:.*?(\w+)\.)?(\w+)", name)
    return (words[2], words[1] or "") if words else ("", "")


def _model(job: Job) -> None:
    """The model's builder: LoRA, QLoRA or full fine-tuning, and what gets adapters."""
    builder, family = _component(job, "model")
    if not builder:
        raise job.wrong("model._component_", "a builder such as torchtune.models.llama3_1.lora_llama3_1_8b", None)
    if any(word in f"{family} {builder}" for word in ("vision", "multimodal", "classifier", "reward", "clip", "flux")):
        job.refused["model._component_"] = "models of text only, no classifiers, no rewards"
    lora = builder.startswith(("lora_", "qlora_"))
    four = builder.startswith("qlora_") or job.flag("model.quantize_base")
    job.carry("model._component_", "model.full_finetuning", not lora)
    key = "model.quantize_base" if job.values.get("model.quantize_base") else "model._component_"
    job.carry(key, "model.load_in_4bit", lora and four)
    names, fused = job.names("model.lora_attn_modules"), family in _FUSING
    targets = list(dict.fromkeys((_FUSED if fused else _PROJECTIONS).get(name, name) for name in names))
    if job.flag("model.apply_lora_to_mlp"):
        targets += _FUSED_MLP if fused else _MLP
    if job.flag("model.apply_lora_to_output"):
        targets.append("lm_head")
    if lora:
        note = "queries, keys and values are one matrix in the folder, gate and up another" if fused else ""
        job.carry("model.lora_attn_modules", "lora.target_modules", targets, note)
    directory = job.take("checkpointer.checkpoint_dir", str)
    if directory is None:
        raise job.wrong("checkpointer.checkpoint_dir", "the base model's folder", directory)
    kind, _ = _component(job, "checkpointer")
    note = "" if kind == "FullModelHFCheckpointer" else "the folder must hold weights in Hugging Face format"
    folder = re.sub(r"/original/?$", "", directory)
    job.carry("checkpointer.checkpoint_dir", "model.model_name", folder, note)


def _precision(job: Job) -> None:
    name = job.choose("dtype", _DTYPES, "bf16")
    job.carry("dtype", "model.dtype", _DTYPES[name])
    if job.carried["model.full_finetuning"].value and name != "fp32":
        job.carry("dtype", "model.param_dtype", _DTYPES[name], shared.SIXTEEN)


def _optimizer(job: Job) -> None:
    name, _ = _component(job, "optimizer")
    if name not in _OPTIMIZERS:
        job.refused["optimizer._component_"] = f"there is no {shorten(name, 80) or 'such optimizer'}; AdamW there is"
    else:
        job.carry("optimizer._component_", "optimizer.name", *shared.OPTIMIZERS[_OPTIMIZERS[name]])
    shared.betas(job, "optimizer.betas", [])
    schedule, _ = _component(job, "lr_scheduler")
    if schedule not in ("", "get_cosine_schedule_with_warmup"):
        job.refused["lr_scheduler._component_"] = "get_cosine_schedule_with_warmup and none (constant) there are"
    kind = ("cosine", "") if schedule else ("constant", "torchtune's default: no lr_scheduler")
    job.carry("lr_scheduler._component_", "optimizer.lr_scheduler_type", *kind)


def _loss(job: Job) -> None:
    """Cross-entropy, or DPO or SimPO over pairs."""
    loss, _ = _component(job, "loss")
    if loss in _PAIRED:
        shared.carry_loss(job, "loss._component_", *_PAIRED[loss])
    elif "CrossEntropy" not in loss and loss not in ("", "CEWithChunkedOutputLoss"):
        job.refused["loss._component_"] = NO_RL if "PO" in loss else "the loss is cross-entropy, DPO or SimPO"


def _length(job: Job) -> None:
    length = job.integer("tokenizer.max_seq_len")
    note = "rows of any length there; longer ones are cut here" if length is None else ""
    if "preferences.loss" in job.carried:
        shared.answer_length(job, "tokenizer.max_seq_len", 2048, note)
    else:
        job.carry("tokenizer.max_seq_len", "model.max_seq_length", 2048 if length is None else length, note)
    epochs, most = job.integer("epochs"), job.integer("max_steps_per_epoch")
    job.carry_given("epochs", "training.num_train_epochs", epochs)
    if most is not None:
        note = "" if epochs in (None, 1) else f"{most} of each epoch there, one after the other here"
        job.carry("max_steps_per_epoch", "training.max_steps", most * (epochs or 1), note)


def _trackers(job: Job) -> None:
    name, _ = _component(job, "metric_logger")
    kinds = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
    if name in kinds:
        job.carry("metric_logger._component_", "output.report_to", [kinds[name]])
    elif name not in ("", "DiskLogger", "StdoutLogger"):  # metrics.jsonl has theirs
        job.not_carried["metric_logger._component_"] = "output.report_to has tensorboard and wandb"
    if name == "WandBLogger":
        given = {key: job.take(f"metric_logger.{key}", str) for key in ("project", "entity")}
        for key, value in {**given, "tags": job.names("metric_logger.tags")}.items():
            job.carry_given(f"metric_logger.{key}", f"output.{key}", value or None)


def _qat(job: Job) -> None:
    name, _ = _component(job, "quantizer")
    if name:
        weights = "int4" if name == "Int8DynActInt4WeightQATQuantizer" else None
        size, start = job.integer("quantizer.groupsize", 256), job.integer("fake_quant_after_n_steps")
        shared.fake_quantisation(job, "quantizer._component_", weights, size, "int8", start)


def _saves(job: Job) -> None:
    """Epochs between two saves, and the devices that share a model."""
    epochs, shards = job.take("save_every_n_epochs"), job.take("data_parallel_shard_dim")
    if epochs == 1:
        job.carry("save_every_n_epochs", "output.save_steps", "epoch")
    elif epochs is not None:
        job.not_carried["save_every_n_epochs"] = "output.save_steps: epoch saves at the end of each"
    job.carry_given("data_parallel_shard_dim", "parallel.fsdp", None if shards == -1 else shards)  # fsdp: auto


SETTINGS = {
    "lora": "model.lora_rank:r model.lora_alpha:lora_alpha model.lora_dropout:lora_dropout model.use_dora:use_dora",
    "optimizer": "optimizer.lr:learning_rate optimizer.weight_decay:weight_decay optimizer.eps:adam_epsilon "
    "lr_scheduler.num_warmup_steps:warmup_steps clip_grad_norm:max_grad_norm",
    "training": "batch_size:per_device_train_batch_size batch_size_val:per_device_eval_batch_size "
    "gradient_accumulation_steps loss.label_smoothing:label_smoothing_factor run_val_every_n_steps:eval_steps "
    "log_every_n_steps:logging_steps seed cudnn_deterministic_mode:deterministic",
    "output": "output_dir save_every_n_steps:save_steps checkpointer.keep_last_n_checkpoints:save_total_limit "
    "metric_logger.name:run_name",
    "parallel": "tensor_parallel_dim:tensor context_parallel_dim:context data_parallel_replicate_dim:data",
}

DEFAULTS = {"model.lora_rank": 8, "model.lora_alpha": 16, "optimizer.lr": 1e-3, "optimizer.weight_decay": 0.01}
DEFAULTS |= {"clip_grad_norm": 0.0, "output_dir": "torchtune-out"}

_MARKS = "tokenizer checkpointer metric_logger batch_size_val epochs clip_grad_norm"
_GROUPS = (_model, _precision, _optimizer, _loss, _length, data, _trackers, _qat, _saves)

TORCHTUNE = Tool("torchtune", _MARKS, _GROUPS, (SETTINGS,), DEFAULTS, resolved)
