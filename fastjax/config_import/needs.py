"""Needs of an imported run that its settings do not show: a family that there is, files from the network."""

import glob
import re
from pathlib import Path

from convert.errors import ConvertError
from convert.families import FAMILIES, family_for
from convert.files import read_json
from convert.hub import split
from fastjax.config_import.job import Job

#: A family that there is not → its models' names, in small letters.
_BY_NAME = {
    **{"afmoe": "trinity-", "apertus": "apertus", "baichuan": "baichuan", "bloom": "bloom", "btlm": "btlm-"},
    **{"cohere2": "command-(r7b|a)", "dbrx": "dbrx", "deepseek": "deepseek-(v[2-9]|r1(?!-distill))"},
    **{"falcon": "falcon-(rw|7b|40b|180b)", "falcon_h1": "falcon-h1", "bitnet": "falcon-e-|bitnet"},
    **{"gemma3n": "gemma-?3n", "gemma4": "gemma-?4", "glm4": "glm-4-(9b|32b)", "glm_moe": "glm-(4.7-flash|5)"},
    **{"gpt2": "gpt2|cerebras-gpt", "gpt_neox": "gpt-neox|pythia|redpajama-incite|dolly", "gptj": "gpt-j"},
    **{"granitemoehybrid": "granite-4", "internlm": "internlm", "jamba": "jamba", "kimi": "kimi-", "lfm2": "lfm2"},
    **{"llama4": "llama-?4-", "mamba": "mamba", "mimo": "mimo-", "minimax": "minimax", "mistral4": "mistral-small-4"},
    **{"mpt": r"mpt-\d|replit-code", "nemotron": "nemotron-(mini|h|3|nano)(?!.*llama)", "opt": r"/opt-\d"},
    **{"phi": r"phi-(1|2)\b|phi-1_5", "qwen": r"qwen-\d", "qwen3_5": "qwen3.5", "qwen3_next": "qwen3-next"},
    **{"stablelm": "stablelm", "starcoder2": "starcoder", "GPTQ, AWQ or AQLM": "gptq|awq|aqlm"},
}


def note_needs(job: Job) -> None:
    """Note a base model whose family there is not, and a model and data that are no files here."""
    model = job.carried["model.model_name"]
    name, revision = split(model.value)
    folder = Path(name).expanduser()
    config = next((file for file in (folder / "config.json", *_kept(name, revision)) if file.is_file()), None)
    said = []
    if config is not None:
        try:
            family_for(read_json(config), config)
        except ConvertError as error:
            said.append(f"not supported: {error}")
    elif family := next((key for key, names in _BY_NAME.items() if re.search(names, name.lower())), None):
        known = ", ".join(FAMILIES)
        said.append(f"by its name of a kind that is not supported, {family}; there are {known}")
    if config is None and not folder.is_dir():
        said.append("no folder here: it comes from the hub, over the network, as the run begins")
    if said:
        job.notes[model.key] = "; ".join(said)
    for setting in ("data.train", "data.eval"):
        if (line := job.carried.get(setting)) is not None:
            away = [path for source in line.value if not _is_here(path := str(source["path"]))]
            if away:
                listed = ", ".join(dict.fromkeys(away))
                job.notes[line.key] = f"no file here: `datasets` fetches over the network, as the run begins: {listed}"


def _kept(name: str, revision: str | None) -> list[Path]:
    """config.json of a model on the hub, where the hub's cache has it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # no name of the hub's
        return []
    return [Path(found)] if isinstance(found, str) else []


def _is_here(path: str) -> bool:
    there = str(Path(path).expanduser())
    return Path(there).exists() or (glob.has_magic(there) and bool(glob.glob(there, recursive=True)))
