"""Families of models: how each one's config.json and `ModelConfig` say the same, as data for one reader and writer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.errors import ConvertError, shown
from convert.families import family_for
from convert.model.families import cohere, gemma, llama, olmo, phi
from convert.model.families.family import ConfigFamily, read_fields, refuse_unsupported, write_fields

if TYPE_CHECKING:
    from convert.model.config import ModelConfig

__all__ = ["FAMILIES", "read_config", "write_config"]

FAMILIES: dict[str, ConfigFamily] = {
    family.model_type: family
    for family in (
        *(llama.LLAMA, llama.QWEN2, llama.QWEN3, llama.MISTRAL, llama.MINISTRAL, llama.GRANITE, llama.SMOLLM3),
        *(gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3_TEXT, phi.PHI3, olmo.OLMO2, cohere.COHERE),
    )
}
#: Model with a vision tower -> the family of its text half.
_TEXT_HALF = {"gemma3": gemma.GEMMA3_TEXT}
#: What a config.json with a `text_config` says besides about the other half.
_OF_THE_OTHER_HALF = frozenset(
    """vision_config initializer_range mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    boi_token_id eoi_token_id image_token_id""".split()
)


def read_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `ModelConfig` from a config.json.

    Args:
        config: the parsed file.
        where: what to call it in errors.

    Raises:
        ConvertError: an unknown model_type, a missing field, or fields that are not supported (all named).
    """
    known = family_for(config, where)
    text = known.text_config(config, where)
    if known.section is None:
        return read_fields(FAMILIES[known.model_type], known.defaults, text, where)
    fields = read_fields(_TEXT_HALF[known.model_type], known.defaults, text, f"{where}: {known.section}")
    tied = config.get("tie_word_embeddings", fields["tie_word_embeddings"])
    if tied != fields["tie_word_embeddings"]:
        raise ConvertError(
            f"{where}: tie_word_embeddings: expected the same as in {known.section}, given {shown(tied)}"
        )
    if fields["final_logit_softcapping"] is not None:  # transformers caps the logits of the text model alone
        given = fields["final_logit_softcapping"]
        raise ConvertError(f"{where}: {known.section}: final_logit_softcapping: expected null, given {shown(given)}")
    outside = {name: value for name, value in config.items() if name not in {known.section, "tie_word_embeddings"}}
    refuse_unsupported(outside, _OF_THE_OTHER_HALF, {}, where)
    return fields | {"model_type": known.model_type}


def write_config(config: "ModelConfig") -> dict[str, Any]:
    """The way back: the fields of a config.json that say what the model computes, as transformers 5 writes them."""
    if config.model_type in FAMILIES:
        return write_fields(FAMILIES[config.model_type], config)
    text = write_fields(_TEXT_HALF[config.model_type], config)
    section = family_for({"model_type": config.model_type}).section
    assert section is not None, f"{config.model_type} has a text half"
    return {"model_type": config.model_type, section: text, "tie_word_embeddings": config.tie_word_embeddings}
