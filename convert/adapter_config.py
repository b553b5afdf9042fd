"""adapter_config.json: PEFT's LoRA settings, and the modules that they select.

The dataclass has the supported fields, under PEFT's names. Any other field of PEFT's is refused by name when it is off
its default, never ignored; so is an unknown field that is neither null nor false.
Matching follows PEFT 0.21 (``check_target_module_exists``, ``get_pattern_key``) on Hugging Face module names such as
"model.layers.0.self_attn.q_proj".
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, unexpected
from convert.families import Family
from convert.families.llama import LLAMA
from convert.limits import PATTERN_LENGTH, PATTERNS
from convert.model.paths import WeightPath
from convert.patterns import first_match, fullmatch, match, mistake
from convert.renamed_modules import to_modules

CONFIG = "adapter_config.json"
PEFT_VERSION = "0.21.2"  # of the written format
#: Parameters that `target_parameters` may name: those of a mixture's experts, the inner one of PEFT's wrappers first.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
#: Parameters of a router that `target_parameters` may name.
ROUTER_PARAMETERS = ("gate.weight", "router.weight")
#: Task of an adapter on a model with a score in the place of logits.
SCORED = "SEQ_CLS"
INITIALIZATIONS = (True, False, "gaussian", "orthogonal")

# PEFT's other fields: their "off" value. Fields that only qualify one of these may hold anything.
_OFF: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "layer_replication": None,
    "loftq_config": {},
    "megatron_config": None,
    "use_qalora": False,
}
_QUALIFIERS = ("auto_mapping", "megatron_core", "qalora_group_size", "peft_type", "peft_version", "runtime_config")


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA settings; names, meanings and defaults are PEFT's (``LoraConfig``).

    Attributes:
        r: Rank.
        lora_alpha: The update is scaled by ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with `use_rslora`.
        lora_dropout: Dropout on the adapter's input.
        target_modules: Module names (whole, or the last parts), a regular expression for the whole name, or
            "all-linear" for every matrix in the layers.
        target_parameters: Names of parameters (whole, or the last parts) with adapters: those of a mixture's experts,
            "mlp.experts.gate_up_proj" and "mlp.experts.down_proj", and of its router, "mlp.gate.weight". Files have
            the weights of some modules here (`convert.renamed_modules`).
        exclude_modules: Modules without an adapter, named as in `target_modules`.
        modules_to_save: Modules trained whole and saved with the adapter.
        layers_to_transform: The only layers with adapters.
        layers_pattern: Name of the list of layers, where there are several lists.
        rank_pattern: Regular expression for the last parts of a name -> rank; the first match counts.
        alpha_pattern: Regular expression for the last parts of a name -> lora_alpha; the first match counts.
        use_rslora: See `lora_alpha`.
        use_dora: Weight-decomposed adapters (arXiv 2402.09353).
        init_lora_weights: How adapters start: True, False, "gaussian" or "orthogonal".
        trainable_token_indices: Tokens with trained rows, of the embedding (and with it of a tied head), or for
            each of the tables "embed_tokens" and "lm_head".
        ensure_weight_tying: Keep tied embeddings and head tied in the adapter too.
        base_model_name_or_path: The base model.
        revision: Of that model.
        task_type: "CAUSAL_LM"; or `SCORED`, for a reward model, with "score" in `modules_to_save`.
        inference_mode: Written as true by PEFT; nothing depends on it here.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: bool | str = True
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = "CAUSAL_LM"
    inference_mode: bool = False

    def __post_init__(self):
        _check(self)


def config_from_json(raw: Mapping[str, Any], file: str | os.PathLike[str]) -> AdapterConfig:
    """Read the contents of adapter_config.json.

    Args:
        raw: The JSON object.
        file: Its path, for messages.

    Returns:
        The settings.

    Raises:
        ConvertError: A field of the wrong type, or one that is not supported and off its default.
    """
    if raw.get("peft_type") != "LORA":
        raise unexpected(file, "peft_type", "'LORA'", raw.get("peft_type"))
    known = {item.name: item for item in dataclasses.fields(AdapterConfig)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name in known:
            values[name] = value
        elif name in _OFF:
            if value != _OFF[name] and value not in (None, False):
                raise unexpected(file, name, f"{_OFF[name]!r}: other values are not supported", value)
        elif name not in _QUALIFIERS and value not in (None, False, {}, []):
            raise unexpected(file, name, "null or false: the field is not supported", value)
    for name in ("rank_pattern", "alpha_pattern"):
        values[name] = {} if values.get(name) is None else values[name]
    saved = values.get("modules_to_save")
    if values.get("task_type") == SCORED and isinstance(saved, list):  # PEFT adds what it calls heads elsewhere
        values["modules_to_save"] = [
            name for n, name in enumerate(saved) if name != "classifier" and name not in saved[:n]
        ]
    values, renamed = to_modules(values)
    try:
        config = AdapterConfig(**values)
    except ConvertError as error:  # its message starts with the file's bare name
        raise ConvertError(f"{Path(file).parent}{os.sep}{error}") from None
    if config.target_modules is None and not config.target_parameters:
        raise unexpected(file, "target_modules", "a list of names or a regular expression", None)
    for name in renamed:
        if rank_and_alpha(config, name) != rank_and_alpha(config, f"{name}.weight"):
            expected = f"the same rank and alpha for {name} and, by its name in target_parameters, {name}.weight"
            raise unexpected(file, "rank_pattern, alpha_pattern", expected, [config.rank_pattern, config.alpha_pattern])
    return config


def config_to_json(config: AdapterConfig, family: Family = LLAMA) -> dict[str, Any]:
    """The contents of adapter_config.json for a trained adapter.

    Args:
        config: The settings.
        family: The base model's.

    Returns:
        A JSON object for PEFT's ``LoraConfig``. `init_lora_weights` is always true: PEFT starts an adapter before it
        loads one, at random for other values. Parts beside a text model, such as a vision tower, are excluded: their
        modules have the same names.
    """
    result = dataclasses.asdict(config) | {"init_lora_weights": True}
    excluded = config.exclude_modules or []
    beside = [name.removeprefix("model.") for name in family.beside if not _named(excluded, f"{name}.x")]
    if beside:
        result["exclude_modules"] = "|".join([*_expressions(excluded), *(rf".*{name}\..*" for name in beside)])
    result |= {"peft_type": "LORA", "peft_version": PEFT_VERSION, "bias": "none", "inference_mode": True}
    return result


def targets(config: AdapterConfig, module: str, *, family: Family = LLAMA) -> bool:
    """Whether PEFT would put an adapter on a module.

    Args:
        config: The settings.
        module: The module's Hugging Face name, "model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head".
        family: The model's table, for "all-linear".

    Returns:
        True for a target. Entries of a list match the whole name or its last parts, a string the whole name;
        `exclude_modules` and `modules_to_save` win; `layers_to_transform` limits what matched by its last parts.
    """
    if config.exclude_modules and _named(config.exclude_modules, module):
        return False
    if any(match(rf"(^|.*\.){name}($|\..*)", module) for name in config.modules_to_save or ()):
        return False
    if config.target_modules is None:
        return False
    if isinstance(config.target_modules, str):
        if config.target_modules.lower() == "all-linear":
            return family.is_layer_linear(module)
        return fullmatch(config.target_modules, module) is not None
    if module in config.target_modules:
        return True
    if not _named(config.target_modules, module):
        return False
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    layer = _layer(config, module)
    return layer is not None and layer in ([layers] if isinstance(layers, int) else layers)


def targets_parameter(config: AdapterConfig, parameter: str) -> bool:
    """Whether PEFT would put an adapter on a parameter, by its Hugging Face name; other selections do not matter.

    Args:
        config: The settings.
        parameter: "model.layers.0.mlp.experts.gate_up_proj".
    """
    return _named(config.target_parameters or [], parameter)


def selects(config: AdapterConfig, module: WeightPath, family: Family) -> bool:
    """Whether PEFT would put an adapter on a module: experts' matrices and routers are parameters to it.

    Args:
        config: The settings.
        module: The module's path in the tree.
        family: The model's table.
    """
    name = tuned_name(module, family)
    of_parameter = module.of_experts or module.is_router
    return targets_parameter(config, name) if of_parameter else targets(config, name, family=family)


def tuned_name(module: str, family: Family) -> str:
    """The name by which PEFT looks an adapted module up: of a mixture's experts and routers their parameter's.

    Args:
        module: The module's path in the tree.
        family: The model's table.

    Raises:
        ConvertError: The family has no such module.
    """
    return family.module_name(module) + (".weight" if WeightPath.parse(module).is_router else "")


def rank_and_alpha(config: AdapterConfig, module: str) -> tuple[int, float]:
    """A module's rank and alpha, after `rank_pattern` and `alpha_pattern`.

    Args:
        config: The settings.
        module: The module's name in PEFT (`tuned_name`).

    Returns:
        (r, lora_alpha).
    """
    return (
        first_match(config.rank_pattern, module, config.r),
        first_match(config.alpha_pattern, module, config.lora_alpha),
    )


def scaling(config: AdapterConfig, module: str) -> float:
    """The factor of a module's B·A: alpha / r, or alpha / √r with ``use_rslora`` (arXiv 2312.03732).

    Args:
        config: The settings.
        module: The module's name in PEFT (`tuned_name`).
    """
    rank, alpha = rank_and_alpha(config, module)
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def saves_whole(config: AdapterConfig, module: str) -> bool:
    """Whether PEFT trains a module whole: its name, or that of a block around it, ends as ``modules_to_save`` says.

    Args:
        config: The settings.
        module: The module's Hugging Face name.
    """
    return any(f"{name}." in f"{module}." for name in config.modules_to_save or ())


def _named(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _expressions(names: list[str] | str) -> list[str]:
    """Names of modules as regular expressions for the whole name."""
    if isinstance(names, str):
        rest = re.sub(r"^(?:\(\?[a-zA-Z]+\))+", "", names)  # flags may stand at the beginning of an expression alone
        flags = "".join(dict.fromkeys(re.findall("[a-zA-Z]", names.removesuffix(rest))))
        return [f"(?{flags}:{rest})"]
    return [rf"(?:.*\.)?{re.escape(name)}" for name in names]


def _layer(config: AdapterConfig, module: str) -> int | None:
    """The layer's number in a name: its first numbered part, or the one after `layers_pattern`."""
    if config.layers_pattern:
        names = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern
        matches = (match(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.", module) for name in names)
        matched = next((matched for matched in matches if matched), None)
    else:
        matched = match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)
    return None if matched is None else int(matched["index"])


def _check(config: AdapterConfig) -> None:
    """Types, ranges and regular expressions, each with the field's name."""

    def need(name: str, right: bool, expected: str) -> None:
        if not right:
            raise unexpected(CONFIG, name, expected, getattr(config, name))

    need("r", _positive(config.r), "a positive integer")
    need("lora_alpha", _number(config.lora_alpha), "a number")
    need("lora_dropout", _number(config.lora_dropout) and 0 <= config.lora_dropout < 1, "a number from 0 to below 1")
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = getattr(config, name)
        need(name, value is None or isinstance(value, str) or _strings(value), "a list of strings, a string or null")
    parameters = config.target_parameters
    need("target_parameters", parameters is None or _strings(parameters), "a list of strings or null")
    served = (*EXPERT_PARAMETERS, *ROUTER_PARAMETERS)
    known = all(f".{name}".endswith(tuple(f".{one}" for one in served)) for name in parameters or ())
    need("target_parameters", known, f"parameters of experts or routers, which end with {', '.join(served)}")
    need("use_dora", not (parameters and config.use_dora is True), "false with target_parameters, as in PEFT")
    need("lora_dropout", not (parameters and config.lora_dropout), "0 with target_parameters, as in PEFT")
    need("modules_to_save", config.modules_to_save is None or _strings(config.modules_to_save), "a list of strings")
    layers = config.layers_to_transform
    listed = isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers)
    need("layers_to_transform", layers is None or listed or (type(layers) is int and layers >= 0), "layer numbers")
    rows = config.trainable_token_indices
    by_table = list(rows.values()) if isinstance(rows, dict) else [[] if rows is None else rows]
    right = all(isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in by_table)
    need("trainable_token_indices", right, "a list of token ids, or an object {module: token ids}")
    ranks, alphas = config.rank_pattern, config.alpha_pattern
    need("rank_pattern", _strings_to(ranks, _positive), "an object {pattern: positive integer}")
    need("alpha_pattern", _strings_to(alphas, _number), "an object {pattern: number}")
    for name in ("use_rslora", "use_dora", "ensure_weight_tying", "inference_mode"):
        need(name, isinstance(getattr(config, name), bool), "true or false")
    for name in ("base_model_name_or_path", "revision", "task_type"):
        value = getattr(config, name)
        need(name, value is None or isinstance(value, str), "a string or null")
    start = config.init_lora_weights
    right = isinstance(start, (bool, str)) and start in INITIALIZATIONS
    need("init_lora_weights", right, "true, false, 'gaussian' or 'orthogonal'; other starts are not supported")

    if isinstance(config.target_modules, str):
        need("layers_to_transform", layers is None, "null, since target_modules is a string")
        need("layers_pattern", config.layers_pattern is None, "null, since target_modules is a string")
    need("layers_pattern", not config.layers_pattern or layers is not None, "null without layers_to_transform")
    _check_expressions(config)


def _check_expressions(config: AdapterConfig) -> None:
    """Number, length and validity of names and regular expressions."""
    expressions = {
        "target_modules": [config.target_modules] if isinstance(config.target_modules, str) else [],
        "exclude_modules": [config.exclude_modules] if isinstance(config.exclude_modules, str) else [],
        "layers_pattern": [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern,
        "modules_to_save": config.modules_to_save,
        "rank_pattern": list(config.rank_pattern),
        "alpha_pattern": list(config.alpha_pattern),
    }
    names = expressions | {
        name: getattr(config, name) for name in ("target_modules", "target_parameters", "exclude_modules")
    }
    for name, patterns in names.items():
        listed = [patterns] if isinstance(patterns, str) else patterns or ()
        if len(listed) > PATTERNS:
            raise unexpected(CONFIG, name, f"at most {PATTERNS} names", getattr(config, name))
        if any(len(one) > PATTERN_LENGTH for one in listed):
            raise unexpected(CONFIG, name, f"at most {PATTERN_LENGTH} characters a name", getattr(config, name))
    for name, patterns in expressions.items():
        for pattern in patterns or ():
            whole = name in ("target_modules", "exclude_modules")  # alone, with flags of their own such as (?i)
            wrong = mistake(pattern) or ("" if whole else mistake(rf"(.*\.)?({pattern})$"))
            if wrong:
                raise unexpected(CONFIG, name, f"regular expressions ({wrong})", pattern)


def _positive(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _number(value: Any) -> bool:
    return type(value) in (int, float) and -1e30 < value < 1e30


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _strings_to(value: Any, right: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and right(item) for key, item in value.items())
