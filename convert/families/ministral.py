"""Ministral: Mistral with windows in some layers."""

from convert.families.family import Family
from convert.families.mistral import DEFAULTS
from convert.families.windows import windows

MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    defaults=DEFAULTS,
    read=lambda get, fields: windows(get, fields, lambda number: True),
    gguf="llama.cpp has no Mistral some of whose layers have windows",
)
