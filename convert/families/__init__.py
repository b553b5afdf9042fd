"""Families of models, one a file."""

import os
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, unexpected
from convert.families.afmoe import AFMOE
from convert.families.apertus import APERTUS
from convert.families.arcee import ARCEE
from convert.families.cohere import COHERE
from convert.families.cohere2 import COHERE2
from convert.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from convert.families.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from convert.families.ernie4_5 import ERNIE4_5
from convert.families.ernie4_5_moe import ERNIE4_5_MOE
from convert.families.exaone4 import EXAONE4
from convert.families.exaone_moe import EXAONE_MOE
from convert.families.family import Family, Ignored
from convert.families.gemma import GEMMA
from convert.families.gemma2 import GEMMA2
from convert.families.gemma3 import GEMMA3, GEMMA3_TEXT
from convert.families.glm4 import GLM4
from convert.families.glm4_moe import GLM4_MOE
from convert.families.glm4_moe_lite import GLM4_MOE_LITE
from convert.families.gpt_oss import GPT_OSS
from convert.families.granite import GRANITE
from convert.families.granite_swa import GRANITE_SWA
from convert.families.helium import HELIUM
from convert.families.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from convert.families.hy_v3 import HY_V3
from convert.families.llama import LLAMA
from convert.families.minimax_m2 import MINIMAX_M2
from convert.families.ministral import MINISTRAL
from convert.families.ministral3 import MINISTRAL3
from convert.families.mistral import MISTRAL
from convert.families.mistral3 import MISTRAL3
from convert.families.mistral4 import MISTRAL4
from convert.families.mixtral import MIXTRAL
from convert.families.muse_glimmer import MUSE_GLIMMER
from convert.families.nemotron import NEMOTRON
from convert.families.olmo import OLMO
from convert.families.olmo2 import OLMO2
from convert.families.olmo3 import OLMO3
from convert.families.olmo_hybrid import OLMO_HYBRID
from convert.families.olmoe import OLMOE
from convert.families.phi import PHI
from convert.families.phi3 import PHI3
from convert.families.qwen2 import QWEN2
from convert.families.qwen2_moe import QWEN2_MOE
from convert.families.qwen3 import QWEN3
from convert.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from convert.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from convert.families.qwen3_moe import QWEN3_MOE
from convert.families.qwen3_next import QWEN3_NEXT
from convert.families.seed_oss import SEED_OSS
from convert.families.smollm3 import SMOLLM3
from convert.families.solar_open import SOLAR_OPEN
from convert.families.starcoder2 import STARCODER2

__all__ = ["FAMILIES", "Family", "Ignored", "family_for"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL, GRANITE, SMOLLM3),
        *(GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA3, PHI3, OLMO2, COHERE),
        *(OLMO3, EXAONE4, SEED_OSS, MINISTRAL3, ARCEE, HUNYUAN_V1_DENSE),
        *(GLM4, ERNIE4_5, APERTUS, COHERE2, NEMOTRON, PHI, MISTRAL3, MUSE_GLIMMER),
        *(STARCODER2, OLMO, HELIUM, GRANITE_SWA),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS, GLM4_MOE),
        *(MINIMAX_M2, EXAONE_MOE, SOLAR_OPEN, HY_V3, AFMOE, ERNIE4_5_MOE),
        *(QWEN3_5_TEXT, QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_MOE, QWEN3_NEXT, OLMO_HYBRID),
        *(DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE, MISTRAL4, DEEPSEEK_V32, GLM_MOE_DSA),
    )
}
#: Families that are not supported -> why.
REFUSED = {"deepseek_v2": "its router and rotary pairs are not supported"}


def family_for(config: Mapping[str, Any], file: str | os.PathLike[str] = "config.json") -> Family:
    """The family of a model.

    Args:
        config: Contents of config.json.
        file: Its path, for the message.

    Raises:
        ConvertError: An unknown model_type, or one of the text model; the message lists the known ones.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ConvertError(f"{file}: model_type: {model_type} models cannot be read: {REFUSED[model_type]}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unexpected(file, "model_type", f"one of {', '.join(FAMILIES)}", model_type)
    return FAMILIES[model_type].with_text(config, file)
