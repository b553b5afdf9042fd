"""Commands for a run's result: this project's, with Hugging Face's libraries, and those of other servers."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from convert.families import FAMILIES, family_for
from convert.families.mapping import read_config
from convert.formats.compressed import group_weights
from convert.hub import split
from convert.model.spec import QUANTIZED
from fastjax.models.module_names import module_paths
from fastjax.training.config import ModelSection, TrainConfig

_CONVERT = "# transformers does not bring this base into 4 bits: fastjax convert quantize {} base-nf4"
_MERGE = "# transformers does not hold a mixture's experts in 4 bits as the run did; merge into the run's base before:"


class Usage(NamedTuple):
    """Ways to use a run's result.

    Attributes:
        own: this project's commands, a line each; of a reward model code of Python.
        python: code that loads it with Hugging Face's libraries.
        servers: commands for vLLM, llama.cpp and Ollama; "": it has none.
    """

    own: str
    python: str
    servers: str

    @property
    def blocks(self) -> list[str]:
        """All of them, for a report."""
        return [text for text in self if text]


def usage(
    model: ModelSection,
    folder: Path | str,
    base: Mapping[str, Any],
    dtype: str,
    *,
    scores: bool = False,
    called: str = "model",
) -> Usage:
    """Commands and Python code that load the trained weights over their base.

    Args:
        model: how the base was loaded.
        folder: the adapter, or the model after full fine-tuning; or its name on the hub.
        base: the base's config.json, with the run's scaling of the positions.
        dtype: of the run's computation.
        scores: whether it is a reward model.
        called: the name for Ollama.
    """
    result, merged = str(folder), False
    auto = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    if model.full_finetuning:
        options, lines, names = ["--model", result], [f"model = {_load(auto, _text(result))}"], set()
    else:
        options = ["--model", model.model_name, "--adapter", result] + ["--load_in_4bit"] * model.in_nf4
        options += ["--rope_scaling", json.dumps(model.rope_scaling)] if model.rope_scaling is not None else []
        merged = _merges(model, base)
        if merged:
            lines, names = _merged(model, base, result, dtype, auto)
        else:
            lines, names = _base(model, base, dtype, auto, {"num_labels": "1"} if scores else {})
    options += ["--dtype", model.dtype] if model.dtype is not None else []
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_text(result)})")
    libraries = []
    if not model.full_finetuning and not merged:
        libraries.append("from peft import PeftModel")
        if model.new_tokens:
            rows = "max(len(tokenizer), model.get_input_embeddings().num_embeddings)"
            lines.append(f"model.resize_token_embeddings({rows})")
        lines.append(f"model = PeftModel.from_pretrained(model, {_text(result)})")
    libraries.append(f"from transformers import {', '.join(sorted({auto, 'AutoTokenizer', *names}))}")
    if any("torch." in line for line in lines):
        libraries.insert(0, "import torch")
    python = "\n".join([*libraries, "", *lines])
    if scores:
        return Usage(_scoring(model, result), python, "")
    generate = shlex.join(["fastjax", "generate", *options]) + " --prompt '…'"
    serve = shlex.join(["fastjax", "serve", *options])
    own = f"fastjax chat {shlex.quote(result)}\n{serve}\n{generate}"
    return Usage(own, python, _servers(model, Path(folder), base, called))


def usage_of_run(config: TrainConfig, folder: Path, base: Mapping[str, Any], dtype: str) -> Usage:
    """Commands and Python code for the result of a run.

    Args:
        config: its settings.
        folder: of the result.
        base: as of `usage`.
        dtype: as of `usage`.
    """
    called = config.output.run_name or Path(config.output.output_dir).name
    return usage(config.model, folder, base, dtype, scores=config.preferences.scores, called=called)


def _servers(model: ModelSection, folder: Path, base: Mapping[str, Any], called: str) -> str:
    """Commands for other servers, which take an adapter merged into its base."""
    if model.rope_scaling is not None and not model.full_finetuning:
        return ""  # the merged folder does not have it
    whole = folder if model.full_finetuning else folder.with_name(f"{folder.name}-merged")
    lines = []
    if not model.full_finetuning:
        lines.append(f"{shlex.join(_merge_command(model, base, str(folder), str(whole)))}  # for all of the following")
    lines.append(f"vllm serve {shlex.quote(str(whole))}")
    family = FAMILIES.get(base.get("model_type", ""))
    if family is None or isinstance(family.gguf, str):
        return "\n".join(lines)
    gguf = str(whole.with_name(f"{whole.name}-q8_0.gguf"))
    modelfile = str(Path(gguf).with_suffix(".Modelfile"))
    name = re.sub(r"[^a-z0-9._-]+", "-", called.lower()).strip("-._") or "model"
    lines += [
        shlex.join(["fastjax", "convert", "gguf", str(whole), gguf, "--type", "q8_0"]),
        f"llama-server -m {shlex.quote(gguf)} --jinja",
        shlex.join(["ollama", "create", name, "-f", modelfile]) + f" && ollama run {name}",
    ]
    return "\n".join(lines)


def _merge_command(model: ModelSection, config: Mapping[str, Any], result: str, out: str) -> list[str]:
    """The command that merges an adapter into its base as the run held it."""
    command = ["fastjax", "convert", "merge", model.model_name, result, out]
    if model.in_nf4 and not _has_4_bits(config):
        command.append("--base_in_nf4")
        if model.float32_modules:
            parsed = read_config(config)
            in_float32 = module_paths(model.float32_modules, parsed)
            skipped = [s.path.module for s in parsed.specs if s.kind in QUANTIZED and s.path.module in in_float32]
            command += ["--skip", *skipped] if skipped else []
    return command


def _scoring(model: ModelSection, result: str) -> str:
    """Python code that scores a conversation with a reward model."""
    given = {"load_in_4bit": model.in_nf4, "dtype": model.dtype, "rope_scaling": model.rope_scaling}
    options = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
    return "\n".join(
        [
            "from fastjax import FastLanguageModel",
            "",
            f"model, tokenizer = FastLanguageModel.from_pretrained({_text(result)}{options})",
            'said = [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]',
            "print(model.rewards([said]))",
        ]
    )


def _base(
    model: ModelSection, config: Mapping[str, Any], dtype: str, auto: str, given: Mapping[str, str]
) -> tuple[list[str], set[str]]:
    """Code that loads an adapter's base as the run held it, and its imports from transformers."""
    name, revision = split(model.model_name)
    source = _text(name) + (f", revision={_text(revision)}" if revision is not None else "")
    stored = config.get("dtype", config.get("torch_dtype"))
    kind = (config.get("quantization_config") or {}).get("quant_method")
    lines, options, names = [], dict(given), set()
    if model.in_nf4 and kind is not None and not _has_4_bits(config):
        lines.append(_CONVERT.format(shlex.quote(model.model_name)))
        source, kind = '"base-nf4"', "bitsandbytes"
    lines += _longer(model, config, source, options, names)
    if model.in_nf4 and kind is None:
        lines += _in_4bit(model, dtype)
        options["quantization_config"] = "settings"
        names.add("BitsAndBytesConfig")
        if stored is not None:  # what 4 bits decode to
            options["dtype"] = _text(stored)
    elif kind is None and stored != dtype:
        options["dtype"] = _text(dtype)
    lines.append(f"model = {_load(auto, source, options)}")
    if (
        model.in_nf4 and kind in (None, "bitsandbytes") and stored != dtype
    ):  # bitsandbytes' own products decode to that dtype instead
        lines.append(f"model = model.dequantize().to(torch.{dtype})  # computes in {dtype} with what 4 bits decode to")
    return lines, names


def _merges(model: ModelSection, config: Mapping[str, Any]) -> bool:
    """Whether the base is a mixture in 4 bits, which transformers does not bring its experts into."""
    family = FAMILIES.get(config.get("model_type", ""))
    return model.in_nf4 and family is not None and family.mixture is not None


def _merged(
    model: ModelSection, config: Mapping[str, Any], result: str, dtype: str, auto: str
) -> tuple[list[str], set[str]]:
    """Code that loads the base with the adapter merged into it, and its imports from transformers."""
    command = _merge_command(model, config, result, "merged")
    if config.get("dtype", config.get("torch_dtype")) != dtype:
        command += ["--dtype", dtype]
    options, names = {}, set()
    longer = _longer(model, config, '"merged"', options, names)
    return [_MERGE, f"# {shlex.join(command)}", *longer, f"model = {_load(auto, _text('merged'), options)}"], names


def _has_4_bits(config: Mapping[str, Any]) -> bool:
    """Whether a base has 4 bits in its folder, which a run in 4 bits keeps."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    kinds = [weights.get("num_bits") for _, weights in group_weights(quantization)]
    return method in ("bitsandbytes", "mxfp4") or 4 in kinds or "NVFP4" in str(quantization.get("quant_algo"))


def _longer(
    model: ModelSection, config: Mapping[str, Any], source: str, options: dict[str, str], names: set[str]
) -> list[str]:
    """Code for the run's scaling of the positions, which no adapter's folder has a place for."""
    if model.rope_scaling is None:
        return []
    options["config"] = "config"
    names.add("AutoConfig")
    lines = [f"config.{name} = {value!r}" for name, value in _positions(config).items()]
    return [f"config = AutoConfig.from_pretrained({source})", *lines]


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions of a config.json, as attributes of transformers' config."""
    family = family_for(config)
    text = family.text_config(config)
    rope = text.get("rope_parameters") or {"rope_theta": text["rope_theta"], **text["rope_scaling"]}
    prefix = "" if family.section is None else f"{family.section}."
    attributes = {"rope_parameters": rope, "max_position_embeddings": text["max_position_embeddings"]}
    return {prefix + name: value for name, value in attributes.items()}


def _in_4bit(model: ModelSection, dtype: str) -> list[str]:
    """Code that quantises a 16-bit base as the run did."""
    # These replace the default list, which has the head.
    skipped = ["lm_head", "score", *(rf".*\.{name.removeprefix('model.')}" for name in model.float32_modules or ())]
    return [
        "settings = BitsAndBytesConfig(",
        "    load_in_4bit=True,",
        '    bnb_4bit_quant_type="nf4",',
        "    bnb_4bit_use_double_quant=True,",
        f"    bnb_4bit_compute_dtype={_text(dtype)},",
        *([f"    llm_int8_skip_modules={json.dumps(skipped)},"] if model.float32_modules else []),
        ")",
    ]


def _load(auto: str, source: str, options: Mapping[str, str] | None = None) -> str:
    given = "".join(f", {name}={value}" for name, value in (options or {}).items())
    return f"{auto}.from_pretrained({source}{given})"


def _text(value: str) -> str:
    """A Python string literal in double quotes."""
    return json.dumps(value, ensure_ascii=False)
