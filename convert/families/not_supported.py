"""Families that are not supported, by the names of their models on the hub, where no config.json is at hand."""

import re

#: A family, or a format of weights → its models' names, in small letters.
_NAMES = {
    **{"baichuan": "baichuan", "bloom": "bloom", "btlm": "btlm-", "dbrx": "dbrx"},
    "deepseek": "deepseek-(v2|v[4-9])",
    **{"falcon": "falcon-(rw|7b|40b|180b)", "falcon_h1": "falcon-h1", "bitnet": "falcon-e-|bitnet"},
    **{"gemma3n": "gemma-?3n", "gemma4": "gemma-?4"},
    **{"gpt2": "gpt2|cerebras-gpt", "gpt_neox": "gpt-neox|pythia|redpajama-incite|dolly", "gptj": "gpt-j"},
    **{"granitemoehybrid": "granite-4", "internlm": "internlm", "jamba": "jamba", "kimi": r"kimi-(?!k2(?![.\d]))"},
    **{"lfm2": "lfm2", "llama4": "llama-?4-", "mamba": "mamba", "mimo": "mimo-", "minimax": "minimax-(?!m2)"},
    **{"mpt": r"mpt-\d|replit-code", "nemotron_h": "nemotron-(h|3|nano)(?!.*llama)", "opt": r"/opt-\d"},
    **{"qwen": r"qwen-\d"},
    **{"stablelm": "stablelm", "gpt_bigcode": "starcoder(?!2)", "GPTQ, AWQ or AQLM": "gptq|awq|aqlm"},
}


def unsupported_by_name(name: str) -> str | None:
    """The family, or the format of weights, that a name on the hub says and that is not supported; None: it says none.

    Args:
        name: of a model, "organisation/model".
    """
    return next((family for family, names in _NAMES.items() if re.search(names, name.lower())), None)
