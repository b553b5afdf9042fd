"""Model folders of any size with arbitrary values, to measure their readers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint import INDEX, write_config
from convert.families import family_for
from convert.tensor_file import DTYPES, lay_out


def make_model(folder: Path, config: Mapping[str, Any], shard_bytes: int, fill: np.ndarray | None = None) -> int:
    """Write a folder in bfloat16, without a tokenizer.

    Args:
        folder: created.
        config: contents of config.json.
        shard_bytes: maximum size of a file.
        fill: bfloat16, repeated over every file; None: zeros that take no room on the disk.

    Returns:
        Bytes of all files.
    """
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = [{}]
    for spec in family_for(config).specs(config):
        filled = sum(2 * int(np.prod(shape)) for _, shape in shards[-1].values())
        if shards[-1] and filled + 2 * int(np.prod(spec.shape)) > shard_bytes:
            shards.append({})
        shards[-1][spec.name] = (DTYPES["BF16"], spec.shape)
    names, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = lay_out(name, tensors)
        with open(folder / name, "wb") as stream:
            stream.write(layout.header)
            if fill is None:
                stream.truncate(layout.size)
            else:
                for start in range(len(layout.header), layout.size, fill.nbytes):
                    stream.write(fill.view(np.uint8)[: layout.size - start].data)
        names |= dict.fromkeys(tensors, name)
        total += layout.size
    write_config(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    write_config(folder / "config.json", config)
    return total
