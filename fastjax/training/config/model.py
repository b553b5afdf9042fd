"""The sections `model` and `lora`: the arguments of `FastLanguageModel.from_pretrained` and `.get_peft_model`."""

import dataclasses

from fastjax.errors import ConfigError
from fastjax.execution.options import Length, LoadOptions
from fastjax.lora.settings import LoraSettings
from fastjax.options import checked
from fastjax.options.kinds import Repository


@dataclasses.dataclass(frozen=True)
class ModelName:
    """The model that is loaded."""

    model_name: Repository
    """folder of the base model in Hugging Face format, or its name on the hub, org/model or org/model@revision; the run
    keeps the commit that it took."""


@checked("model")
class ModelSection(LoadOptions, ModelName):
    """The base model and how it is held."""

    max_seq_length: Length = 2048
    """length of a row, in tokens."""


@dataclasses.dataclass(frozen=True)
class AdapterStart:
    """Where the adapter comes from."""

    adapter: Repository | None = None
    """folder of a PEFT adapter to start from, or its name on the hub; it brings its own settings, so no other key but
    lora_dropout may stand beside it."""


@checked("lora")
class LoraSection(LoraSettings, AdapterStart):
    """The adapter, with PEFT's names and meanings."""

    def __post_init__(self) -> None:
        if self.adapter is not None:
            others = [f for f in dataclasses.fields(self) if f.name not in ("adapter", "lora_dropout")]
            changed = [field.name for field in others if getattr(self, field.name) != field.default]
            if changed:
                raise ConfigError(
                    f"lora.adapter: expected no settings beside an adapter to start from, which has its own, got "
                    f"{', '.join(f'lora.{name}' for name in changed)}"
                )
