"""Rotary settings of a config.json in one form, transformers 5's `rope_parameters`.

Before version 5 they were `rope_theta` and `rope_scaling`, whose type was first called `type`. A file may hold several
of these. transformers then takes `rope_scaling` whole, with the base beside it instead of the one in
`rope_parameters` (Gemma 3: merges both), and `rope_type` before `type`. Forms that agree are read; a file that
contradicts the settings that transformers takes is refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from convert.errors import ConvertError, shorten, shown, unexpected

OLD, NEW = "rope_scaling", "rope_parameters"
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
_LAYERS = (FULL, SLIDING)
#: Phi-3's old name of a type -> its name.
_SYNONYMS = {"su": "longrope"}
_PHI3 = {**_SYNONYMS, "yarn": "longrope"}
#: Types relative to the pretraining length.
_FROM_ORIGINAL = ("llama3", "yarn", "longrope", "dynamic")


class RopeSettings(NamedTuple):
    """Rotary settings and their place.

    Attributes:
        field: the field of config.json, for errors.
        values: transformers' names -> values, "rope_type" and "rope_theta" among them.
    """

    field: str
    values: dict[str, Any]


def rope_settings(
    config: Mapping[str, Any], file: str, *, theta: float, positions: int, phi3: bool = False
) -> RopeSettings:
    """Settings of a model with the same rotary positions in all layers.

    Args:
        config: The text model's part of config.json.
        file: Its name in errors.
        theta: Default base.
        positions: max_position_embeddings.
        phi3: Phi-3's rules: "yarn" means longrope, and of two `original_max_position_embeddings` the one beside the
            settings counts. In other families it must agree or have no effect.

    Raises:
        ConvertError: A field is not an object, or two disagree.
    """
    beside, synonyms = {"rope_theta": config.get("rope_theta", theta)}, _PHI3 if phi3 else _SYNONYMS
    if config.get("partial_rotary_factor") is not None:
        beside["partial_rotary_factor"] = config["partial_rotary_factor"]
    spellings = [
        RopeSettings(field, beside | _named(_object(config, field, file), f"{file}: {field}", synonyms))
        for field in (OLD, NEW)
        if _object(config, field, file)
    ]
    for field, values in spellings:
        for name, value in values.items():
            if name in _LAYERS or isinstance(value, dict):
                raise unexpected(file, f"{field}.{shorten(name)}", "settings for all layers at once", value)
    if len(spellings) == 2:
        _agree(spellings[0].values, spellings[1].values, file, f"takes {OLD} alone, with what stands beside it")
    settings = spellings[-1] if spellings else RopeSettings(OLD, beside | {"rope_type": "default"})
    if not phi3:
        _same_original(settings, config, file, positions)
    elif settings.values["rope_type"] == "longrope":
        settings.values[ORIGINAL] = config.get(ORIGINAL, positions)
    return settings


def rope_settings_by_layer(
    config: Mapping[str, Any], file: str, *, theta: float, local_theta: float, positions: int
) -> dict[str, RopeSettings]:
    """Settings of a model with separate rotary positions in windowed layers (Gemma 3).

    Args:
        config: The text model's part of config.json.
        file: Its name in errors.
        theta: Default base of full-attention layers.
        local_theta: Default base of windowed layers.
        positions: max_position_embeddings.

    Returns:
        "full_attention" and "sliding_attention" -> settings. `rope_scaling` belongs to the former alone.

    Raises:
        ConvertError: A field is not an object, or two disagree.
    """
    given, scaling = _object(config, NEW, file), _object(config, OLD, file)
    bases = {FULL: config.get("rope_theta", theta), SLIDING: config.get("rope_local_base_freq", local_theta)}
    settings: dict[str, RopeSettings] = {}
    for layers, base in bases.items():
        field = f"{NEW}.{layers}"
        named_settings = _object(given, layers, file, NEW) or {"rope_type": "default"}
        values = {"rope_theta": base} | _named(named_settings, f"{file}: {field}", _SYNONYMS)
        if layers == FULL and scaling:
            # the default `rope_type` comes before a lone `type`, which transformers ignores here as well
            added = {"rope_theta": base} | _named({**named_settings, **scaling}, f"{file}: {OLD}", _SYNONYMS)
            if given.get(FULL):
                _agree(added, values, file, f"adds {OLD} to {field}")
            field, values = OLD, added
        if config.get("partial_rotary_factor") is not None:
            values.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
        settings[layers] = RopeSettings(field, values)
        _same_original(settings[layers], config, file, positions)
    beside = {name: value for name, value in given.items() if name not in _LAYERS and value is not None}
    named = _named(beside, f"{file}: {NEW}", _SYNONYMS)
    if not {"rope_type", "type"} & set(beside):
        del named["rope_type"]
    for name, value in named.items():  # transformers ignores them
        took = settings[FULL].values.get(name)
        if took != value:
            way_out = f"it takes no settings beside those for {FULL} and {SLIDING}: name these"
            raise unexpected(
                file, f"{NEW}.{shorten(name)}", f"{shown(took)}, as transformers has it ({way_out})", value
            )
    return settings


def _same_original(settings: RopeSettings, config: Mapping[str, Any], file: str, positions: int) -> None:
    """Raise ConvertError for a deviating original length beside the settings: transformers sometimes takes it."""
    outside, kind = config.get(ORIGINAL), settings.values["rope_type"]
    inside = None if kind == "dynamic" else settings.values.get(ORIGINAL)
    used = positions if inside is None else inside
    if outside is not None and kind in _FROM_ORIGINAL and outside != used:
        where = "max_position_embeddings" if inside is None else f"{settings.field}.{ORIGINAL}"
        raise unexpected(file, ORIGINAL, f"{shown(used)}, the {where}, or nothing", outside)


def _object(config: Mapping[str, Any], field: str, file: str, within: str = "") -> dict[str, Any]:
    value = config.get(field)
    if value is not None and not isinstance(value, dict):
        raise unexpected(file, f"{within}.{field}" if within else field, "an object or null", value)
    return value or {}


def _named(values: Mapping[str, Any], where: str, synonyms: Mapping[str, str]) -> dict[str, Any]:
    """The settings with `rope_type` as the type's only name."""
    given = {name: values[name] for name in ("rope_type", "type") if name in values}
    if given.get("type", "") is None:
        del given["type"]
    for name, kind in given.items():
        if not isinstance(kind, str):
            raise ConvertError(f"{where}.{name}: expected a string, got {shown(kind)}")
    kinds = [synonyms.get(kind, kind) for kind in given.values()]
    if len(set(kinds)) == 2:
        raise ConvertError(
            f"{where}.type: expected {shown(kinds[0])}, which is the rope_type that transformers takes, "
            f"got {shown(kinds[1])}: write rope_type alone"
        )
    rest = {name: value for name, value in values.items() if name != "type"}
    return rest | {"rope_type": kinds[0] if kinds else "default"}


def _agree(taken: Mapping[str, Any], other: Mapping[str, Any], file: str, what: str) -> None:
    """Raise ConvertError if two forms disagree."""
    names = [name for name in {**taken, **other} if taken.get(name) != other.get(name)]
    if names:
        pairs = ", ".join(f"{name} ({shown(taken.get(name), 60)}, {shown(other.get(name), 60)})" for name in names)
        raise ConvertError(
            f"{file}: {OLD}: expected what {NEW} says, since transformers {what}; they differ in "
            f"{shorten(pairs, 400)}: remove one of the two"
        )
