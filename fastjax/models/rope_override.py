"""Replacement of a config.json's rotary scaling, for longer rows."""

from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, shown
from convert.families import family_for
from convert.families.mapping import read_config
from convert.model.rope import KINDS, rope_to_hf
from convert.rope import FULL, NEW, OLD, ORIGINAL, SLIDING
from fastjax.errors import ConfigError


def with_rope_scaling(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with another rotary scaling.

    Args:
        config: the parsed config.json.
        scaling: {"rope_type": …, "factor": …, …}; the config supplies absent `rope_theta` and
            `original_max_position_embeddings`. An earlier scaling is dropped: `factor` counts from the original length.

    Returns:
        The config, with the `max_position_embeddings` of its type of scaling (see `RopeConfig.max_length`).

    Raises:
        ConfigError: an impossible `scaling`; the message says why.
    """
    family = family_for(config)
    text = family.text_config(config)
    parsed = read_config(config)
    before = parsed.rope
    length = before.original_max_position_embeddings or parsed.max_position_embeddings
    values = {"rope_type": scaling.get("rope_type", scaling.get("type")), **scaling}
    values.pop("type", None)
    theta, kind = values.pop("rope_theta", before.theta), values["rope_type"]
    if kind is None or (kind == "default" and len(values) > 1):
        raise ConfigError(
            f"rope_scaling: expected a rope_type of {list(KINDS)} with what it takes, got {shown(dict(scaling))}; "
            "for instance {rope_type: linear, factor: 4.0}"
        )
    if kind in ("llama3", "yarn", "longrope"):
        values.setdefault(ORIGINAL, length)
    changed = {name: value for name, value in text.items() if name not in (NEW, OLD)}
    if text.get(NEW) is not None:
        new = {**values, "rope_theta": theta}
        # windowed layers keep their positions, as they never see far
        changed[NEW] = new if parsed.local_rope is None else {SLIDING: rope_to_hf(parsed.local_rope), FULL: new}
    else:
        changed |= {"rope_theta": theta, OLD: values}
    if text.get(ORIGINAL) is not None:
        changed[ORIGINAL] = values.get(ORIGINAL, length)
    changed["max_position_embeddings"] = length

    def whole() -> dict[str, Any]:
        return changed if family.section is None else {**config, family.section: changed}

    try:
        after = read_config(whole(), where="model").rope
    except ConvertError as error:
        raise ConfigError(str(error).replace(NEW, OLD)) from error
    if after.original_max_position_embeddings is not None and kind != "dynamic":
        changed["max_position_embeddings"] = int(after.factor * after.original_max_position_embeddings)
    return whole()
