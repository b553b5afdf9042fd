"""Model folders and adapters of named arrays."""

import json

import numpy as np

from convert.adapters import open_adapter, rank_and_alpha, targets
from convert.checkpoint import CONFIG, WEIGHT_FILES, write_config, write_shards
from convert.families.llama import LLAMA
from convert.files import atomic_folder
from convert.tensor_file import write_tensor_file


def write_checkpoint(folder, tensors, config, **options):
    """Write (name, array) pairs and a config as a conversion does, whole or not at all."""
    with atomic_folder(folder, replaces=WEIGHT_FILES) as temporary:
        write_shards(temporary, ({name: array} for name, array in tensors), **options)
        write_config(temporary / CONFIG, config)


def read_adapter(folder, **options):
    """The settings of a PEFT folder and its arrays by path."""
    adapter = open_adapter(folder, **options)
    return adapter.config, {path: adapter.read(path) for path in adapter.tensors}


def write_peft(folder, tensors, **settings):
    """An adapter folder of arrays by PEFT's own names."""
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": np.ascontiguousarray(array) for name, array in tensors.items()}
    write_tensor_file(folder / "adapter_model.safetensors", named)
    return folder


def lora_arrays(config, weights, family=LLAMA, seed=0):
    """Random A and B of the matrices that an adapter is on.

    Args:
        config: Its settings.
        weights: (path, shape) of the model's weights.
        family: The model's.
        seed: Of the draws.
    """
    rng, arrays = np.random.default_rng(seed), {}
    for path, (*rows, columns) in weights:
        module = path.removesuffix(".weight")
        if len(rows) == 1 and module != path and targets(config, family.module_name(module), family=family):
            rank = rank_and_alpha(config, family.module_name(module))[0]
            arrays[f"{module}.lora_A"] = rng.standard_normal((rank, columns)).astype(np.float32)
            arrays[f"{module}.lora_B"] = rng.standard_normal((*rows, rank)).astype(np.float32)
    return arrays
