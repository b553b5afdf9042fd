"""config.json to `ModelConfig` and back, for every family's table."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from convert.errors import ConvertError, shorten, shown, unexpected
from convert.families import FAMILIES, family_for
from convert.families.family import Family, is_scored
from convert.families.irrelevant import IRRELEVANT, NEUTRAL
from convert.model.config import ModelConfig
from convert.model.layers import MLP, MOE, Attention, Layer
from convert.model.paths import HEAD
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import ATTENTION_GROUPS, MLP_GROUPS, SHARED_GROUPS

_BIASES = frozenset((*ATTENTION_GROUPS, *MLP_GROUPS, *SHARED_GROUPS, HEAD))
#: Further fields of a config.json with a text section, about the other part.
_OF_THE_OTHER_HALF = frozenset(
    """vision_config initializer_range mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    boi_token_id eoi_token_id image_token_id video_token_id vision_start_token_id vision_end_token_id
    projector_hidden_act projector_hidden_size out_hidden_size vision_feature_layer multimodal_projector_bias
    spatial_merge_size""".split()
)


def read_config(config: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """A model's settings and weights from a config.json.

    Args:
        config: the parsed file.
        where: its name in errors.

    Raises:
        ConvertError: an unknown model_type, a missing field, or unsupported fields that would change the mathematics
            (all named).
    """
    family = family_for(config, where)
    text = family.text_config(config, where)
    if family.section is None:
        return _read(family, text, where)
    model = _read(family, text, f"{where}: {family.section}")
    _check_scored(family, config, where)
    outside = {name: value for name, value in config.items() if name not in {family.section, "tie_word_embeddings"}}
    refuse_unsupported(outside, _OF_THE_OTHER_HALF, {}, where)
    return model


def family_of(config: ModelConfig) -> Family:
    """The family of a parsed config, for names; of several text models' the first."""
    return FAMILIES[config.model_type]


def with_score(config: ModelConfig) -> ModelConfig:
    """A decoder with one score of each place in the place of logits.

    Raises:
        ConvertError: transformers has no such class of the family.
    """
    family_of(config).scored({})
    return dataclasses.replace(config, scored=True, tie_word_embeddings=False)


def _read(family: Family, config: Mapping[str, Any], where: str) -> ModelConfig:
    get = Reader(config, where, family.defaults)
    sizes, scored = family.read_sizes(get), _check_scored(family, config, where)
    heads, head_dim = sizes["num_attention_heads"], sizes["head_dim"]
    if heads % sizes["num_key_value_heads"]:
        raise get.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    if head_dim % 2:
        raise ConvertError(
            f"{where}: {family.name('head_dim')}: expected an even number (rotary pairs), got {head_dim}"
        )
    layers = get.layers()
    fields: dict[str, Any] = {
        "model_type": family.model_type,
        **sizes,
        "num_hidden_layers": layers,
        "hidden_act": family.constants.get("hidden_act") or get.activation(family.name("hidden_act")),
        "norm_eps": family.constants.get("norm_eps") or get.number(family.name("norm_eps")),
        "tie_word_embeddings": get.flag("tie_word_embeddings") and not scored,
        "scored": scored,
        "max_position_embeddings": get.integer("max_position_embeddings"),
        "initializer_range": get.number("initializer_range"),
        "mixers": family.mixers(get, layers) if family.mixers else (Attention(),) * layers,
        "attention_multiplier": head_dim**-0.5,
        "rows": family.table,
        "attention_dropout": get.probability("attention_dropout"),
        **{ours: get.optional_number(theirs) for ours, theirs in family.numbers.items()},
        **family.constants,
    }
    given = {group for name, groups in family.switches.items() if get.flag(name) for group in groups}
    fields["biases"] = frozenset(given & _BIASES | set(family.constants.get("biases", ())))
    fields |= family.read(get, fields)
    sparse: tuple[bool, ...] = (False,) * layers
    if family.mixture is not None:
        fields["moe"], sparse = family.mixture.read(get, layers)
    fields["layers"] = tuple(
        Layer(mixer, MOE if one else MLP) for mixer, one in zip(fields.pop("mixers"), sparse, strict=True)
    )
    if "rope" not in fields:
        fields["rope"] = read_rope(get, fields)
    if "layer_types" not in get.asked and any(get.layer_types(layers) or ()):
        raise get.wrong("layer_types", f"full_attention alone: no layer of {family.model_type} has a window")
    refuse_unsupported(config, get.asked, family.neutral, where)
    return ModelConfig(**fields)


def _check_scored(family: Family, config: Mapping[str, Any], where: str) -> bool:
    """Whether the model has one score in the place of logits; a classifier of any other kind is refused."""
    if not is_scored(config):
        return False
    if family.classifier is None:
        raise unexpected(where, "architectures", f"{family.architecture}, which has logits", config["architectures"])
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)  # transformers' default
    if count != 1:
        raise unexpected(where, "id2label", "one label, as a reward model has", count if labels is None else labels)
    return True


def refuse_unsupported(
    config: Mapping[str, Any], used: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Refuse unsupported fields that would change the mathematics.

    Args:
        config: the file.
        used: the fields read.
        neutral: field -> its values without effect.
        where: the file's name in the error.

    Raises:
        ConvertError: names all of them.
    """
    unsupported = {
        name: value
        for name, value in config.items()
        if name not in used
        and name not in IRRELEVANT
        and not name.startswith(("_", "unsloth_"))
        and not any(value == harmless for harmless in (*neutral.get(name, ()), *NEUTRAL.get(name, ())))
    }
    if unsupported:
        listed = ", ".join(f"{shorten(name)} = {shown(value)}" for name, value in sorted(unsupported.items()))
        raise ConvertError(
            f"{where}: fields that {config.get('model_type')} models do not support here: {shorten(listed, 1000)}; "
            "remove a field that the model does not use"
        )
