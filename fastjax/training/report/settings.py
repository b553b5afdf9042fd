"""The settings of a run beside their defaults, and the commands that use its result."""

import dataclasses
import json
import shlex
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from convert.hub import split
from fastjax.training.config import TrainConfig


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: section.key.
        value: as YAML would write it.
        default: the same; "" where it has none.
        changed: whether the two differ.
    """

    name: str
    value: str
    default: str
    changed: bool


def default_settings() -> dict[str, dict[str, Any]]:
    """The default of every setting that has one, by section."""
    sections = {}
    for name, section in typing.get_type_hints(TrainConfig).items():
        sections[name] = {}
        for field in dataclasses.fields(section):
            if field.default is not dataclasses.MISSING:
                sections[name][field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                sections[name][field.name] = field.default_factory()
    return sections


def list_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Setting]:
    """The settings in one list, those that differ from their defaults first.

    Args:
        config: section → key → value.
        defaults: the same for the defaults; a key that is not there has none.
    """
    settings = []
    for section, values in config.items():
        for key, value in values.items():
            known = key in defaults.get(section, {})
            default = defaults[section][key] if known else None
            shown = _show(default) if known else ""
            settings.append(Setting(f"{section}.{key}", _show(value), shown, not known or value != default))
    return sorted(settings, key=lambda setting: not setting.changed)


def usage(config: TrainConfig, folder: Path) -> list[str]:
    """How to use the result: on the command line, and from Python with Hugging Face's libraries.

    Args:
        config: the settings of the run.
        folder: the adapter, or the model after full fine-tuning.
    """
    base, scaling = config.model.model_name, config.model.rope_scaling
    name, revision = split(base)
    found = repr(name) + (f", revision={revision!r}" if revision is not None else "")
    if config.model.full_finetuning:
        options = ["--model", str(folder)]
        libraries = "from transformers import AutoModelForCausalLM"
        lines = [f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})"]
    else:
        options = ["--model", base, "--adapter", str(folder)] + ["--load_in_4bit"] * config.model.load_in_4bit
        options += ["--rope_scaling", json.dumps(scaling)] if scaling is not None else []
        libraries = "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM"
        lines = [f"model = AutoModelForCausalLM.from_pretrained({found})"]
        if scaling is not None:  # an adapter's folder has no place for it
            libraries = "from peft import PeftModel\nfrom transformers import AutoConfig, AutoModelForCausalLM"
            lines = [
                f"config = AutoConfig.from_pretrained({found})",
                f'config.rope_parameters = {{"rope_theta": config.rope_parameters["rope_theta"], **{scaling!r}}}',
                f"model = AutoModelForCausalLM.from_pretrained({found}, config=config)",
            ]
        if config.model.new_tokens:
            libraries = libraries.replace("transformers import", "transformers import AutoTokenizer,")
            lines += [
                f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})",
                "model.resize_token_embeddings(max(len(tokenizer), model.get_input_embeddings().num_embeddings))",
            ]
        lines.append(f"model = PeftModel.from_pretrained(model, {str(folder)!r})")
    python = "\n".join([libraries, "", *lines])
    return [shlex.join(["fastjax", "generate", *options]) + " --prompt '…'", python]


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
