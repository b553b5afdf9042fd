"""Another scaling of the rotary positions in the place of the one that a config.json has, for longer rows."""

from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError
from convert.families import family_for
from fastjax.errors import ConfigError
from fastjax.models.config import ModelConfig
from fastjax.models.rope_config import KINDS

_FIELDS = ("rope_parameters", "rope_scaling")
_BY_LAYER = "full_attention"  # layers with a window keep their positions, as they never see far


def with_rope_scaling(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose rotary scaling is replaced.

    Args:
        config: the parsed config.json.
        scaling: {"rope_type": …, "factor": …, …}; `rope_theta` and `original_max_position_embeddings` come from the
            config where they are left out. It replaces a scaling that is there and does not add to it: `factor` counts
            from the length of pretraining.

    Returns:
        The config, with `max_position_embeddings` as its type of scaling has it (see `RopeConfig.max_length`).

    Raises:
        ConfigError: what is wrong with `scaling`.
    """
    family = family_for(config)
    text = family.text_config(config)
    parsed = ModelConfig.from_hf(config)
    before = parsed.rope
    length = before.original_max_position_embeddings or parsed.max_position_embeddings
    values = {"rope_type": scaling.get("rope_type", scaling.get("type")), **scaling}
    values.pop("type", None)
    theta, kind = values.pop("rope_theta", before.theta), values["rope_type"]
    if kind is None or (kind == "default" and len(values) > 1):
        raise ConfigError(
            f"rope_scaling: expected a rope_type of {list(KINDS)} with what it takes, given {dict(scaling)}; "
            "for instance {rope_type: linear, factor: 4.0}"
        )
    if kind in ("llama3", "yarn", "longrope"):
        values.setdefault("original_max_position_embeddings", length)
    changed = {name: value for name, value in text.items() if name not in _FIELDS}
    if "rope_parameters" in text:
        new = {**values, "rope_theta": theta}
        by_layer = _BY_LAYER in text["rope_parameters"]
        changed["rope_parameters"] = {**text["rope_parameters"], _BY_LAYER: new} if by_layer else new
    else:
        changed |= {"rope_theta": theta, "rope_scaling": values}
    changed["max_position_embeddings"] = length

    def whole() -> dict[str, Any]:
        return changed if family.section is None else {**config, family.section: changed}

    try:
        after = ModelConfig.from_hf(whole(), where="model").rope
    except ConvertError as error:
        raise ConfigError(str(error).replace("rope_parameters", "rope_scaling")) from error
    if after.original_max_position_embeddings is not None and kind != "dynamic":
        changed["max_position_embeddings"] = int(after.factor * after.original_max_position_embeddings)
    return whole()
