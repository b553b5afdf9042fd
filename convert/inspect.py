"""A folder's contents from config and headers alone: family, parameters, formats, unsupported features."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.adapters import open_adapter
from convert.checkpoint import CONFIG, Checkpoint, open_checkpoint
from convert.errors import ConvertError
from convert.families import FAMILIES
from convert.families.mapping import read_config
from convert.formats import nf4
from convert.model.paths import HEAD, SCORE
from convert.source import count_tokens
from convert.weights import Weights, open_weights

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Inspection:
    """The contents of a folder.

    Attributes:
        folder: Its path.
        kind: "model" or "adapter".
        family: model_type of config.json; for an adapter the base's name.
        parameters: Their number, tied ones once; None if the family's table does not fit.
        formats: "bfloat16", "nf4", … -> (tensors, bytes with scales).
        files: Number of weight files.
        tied: Whether the embedding is also the head; None for an adapter and a reward model.
        tokens: Number of tokens; None without a tokenizer.json.
        chat_template: Whether there is one.
        ignored: Skipped names -> the reason.
        settings: Further facts: a model's sizes, an adapter's rank and targets.
        unsupported: Reasons why it cannot be read, in sentences; empty if it can.
    """

    folder: Path
    kind: str
    family: str | None
    parameters: int | None
    formats: Mapping[str, tuple[int, int]]
    files: int
    tied: bool | None
    tokens: int | None
    chat_template: bool
    ignored: Mapping[str, str]
    settings: Mapping[str, Any]
    unsupported: tuple[str, ...]


def inspect(folder: str | os.PathLike[str]) -> Inspection:
    """Inspect a model or adapter folder; no tensor is read.

    Args:
        folder: The folder.

    Raises:
        ConvertError: It is neither, or its files are damaged.
    """
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        return _adapter(folder)
    checkpoint = open_checkpoint(folder)
    problems: list[str] = []
    weights, config = None, checkpoint.config
    try:
        weights = open_weights(folder)
    except ConvertError as error:
        problems.append(str(error))
    try:
        read_config(config, where=str(folder / CONFIG))
    except ConvertError as error:
        problems.append(str(error))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text = config.get("text_config")
    shown = text if isinstance(text, dict) else config
    quantization = config.get("quantization_config")
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    named = (*sizes, "head_dim", "vocab_size", "max_position_embeddings", *experts)
    settings = {name: shown[name] for name in named if name in shown}
    if isinstance(quantization, dict):
        settings["quantization"] = quantization.get("quant_method")
    return Inspection(
        folder,
        "model",
        config.get("model_type"),
        None if weights is None else sum(math.prod(row.shape) for row in weights.specs.values()),
        _formats(checkpoint, weights),
        len({info.file for info in checkpoint.tensors.values()}),
        None if weights is None or f"{SCORE}.weight" in weights.specs else f"{HEAD}.weight" not in weights.specs,
        count_tokens(folder),
        _has_template(folder),
        {} if weights is None else _ignored(weights),
        settings,
        tuple(dict.fromkeys(problems)),
    )


def _adapter(folder: Path) -> Inspection:
    tokens, template = count_tokens(folder), _has_template(folder)
    problems = []
    for family in FAMILIES.values():  # adapters do not name their family
        try:
            adapter = open_adapter(folder, family=family)
            break
        except ConvertError as error:
            problems.append(str(error))
    else:
        return Inspection(folder, "adapter", None, None, {}, 0, None, tokens, template, {}, {}, (problems[0],))
    stored = adapter.stored.values()
    names = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "target_parameters", "modules_to_save")
    settings = {name: getattr(adapter.config, name) for name in (*names, "revision")}
    return Inspection(
        folder,
        "adapter",
        adapter.config.base_model_name_or_path,
        sum(math.prod(info.shape) for info in stored),
        _totals((info.dtype, info.nbytes) for info in stored),
        1,
        None,
        tokens,
        template,
        {},
        {name: value for name, value in settings.items() if value not in (None, False)},
        (),
    )


def _formats(checkpoint: Checkpoint, weights: Weights | None) -> dict[str, tuple[int, int]]:
    """Formats of the weights; for an unknown family dtypes."""
    if weights is None:
        parts = (name.endswith(nf4.QUANT_STATE) for name in checkpoint.tensors)
        kinds = zip(checkpoint.tensors.values(), parts, strict=True)
        return _totals((f"nf4 parts ({i.dtype})" if part else i.dtype, i.nbytes) for i, part in kinds)
    sizes = {name: sum(checkpoint.info(part).nbytes for part in weights.stored_names(name)) for name in weights.tensors}
    return _totals((weights.tensor_format(name).name, size) for name, size in sizes.items())


def _totals(tensors: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Format -> its tensors and their bytes."""
    totals: dict[str, tuple[int, int]] = {}
    for kind, size in tensors:
        count, total = totals.get(kind, (0, 0))
        totals[kind] = count + 1, total + size
    return totals


def _ignored(weights: Weights) -> dict[str, str]:
    reasons = {}
    for name, tensor in weights.in_files():
        rule = None if tensor else weights.ignored(name)
        if rule is not None:
            reasons[name] = rule.reason
    return dict(sorted(reasons.items()))


def _has_template(folder: Path) -> bool:
    if any(folder.glob("chat_template*")):
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and b'"chat_template"' in file.read_bytes()
