"""What config.json, or an override, says about the rotary positions: type, scaling, and the length they reach.

The settings are transformers' `rope_parameters` (before version 5: `rope_theta` and `rope_scaling`), with its names,
defaults and meanings. "dynamic" is refused: its frequencies follow the longest row of the moment, so that the same
document would be something else in another batch.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError
from fastjax.errors import ConfigError

#: Type of scaling -> the numbers that it needs, and what it takes besides.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
_ALWAYS = ("rope_type", "type", "rope_theta")
_WITHOUT_EFFECT = {"partial_rotary_factor": (1, 1.0, None), "finetuned": (True, False, None)}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear" (positions divided by `factor`); "llama3" (the scaling of Llama 3.1: low frequencies
            divided by `factor`, a smooth ramp between the two wavelengths
            `original_max_position_embeddings / {low,high}_freq_factor`); "yarn" (Peng et al., arXiv 2309.00071).
        factor: how many times longer than the original the context becomes.
        low_freq_factor: of "llama3".
        high_freq_factor: of "llama3".
        original_max_position_embeddings: length that the model was pretrained on.
        beta_fast: "yarn": pairs that turn more often than this over the original length keep their frequency.
        beta_slow: "yarn": pairs that turn less often are divided by `factor`.
        truncate: "yarn": whole pairs as bounds of the ramp between the two.
        attention_factor: what cosines and sines are multiplied with.
    """

    theta: float
    kind: str
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def max_length(self, max_position_embeddings: int) -> int:
        """The longest row that the positions are made for.

        Args:
            max_position_embeddings: of config.json, which "linear" leaves at the original length (so do transformers
                and vLLM read it), while "llama3" has the final one there and "yarn" either.
        """
        if self.kind == "linear":
            return int(self.factor * max_position_embeddings)
        if self.kind == "yarn" and self.original_max_position_embeddings is not None:
            return max(max_position_embeddings, int(self.factor * self.original_max_position_embeddings))
        return max_position_embeddings


def parse_rope(config: Mapping[str, Any], where: str) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    Args:
        config: the parsed config.json.
        where: what to call it in errors.

    Raises:
        ConvertError: a type that is not supported, a number that is missing or no number, an unknown name.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    field = "rope_parameters" if new else "rope_scaling"
    values = {**old, **new}
    theta = values.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if not _number(theta) or theta <= 0:
        raise ConvertError(f"{where}: rope_theta: expected a positive number, given {theta!r}")
    if kind not in KINDS:
        reason = "; its frequencies depend on the longest row of a batch, linear and yarn do not"
        raise ConvertError(
            f"{where}: {field}.rope_type: expected one of {list(KINDS)}, given {kind!r}"
            + (reason if kind == "dynamic" else "")
        )
    needed, optional = KINDS[kind]
    unknown = [
        name
        for name, value in values.items()
        if name not in (*_ALWAYS, *needed, *optional) and value not in _WITHOUT_EFFECT.get(name, (None,))
    ]
    if unknown and kind != "default":
        takes = f"{', '.join(needed)}" + (f" and perhaps {', '.join(optional)}" if optional else "")
        raise ConvertError(f"{where}: {field}: {kind} scaling takes {takes}, given {', '.join(unknown)} besides")
    if "partial_rotary_factor" in unknown:
        given = values["partial_rotary_factor"]
        raise ConvertError(f"{where}: {field}.partial_rotary_factor: expected 1 (every pair turns), given {given!r}")
    missing = [name for name in needed if not _number(values.get(name)) or values[name] <= 0]
    missing += [name for name in optional if values.get(name) is not None and not _right(name, values[name])]
    if missing:
        raise ConvertError(f"{where}: {field}: {kind} scaling needs the numbers {list(needed)}, wrong: {missing}")
    if kind == "default":
        return RopeConfig(theta=float(theta), kind=kind)
    if kind == "linear":
        return RopeConfig(theta=float(theta), kind=kind, factor=float(values["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta=float(theta),
            kind=kind,
            factor=float(values["factor"]),
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
            original_max_position_embeddings=int(values["original_max_position_embeddings"]),
        )
    original = values.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 2048
    truncate = values.get("truncate")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(values["factor"]),
        original_max_position_embeddings=int(original),
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=True if truncate is None else truncate,
        attention_factor=_attention_factor(values),
    )


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
    before = parse_rope(config, "config.json")
    length = before.original_max_position_embeddings or int(config.get("max_position_embeddings") or 2048)
    values = {"rope_type": scaling.get("rope_type", scaling.get("type")), **scaling}
    values.pop("type", None)
    theta, kind = values.pop("rope_theta", before.theta), values["rope_type"]
    if kind is None or (kind == "default" and len(values) > 1):
        raise ConfigError(
            f"rope_scaling: expected a rope_type of {list(KINDS)} with what it takes, given {dict(scaling)}; "
            "for instance {rope_type: linear, factor: 4.0}"
        )
    if kind in ("llama3", "yarn"):
        values.setdefault("original_max_position_embeddings", length)
    changed = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    if "rope_parameters" in config:
        changed["rope_parameters"] = {**values, "rope_theta": theta}
    else:
        changed |= {"rope_theta": theta, "rope_scaling": values}
    changed["max_position_embeddings"] = length
    try:
        after = parse_rope(changed, "model")
    except ConvertError as error:
        raise ConfigError(str(error).replace("rope_parameters", "rope_scaling")) from error
    if after.original_max_position_embeddings is not None:
        changed["max_position_embeddings"] = int(after.factor * after.original_max_position_embeddings)
    return changed


def _attention_factor(values: Mapping[str, Any]) -> float:
    """YaRN's factor on cosines and sines: as given, or 0.1·mscale·ln(factor) + 1 over the same with mscale_all_dim."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def grown(scale: float) -> float:
        return 1.0 if values["factor"] <= 1 else 0.1 * scale * math.log(values["factor"]) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return grown(values["mscale"]) / grown(values["mscale_all_dim"])
    return grown(1.0)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _right(name: str, value: Any) -> bool:
    return isinstance(value, bool) if name == "truncate" else _number(value) and value >= 0
