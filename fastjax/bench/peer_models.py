"""Model folders with random values for other libraries, which load them in their own way, and their environment."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, models

from convert.checkpoint import CONFIG, write_config, write_shards
from convert.families import family_for
from convert.quantize import quantize

_SHARD_BYTES = 4 * 2**30
#: Environment variables of their processes: nothing is downloaded or sent.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
}


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model folder in bfloat16, of normal values, without a tokenizer.

    Args:
        folder: created.
        config: contents of config.json.
    """
    folder.mkdir(parents=True)
    family = family_for(config)
    values = (0.02 * np.random.default_rng(0).standard_normal(2**25, np.float32)).astype(ml_dtypes.bfloat16)
    tensors = ({spec.name: np.resize(values[: math.prod(spec.shape)], spec.shape)} for spec in family.specs(config))
    write_shards(folder, tensors, max_shard_bytes=_SHARD_BYTES)
    write_config(folder / CONFIG, {"architectures": [family.architecture], "torch_dtype": "bfloat16", **config})


def write_peer_model(folder: Path, config: Mapping[str, Any], *, nf4: bool) -> Path:
    """Write a model folder with a tokenizer.

    Args:
        folder: for the folders.
        config: contents of config.json.
        nf4: as bitsandbytes' NF4; else in bfloat16.

    Returns:
        The folder to load.
    """
    chosen = plain = folder / "16bit"
    write_model(plain, config)
    if nf4:
        quantize(plain, chosen := folder / "nf4")
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(chosen / "tokenizer.json"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (chosen / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return chosen
