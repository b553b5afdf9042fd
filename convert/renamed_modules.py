"""Adapters on dense layers and shared experts that PEFT would take for adapters on the experts and the router.

Transformers 5 holds a mixture's experts as two parameters. PEFT 0.21 therefore reads an expert's projections and the
router in `target_modules`, by the last part of the name and in a list, a regular expression and "all-linear" alike, as
these parameters (``_convert_peft_config_moe``), and passes over a dense layer's or a shared expert's projection of that
name. `target_parameters` it takes at its word: such a module's weight stands there in the file, by its whole name. In
`AdapterConfig` it is a module like any other.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from convert.families import Family
from convert.patterns import first_match

#: The weight of a layer's module, by its whole name; routers are parameters anyway.
_WEIGHT = re.compile(r"(model\.layers\.\d+\..+(?<!\.gate)(?<!\.router))\.weight")


def is_renamed(name: str, family: Family) -> bool:
    """Whether PEFT takes a name in `target_modules` for the experts or the router.

    Args:
        name: A module's, whole or its last parts.
        family: The base model's.
    """
    mixture = family.mixture
    if mixture is None or not mixture.renamed:
        return False
    return any(f".{name}".endswith(f".{last}") for last in (mixture.router_name, *mixture.projections))


def to_parameters(settings: Mapping[str, Any], modules: Iterable[str], family: Family) -> dict[str, Any]:
    """The settings as PEFT reads them rightly.

    Args:
        settings: Contents of adapter_config.json, with these modules in `target_modules`.
        modules: The Hugging Face names of the modules with an adapter, without experts and routers.
        family: The base model's.

    Returns:
        The settings with renamed modules in `target_parameters` alone. A string in `target_modules` is replaced by the
        names of its modules, since PEFT keeps the last part of what it matches. Dropout, which PEFT has not on
        parameters and which only training uses, is 0 then.
    """
    result, modules = dict(settings), list(modules)
    if family.mixture is None or not family.mixture.renamed:
        return result
    parameters = {f"{name}.weight": name for name in modules if is_renamed(name, family)}
    targets = settings["target_modules"]
    listed = modules if isinstance(targets, str) else targets or []
    result["target_modules"] = [name for name in listed if not is_renamed(name, family)]
    if parameters:
        result["target_parameters"] = list(dict.fromkeys([*(settings["target_parameters"] or []), *parameters]))
        result["lora_dropout"] = 0.0
    for field, default in (("rank_pattern", settings["r"]), ("alpha_pattern", settings["lora_alpha"])):
        patterns = settings[field]
        values = {key: first_match(patterns, name, default) for key, name in parameters.items()}
        exact = {re.escape(key): value for key, value in values.items() if value != first_match(patterns, key, default)}
        result[field] = exact | patterns  # the first match counts
    return result


def to_modules(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The inverse of `to_parameters`: whole names of modules' weights in `target_parameters` become modules.

    Args:
        settings: Contents of adapter_config.json, of any origin and not checked yet.

    Returns:
        The settings, and the names of these modules.
    """
    parameters, targets = settings.get("target_parameters"), settings.get("target_modules") or []
    if not (_are_strings(parameters) and _are_strings(targets)):
        return dict(settings), []
    weights = {name: match for name in parameters if (match := _WEIGHT.fullmatch(name))}
    modules = [match[1] for match in weights.values()]
    if not modules:
        return dict(settings), []
    left = [name for name in parameters if name not in weights]
    together = list(dict.fromkeys([*targets, *modules]))
    return {**settings, "target_modules": together, "target_parameters": left or None}, modules


def _are_strings(names: Any) -> TypeGuard[list[str]]:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
