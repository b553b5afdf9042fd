"""Rotary settings of config.json: type, scaling, and the longest row.

The settings are transformers' `rope_parameters` (before version 5: `rope_theta` and `rope_scaling`), with its names,
defaults and meanings. The frequencies of "dynamic" and "longrope" depend on a length: in transformers the longest row's
in the batch, here each document's own, so that a document is the same whatever stands beside it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, shorten, shown
from convert.model.reader import FULL, SLIDING, Reader
from convert.rope import NEW, OLD, ORIGINAL, RopeSettings, rope_settings, rope_settings_by_layer

#: Type of scaling -> its required numbers (for longrope lists of numbers), and its optional ones.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "dynamic": (("factor",), ()),
    "longrope": (("short_factor", "long_factor"), ("factor", "original_max_position_embeddings", "attention_factor")),
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
_ALWAYS = ("rope_type", "rope_theta")
#: Name of `RopeConfig.query_beta` in config.json's settings.
QUERY_BETA = "llama_4_scaling_beta"
#: The rotary fields of config.json.
NAMES = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL})
_BY_LAYER = {"rope": FULL, "local_rope": SLIDING}
#: Kinds with frequencies that depend on a document's length.
BY_LENGTH = ("dynamic", "longrope")
_LISTS = ("short_factor", "long_factor")
_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor")
_WITHOUT_EFFECT = {"finetuned": (True, False, None)}
#: Settings of positions in images, with any value: a text's tokens have one position.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear" (positions divided by `factor`); "llama3" (the scaling of Llama 3.1: low frequencies
            divided by `factor`, a smooth ramp between the two wavelengths
            `original_max_position_embeddings / {low,high}_freq_factor`); "yarn" (Peng et al., arXiv 2309.00071);
            "dynamic" (a base that grows with a document's length beyond the original one); "longrope" (Ding et al.,
            arXiv 2402.13753: each pair's frequency divided by its `short_factor`, in a document longer than the
            original length by its `long_factor`).
        factor: ratio of the extended context to the original one.
        low_freq_factor: of "llama3".
        high_freq_factor: of "llama3".
        original_max_position_embeddings: length in pretraining.
        beta_fast: "yarn": pairs with more turns than this over the original length keep their frequency.
        beta_slow: "yarn": pairs with fewer turns are divided by `factor`.
        truncate: "yarn": whole pairs as bounds of the ramp between the two.
        attention_factor: factor of cosines and sines.
        short_factor: of "longrope", one number per pair.
        long_factor: of "longrope", one number per pair.
        partial_rotary_factor: rotated share of each head's features, the first ones.
        mscale_all_dim: "yarn": latent attention multiplies its logits by (0.1 · mscale_all_dim · ln(factor) + 1)²;
            None: by 1.
        query_beta: rotated queries are multiplied by 1 + query_beta · ln(1 + ⌊position / original length⌋), as in
            Llama 4; None: by 1.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    mscale_all_dim: float | None = None
    query_beta: float | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """The number of a head's rotated features."""
        return self.base_dim(head_dim) + self.base_dim(head_dim) % 2

    def base_dim(self, head_dim: int) -> int:
        """The number that exponents of the base are divided by; transformers' share of a head, which may be odd."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def latent_factor(self) -> float:
        """Factor of latent attention's logits."""
        return 1.0 if self.mscale_all_dim is None else _grown(self.factor, self.mscale_all_dim) ** 2

    def max_length(self, max_position_embeddings: int) -> int:
        """The longest row that the positions support.

        Args:
            max_position_embeddings: of config.json: the original length for "linear" (as in transformers and vLLM) and
                "dynamic", the final one for "llama3" and "longrope", either for "yarn".
        """
        if self.kind in ("linear", "dynamic"):
            return int(self.factor * max_position_embeddings)
        if self.kind == "yarn" and self.original_max_position_embeddings is not None:
            return max(max_position_embeddings, int(self.factor * self.original_max_position_embeddings))
        return max_position_embeddings


def parse_rope(
    settings: RopeSettings,
    where: str,
    *,
    positions: int,
    head_dim: int,
    partial_rotary: bool = False,
) -> RopeConfig:
    """RoPE from a config.json's settings.

    Args:
        settings: from `convert.rope`.
        where: the file's name in errors.
        positions: max_position_embeddings.
        head_dim: D, for the length of longrope's lists.
        partial_rotary: whether the model supports a rotated part of each head. Otherwise the setting is ignored, as in
            transformers, or refused where transformers fails.

    Raises:
        ConvertError: an unsupported type, a missing or invalid number, an unknown name.
    """
    field, values = settings.field, dict(settings.values)
    kind, theta, partial = values["rope_type"], values["rope_theta"], values.pop("partial_rotary_factor", None)
    if kind not in KINDS:
        raise _wrong(where, f"{field}.rope_type", f"one of {list(KINDS)}", kind)
    if not _number(theta) or theta < 1e-30 or (theta == 1 and kind == "yarn"):
        raise _wrong(where, "rope_theta", "a positive number" + (" other than 1" if theta == 1 else ""), theta)
    needed, optional = KINDS[kind]
    unknown = [
        name
        for name, value in values.items()
        if name not in (*_ALWAYS, *needed, *optional) and not _without_effect(kind, name, value, positions)
    ]
    if unknown:
        takes = f"{', '.join(needed)}" + (f" and perhaps {', '.join(optional)}" if optional else "")
        given = shorten(", ".join(unknown), 400)
        raise ConvertError(f"{where}: {field}: {kind} scaling takes {takes or 'nothing'}, got {given} besides")
    if partial is not None and (not _number(partial) or not 0 < partial <= 1):
        raise _wrong(where, f"{field}.partial_rotary_factor", "a number above 0 and at most 1", partial)
    if not partial_rotary and partial not in (None, 1):
        if kind != "default":
            raise _wrong(where, f"{field}.partial_rotary_factor", "1 (every pair turns)", partial)
        partial = None
    wrong = [name for name in needed if not _right(name, values.get(name))]
    wrong += [name for name in optional if values.get(name) is not None and not _right(name, values[name])]
    if wrong:
        given = ", ".join(f"{name} = {shown(values.get(name), 60)}" for name in wrong)
        raise ConvertError(
            f"{where}: {field}: {kind} scaling needs the numbers {list(needed)}, wrong: {wrong} (given {given})"
        )
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        expected = f"more than the low_freq_factor, {values['low_freq_factor']}"
        raise _wrong(where, f"{field}.high_freq_factor", expected, values["high_freq_factor"])
    share = 1.0 if partial is None else float(partial)
    rope = RopeConfig(float(theta), kind, partial_rotary_factor=share, **_scaling(kind, values, positions))
    _check_pairs(rope, head_dim, where, field)
    return rope


def _check_pairs(rope: RopeConfig, head_dim: int, where: str, field: str) -> None:
    """Refuse too few turning features a head, and lists of another length."""
    turning = rope.base_dim(head_dim)
    least = 4 if rope.kind == "dynamic" else 2  # its base grows with a power of turning / (turning - 2)
    if turning < least:
        raise ConvertError(f"{where}: expected a number of turning features a head of {least} or more, got {turning}")
    for name in _LISTS if rope.kind == "longrope" else ():
        pairs, given = rope.rotary_dim(head_dim) // 2, len(getattr(rope, name))
        if given != pairs:
            raise ConvertError(f"{where}: {field}.{name}: expected {pairs} numbers, got {given}")


def _without_effect(kind: str, name: str, value: Any, positions: int) -> bool:
    """Whether a setting of another kind of scaling holds anyway, so that it may be ignored, as by transformers."""
    if value is None or kind == "default" or name in _OF_IMAGES or value in _WITHOUT_EFFECT.get(name, ()):
        return True
    return name == ORIGINAL and _right(name, value) and (kind == "linear" or value == positions)


def _scaling(kind: str, values: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """`RopeConfig`'s fields besides the base, for each type of scaling."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": float(values["factor"])}
    if kind == "dynamic":
        return {"factor": float(values["factor"]), ORIGINAL: positions}
    original = int(values.get(ORIGINAL) or positions)
    if kind == "llama3":
        numbers = {name: float(values[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        return {**numbers, ORIGINAL: original}
    if kind == "longrope":
        factor = float(values.get("factor") or positions / original)
        given = values.get("attention_factor")
        grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return {
            "factor": factor,
            ORIGINAL: original,
            "attention_factor": grown if given is None else float(given),
            **{name: tuple(float(number) for number in values[name]) for name in _LISTS},
        }
    truncate = values.get("truncate")
    return {
        "factor": float(values["factor"]),
        ORIGINAL: original,
        "beta_fast": float(values.get("beta_fast") or 32),
        "beta_slow": float(values.get("beta_slow") or 1),
        "truncate": True if truncate is None else truncate,
        "attention_factor": _attention_factor(values),
        "mscale_all_dim": float(values["mscale_all_dim"]) if values.get("mscale_all_dim") else None,
    }


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` of a config.json."""
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    needed, optional = KINDS[rope.kind]
    for name in (*needed, *optional):
        value = getattr(rope, name, None)
        if value is not None:  # mscale is in attention_factor
            values[name] = list(value) if name in _LISTS else value
    if rope.partial_rotary_factor != 1:
        values["partial_rotary_factor"] = rope.partial_rotary_factor
    return values


def read_rope(
    get: Reader,
    fields: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    partial: float | None = None,
    phi3: bool = False,
) -> RopeConfig:
    """Rotary positions of a model with the same ones in all layers.

    Args:
        get: the config.json, with a default for `rope_theta`.
        fields: the fields of `ModelConfig` read so far.
        changes: fields in place of the file's.
        partial: share of a head that turns unless the settings say otherwise; None: heads turn whole.
        phi3: as of `rope_settings`.

    Raises:
        ConvertError: as `parse_rope`.
    """
    get.asked |= NAMES
    config, positions = {**get.config, **(changes or {})}, fields["max_position_embeddings"]
    settings = rope_settings(config, get.where, theta=get.defaults["rope_theta"], positions=positions, phi3=phi3)
    if partial is not None and settings.values.get("partial_rotary_factor") is None:
        settings.values["partial_rotary_factor"] = partial
    sizes = {"positions": positions, "head_dim": fields["head_dim"]}
    return parse_rope(settings, get.where, **sizes, partial_rotary=partial is not None)


def read_growing_rope(
    get: Reader, fields: Mapping[str, Any], default: Mapping[str, Any], share: float | None = None
) -> RopeConfig:
    """Rotary positions of a model whose queries grow with their position (`RopeConfig.query_beta`).

    Args:
        get: the config.json, with a default for `rope_theta`.
        fields: the fields of `ModelConfig` read so far.
        default: settings of a file without any.
        share: `partial_rotary_factor` of transformers' heads, of which `head_dim` features turn; None: all.

    Raises:
        ConvertError: as `parse_rope`; another share; no scale of the queries.
    """
    get.asked |= NAMES
    positions = fields["max_position_embeddings"]
    given = any(get.config.get(field) is not None for field in (NEW, OLD))
    config = get.config if given else {**get.config, NEW: default}
    settings = rope_settings(config, get.where, theta=get.defaults["rope_theta"], positions=positions)
    beta = settings.values.pop(QUERY_BETA, None)
    settings.values.pop("max_position_embeddings", None)  # transformers ignores it
    if settings.values.get("partial_rotary_factor") == share:
        settings.values.pop("partial_rotary_factor", None)
    rope = parse_rope(settings, get.where, positions=positions, head_dim=fields["head_dim"])
    # the scale of queries counts in original lengths, whether or not the scaling of positions does
    original = rope.original_max_position_embeddings or settings.values.get(ORIGINAL)
    where = Reader({QUERY_BETA: beta, ORIGINAL: original}, f"{get.where}: {settings.field}", {})
    return dataclasses.replace(
        rope, original_max_position_embeddings=where.integer(ORIGINAL), query_beta=where.number(QUERY_BETA)
    )


def read_ropes(get: Reader, fields: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """Rotary positions of a model with separate ones in windowed layers.

    Args:
        get: the config.json, with defaults for `rope_theta` and `rope_local_base_freq`.
        fields: the fields of `ModelConfig` read so far.

    Returns:
        "rope" and "local_rope".

    Raises:
        ConvertError: as `parse_rope`.
    """
    get.asked |= NAMES
    positions = fields["max_position_embeddings"]
    settings = rope_settings_by_layer(
        get.config,
        get.where,
        theta=get.defaults["rope_theta"],
        local_theta=get.defaults["rope_local_base_freq"],
        positions=positions,
    )
    for field, values in settings.values():
        if values.get("truncate") is False:
            expected = "true or nothing: by kind of layer transformers leaves it out"
            raise _wrong(get.where, f"{field}.truncate", expected, False)
    return {
        name: parse_rope(settings[layers], get.where, positions=positions, head_dim=fields["head_dim"])
        for name, layers in _BY_LAYER.items()
    }


def _attention_factor(values: Mapping[str, Any]) -> float:
    """YaRN's factor of cosines and sines: explicit, or 0.1·mscale·ln(factor) + 1 over the same with mscale_all_dim."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    factor = values["factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return _grown(factor, values["mscale"]) / _grown(factor, values["mscale_all_dim"])
    return _grown(factor, 1.0)


def _grown(factor: float, scale: float) -> float:
    """YaRN's growth of products of queries and keys, its square root, with the length of the context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _wrong(where: str, name: str, expected: str, given: object) -> ConvertError:
    return ConvertError(f"{where}: {name}: expected {expected}, got {shown(given)}")


def _number(value: Any) -> bool:
    """Whether a value is a number that float32 can compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def _right(name: str, value: Any) -> bool:
    if name in _LISTS:
        return isinstance(value, list | tuple) and all(_number(number) and number > 1e-30 for number in value)
    if name == ORIGINAL:  # log(1) = 0
        return _number(value) and 1 < value < 2**31
    if name == "truncate":
        return isinstance(value, bool)
    return _number(value) and (value > 1e-30 or (value == 0 and name not in _POSITIVE))
