"""Model families, one table a file: checkpoint names to tree paths and back."""

import os
from collections.abc import Mapping
from typing import Any

from convert.errors import unexpected
from convert.families import cohere, gemma, llama, olmo, phi
from convert.families.table import Family, Ignored, Row, Transform

__all__ = ["FAMILIES", "Family", "Ignored", "Row", "Transform", "family_for"]

FAMILIES = {
    family.model_type: family
    for family in (
        *(llama.FAMILY, llama.QWEN2, llama.QWEN3, llama.MISTRAL, llama.MINISTRAL, llama.GRANITE, llama.SMOLLM3),
        *(gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3_TEXT, gemma.GEMMA3, phi.PHI3, olmo.OLMO2, cohere.COHERE),
    )
}


def family_for(config: Mapping[str, Any], file: str | os.PathLike[str] = "config.json") -> Family:
    """The family of a model.

    Args:
        config: Contents of config.json.
        file: Its path, for the message.

    Raises:
        ConvertError: Its model_type has no table; the message lists those that have.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unexpected(file, "model_type", f"one of {', '.join(FAMILIES)}", model_type)
    return FAMILIES[model_type]
