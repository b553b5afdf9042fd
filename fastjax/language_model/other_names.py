"""The names of Unsloth's, transformers' and PEFT's models that are none here: what becomes of each."""

from collections.abc import Callable, Mapping
from typing import Any

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.options.other_names import OtherNames
from fastjax.training.config.qat import NAMED

_AUDIO = "a speech model's own tools; models here read and write text"
_CLASSES = "with_score_head for a reward model, which has one score; a classifier with several is not built"
_DEVICES = "the environment's CUDA_VISIBLE_DEVICES, or JAX_PLATFORMS=cpu, which say what JAX finds"
_HUB = "the environment's HF_TOKEN, HF_HOME and HF_HUB_OFFLINE=1, which the hub's own tools read too"
_IMAGES = "a text model; images are not read"


def _text_model(auto_model: Any) -> Mapping[str, Any]:
    name = getattr(auto_model, "__name__", str(auto_model))
    if auto_model is None or name.endswith(("CausalLM", "LMHeadModel")):
        return {}
    raise ConfigError(
        f"from_pretrained: auto_model: expected a class for causal language models, got {name}; the family follows "
        "from config.json, and images, speech and classes are not served"
    )


def _task(task_type: Any) -> Mapping[str, Any]:
    name = getattr(task_type, "value", task_type)
    if name in (None, "CAUSAL_LM"):
        return {}
    raise ConfigError(f"get_peft_model: task_type: expected CAUSAL_LM, got {shown(name, 60)}; use {_CLASSES}")


def _tuned(name: str, instead: str) -> Callable[[Any], Mapping[str, Any]]:
    """A switch of what is trained that is on here."""

    def check(value: Any) -> Mapping[str, Any]:
        if value is None or value:
            return {}
        raise ConfigError(f"get_peft_model: {name}: expected true, got {shown(value, 60)}; use {instead}")

    return check


#: Beside the fields of `LoadOptions`.
LOADING = OtherNames(
    not_needed=frozenset(
        (
            # A family's own code is here, and none of a repository runs; kernels are chosen by the device.
            *("trust_remote_code", "attn_implementation", "unsloth_force_compile", "fullgraph", "low_cpu_mem_usage"),
            *("use_safetensors", "use_cache", "use_exact_model_name", "fix_tokenizer", "return_logits", "text_only"),
            # `generate` has its engine, whatever the ranks of adapters; no other one is started beside it.
            *("fast_inference", "gpu_memory_utilization", "max_lora_rank", "disable_log_stats", "max_loras"),
            # An MLP computes so many tokens at a time as mlp_chunk says, by itself where there are many.
            *("unsloth_tiled_mlp", "device_map_planner_kwargs", "correct_gradient_checkpointing"),
            *("unsloth_vllm_standby", "supports_sdpa"),
        )
    ),
    only={
        "load_in_8bit": ((), "load_in_4bit=True (NF4), or load_in_4bit=False for the folder's 16 bits"),
        "load_in_fp8": ((), "base_compute='float8', which computes in float8 over a base in 16 bits"),
        "float8_kv_cache": ((), "fastjax serve, whose settings say what its cache holds"),
        "quantization_config": ((), "load_in_4bit=True, or a folder that is quantised, which is read as it is"),
        "device_map": (("auto", "balanced", "balanced_low_0", "sequential", "unsloth", "cuda", "cuda:0"), _DEVICES),
        "resize_model_vocab": ((), "new_tokens, which grows the tables"),
        "tokenizer_name": ((), "tokenizer= of the trainer and of save_pretrained"),
        **dict.fromkeys(("token", "cache_dir", "local_files_only", "use_auth_token", "subfolder"), ((), _HUB)),
        **dict.fromkeys(("num_labels", "id2label", "label2id"), ((), _CLASSES)),
        **dict.fromkeys(("whisper_language", "whisper_task"), ((), _AUDIO)),
        "target_parameters": ((), "get_peft_model(target_parameters=…)"),
        **dict.fromkeys(("tokenizer_revision", "model_types"), ((), "revision, which is the whole folder's")),
        "float32_mixed_precision": ((), "param_dtype, which is float32 unless it says otherwise"),
    },
    served={
        "auto_model": _text_model,
        "load_in_16bit": lambda value: {"load_in_4bit": False} if value else {},
        "torch_dtype": lambda value: {} if value is None else {"dtype": value},
    },
)

#: Beside the fields of `LoraSettings`.
ADAPTER = OtherNames(
    not_needed=frozenset(
        ("max_seq_length", "temporary_location", "autocast_adapter_dtype", "adapter_name", "low_cpu_mem_usage")
    ),
    only={
        "loftq_config": ((), "init_lora_weights, which says how an adapter starts"),
        **dict.fromkeys(
            ("layers_pattern", "finetune_last_n_layers"),
            ((), "layers_to_transform, which counts the decoder's layers"),
        ),
        **dict.fromkeys(
            ("inference_mode", "fan_in_fan_out", "layer_replication", "megatron_config", "lora_bias", "use_qalora"),
            ((), "the other options; an adapter here is LoRA's, DoRA's or rsLoRA's over the model's own layers"),
        ),
        "exclude_modules": ((), "target_modules with the names of those that are trained"),
        **dict.fromkeys(
            ("eva_config", "corda_config", "lora_ga_config", "alora_invocation_tokens", "arrow_config", "use_bdlora"),
            ((), "init_lora_weights, use_dora and use_rslora for what kinds of adapters there are"),
        ),
        "finetune_vision_layers": ((), _IMAGES),
        "finetune_audio_layers": ((), _AUDIO),
    },
    served={
        "task_type": _task,
        "finetune_language_layers": _tuned("finetune_language_layers", "True; a model here has no other layers"),
        **{
            name: _tuned(name, f"target_modules with the names of the other projections, as {others}")
            for name, others in (
                ("finetune_attention_modules", "['gate_proj', 'up_proj', 'down_proj']"),
                ("finetune_mlp_modules", "['q_proj', 'k_proj', 'v_proj', 'o_proj']"),
            )
        },
    },
)

#: Attributes of other libraries' models that are not there → what to use.
MODEL: Mapping[str, str] = {
    "fast_generate": "model.generate(prompts, …), which has its own engine",
    "load_lora": "generate(…, adapter=FastLanguageModel.load_adapter(base.value, folder))",
    "vllm_engine": "model.generate, which has its own engine",
    "save_pretrained_torchao": "save_pretrained_merged(folder, dtype='int4-128', …), which writes compressed-tensors",
    **dict.fromkeys(("encode", "similarity", "prompts"), "model.logits or model.rewards; embeddings are not built"),
    **dict.fromkeys(("infer", "add_image_preprocess"), "model.generate with texts; images are not read"),
    "generation_config": "keywords of generate, or the folder's generation_config.json, which it reads",
    **dict.fromkeys(("parameters", "named_parameters", "state_dict"), "model.trainable and model.frozen, trees"),
    **dict.fromkeys(("modules", "named_modules"), "model.module(), the decoder itself"),
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "float", "bfloat16"),
        "from_pretrained(dtype=…), on the devices that JAX finds; JAX_PLATFORMS=cpu chooses the CPU",
    ),
    **dict.fromkeys(("merge_and_unload", "merge_adapter"), "save_pretrained_merged(folder, tokenizer)"),
    **dict.fromkeys(("disable_adapter", "set_adapter"), "logits(…, adapters=False), or generate(…, adapter=…)"),
    **dict.fromkeys(
        ("gradient_checkpointing_enable", "enable_input_require_grads"), "get_peft_model(use_gradient_checkpointing=…)"
    ),
    "peft_config": "model.lora, the adapter's settings",
    "forward": "model.logits(tokens)",
    **dict.fromkeys(("resize_token_embeddings", "get_input_embeddings"), "from_pretrained(…, new_tokens=[…])"),
}

#: Unsloth's names of what an adapter is trained for → format of the layers' matrices, and of their inputs.
QAT_SCHEMES: Mapping[str, tuple[str, str | None]] = {
    "int4": ("int4-128", None),
    "int8": ("int8", None),
    "int8-int4": ("int4-32", "int8"),
    "phone-deployment": ("int4-32", "int8"),
    "fp8-int4": ("int4-128", "fp8"),
    "fp8-fp8": ("fp8-row", "fp8"),
    **{name: (scheme.weights, scheme.activations) for name, scheme in NAMED.items()},
}


def qat_scheme_of(name: Any) -> tuple[str, str | None]:
    """Formats of a layer's matrices and of their inputs by a scheme's name.

    Args:
        name: one of `QAT_SCHEMES`.

    Raises:
        ConfigError: another one.
    """
    if not isinstance(name, str) or name not in QAT_SCHEMES:
        raise ConfigError(f"qat_scheme: expected one of {', '.join(QAT_SCHEMES)}, got {shown(name, 60)}")
    return QAT_SCHEMES[name]
