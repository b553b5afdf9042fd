"""Fast, lean fine-tuning of language models on NVIDIA GPUs in JAX.

`from fastjax import FastLanguageModel, Trainer` is where a script starts. They are imported when they are asked for, so
that what needs no JAX (the command line's help, conversions) imports none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.data.chat_templates import get_chat_template as get_chat_template
    from fastjax.data.example_template import apply_chat_template as apply_chat_template
    from fastjax.data.settings import DataSource as DataSource
    from fastjax.data.sharegpt import standardize_data_formats as standardize_data_formats
    from fastjax.data.sharegpt import standardize_sharegpt as standardize_sharegpt
    from fastjax.data.sharegpt import to_sharegpt as to_sharegpt
    from fastjax.language_model import FastLanguageModel as FastLanguageModel
    from fastjax.language_model import LanguageModel as LanguageModel
    from fastjax.language_model import ModelHandle as ModelHandle
    from fastjax.runs.preference_trainers import CPOConfig as CPOConfig
    from fastjax.runs.preference_trainers import CPOTrainer as CPOTrainer
    from fastjax.runs.preference_trainers import DPOConfig as DPOConfig
    from fastjax.runs.preference_trainers import DPOTrainer as DPOTrainer
    from fastjax.runs.preference_trainers import KTOConfig as KTOConfig
    from fastjax.runs.preference_trainers import KTOTrainer as KTOTrainer
    from fastjax.runs.preference_trainers import ORPOConfig as ORPOConfig
    from fastjax.runs.preference_trainers import ORPOTrainer as ORPOTrainer
    from fastjax.runs.preference_trainers import RewardConfig as RewardConfig
    from fastjax.runs.preference_trainers import RewardTrainer as RewardTrainer
    from fastjax.runs.sft import SFTConfig as SFTConfig
    from fastjax.runs.sft import SFTTrainer as SFTTrainer
    from fastjax.runs.sft import train_on_responses_only as train_on_responses_only
    from fastjax.runs.trainer import Event as Event
    from fastjax.runs.trainer import Trainer as Trainer
    from fastjax.runs.trainer import TrainerSettings as TrainerSettings
    from fastjax.trainer import PatchDPOTrainer as PatchDPOTrainer
    from fastjax.trainer import UnslothTrainer as UnslothTrainer
    from fastjax.trainer import UnslothTrainingArguments as UnslothTrainingArguments
    from fastjax.trainer import is_bf16_supported as is_bf16_supported
    from fastjax.trainer import is_bfloat16_supported as is_bfloat16_supported
    from fastjax.training.config import OptimizerConfig as OptimizerConfig
    from fastjax.training.config import OutputSection as OutputSection
    from fastjax.training.config import ParallelSection as ParallelSection
    from fastjax.training.config import PreferencesSection as PreferencesSection
    from fastjax.training.config import TrainingSection as TrainingSection

    FastModel = FastLanguageModel

#: Names of Unsloth's for families → the class that serves all.
_FAMILIES = ("Model", "LlamaModel", "MistralModel", "QwenModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel")
_FAMILIES = (*_FAMILIES, "GemmaModel", "Gemma2Model", "CohereModel", "GraniteModel", "FalconH1Model")
_ALIASES = {f"Fast{name}": "FastLanguageModel" for name in _FAMILIES}
_LOSSES = ("CPO", "DPO", "KTO", "ORPO", "Reward")
_MODULES = {
    "fastjax.data.chat_templates": ("get_chat_template",),
    "fastjax.data.example_template": ("apply_chat_template",),
    "fastjax.data.settings": ("DataSource",),
    "fastjax.data.sharegpt": ("standardize_data_formats", "standardize_sharegpt", "to_sharegpt"),
    "fastjax.language_model": ("FastLanguageModel", "LanguageModel", "ModelHandle"),
    "fastjax.runs.preference_trainers": [f"{loss}{kind}" for loss in _LOSSES for kind in ("Config", "Trainer")],
    "fastjax.runs.sft": ("SFTConfig", "SFTTrainer", "train_on_responses_only"),
    "fastjax.runs.trainer": ("Event", "Trainer", "TrainerSettings"),
    "fastjax.trainer": (
        *("PatchDPOTrainer", "UnslothTrainer", "UnslothTrainingArguments"),
        *("is_bf16_supported", "is_bfloat16_supported"),
    ),
    "fastjax.training.config": (
        *("OptimizerConfig", "OutputSection", "ParallelSection", "PreferencesSection", "TrainingSection"),
    ),
}
#: What to use instead of names of Unsloth's and TRL's that are not built → the names.
_NOT_BUILT = {
    "learning by rewards of sampled answers is not built; use DPOTrainer, KTOTrainer or ORPOTrainer over answers that "
    "are judged": (
        *("GRPOTrainer", "GRPOConfig", "RLOOTrainer", "RLOOConfig", "PPOTrainer", "PPOConfig", "OnlineDPOTrainer"),
        *("OnlineDPOConfig", "PatchFastRL", "vLLMSamplingParams", "NashMDTrainer", "XPOTrainer"),
    ),
    "models here read and write text; use FastLanguageModel with rows of text": (
        *("FastVisionModel", "FastTextToSpeechModel", "UnslothVisionDataCollator", "FastAudioModel"),
    ),
    "embeddings of sentences are not built; use FastLanguageModel with model.logits or model.rewards": (
        *("FastSentenceTransformer", "FastEmbeddingModel"),
    ),
    "generated programs are not run here; use a sandbox of your own": (
        *("execute_with_time_limit", "create_locked_down_function", "check_python_modules", "is_port_open"),
        "launch_openenv",
    ),
    "use train_on_responses_only(trainer, instruction_part=…, response_part=…)": ("DataCollatorForCompletionOnlyLM",),
    "this loss is not built; use DPOTrainer, KTOTrainer, ORPOTrainer, CPOTrainer, RewardTrainer or Trainer(loss=…)": (
        *("BCOTrainer", "BCOConfig", "PRMTrainer", "PRMConfig", "GKDTrainer", "GKDConfig", "DistillationTrainer"),
        "DistillationConfig",
    ),
    "use get_chat_template": ("clone_chat_template", "setup_chat_format", "get_training_chat_template"),
    "use fastjax train FILE, whose file and command line have every setting": (
        *("ScriptArguments", "ModelConfig", "TrlParser", "DatasetMixtureConfig", "get_dataset"),
    ),
    "use FastLanguageModel.get_peft_model(model, r=…, lora_alpha=…)": ("get_peft_config", "LoraConfig"),
    "use FastLanguageModel.from_pretrained(name, load_in_4bit=…), which gives the tokenizer, too": (
        *("get_quantization_config", "get_kbit_device_map", "BitsAndBytesConfig", "AutoModelForCausalLM"),
        "AutoTokenizer",
    ),
    "use SFTConfig, or transformers' own as args": ("TrainingArguments",),
    "use from_pretrained(new_tokens=[…])": ("add_new_tokens",),
    "use trainer.train()": ("unsloth_train",),
    "import it from transformers": ("TextStreamer", "TextIteratorStreamer", "TrainerCallback", "EarlyStoppingCallback"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_MODULE_OF, *_ALIASES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    for instead, names in _NOT_BUILT.items():
        if name in names:
            raise ImportError(f"{name}: {instead}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
