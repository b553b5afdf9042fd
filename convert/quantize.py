"""A 16-bit folder in 4 or 8 bits, as transformers and servers load it, written tensor by tensor."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.blocks import copied
from convert.checkpoint import CONFIG, MAX_SHARD_BYTES, write_config
from convert.derived import derived_tensors, served_together, tensor_blocks
from convert.errors import ConvertError, unexpected
from convert.families import Family
from convert.formats import FLOATS, FORMATS, WRITERS, Values, Writer
from convert.formats.nf4_format import NF4, NF4_NESTED
from convert.model.paths import SCORE
from convert.model.spec import MODULES, QUANTIZED, UNCAST
from convert.output import Job, Monitor, Written, write_folder
from convert.quantization_aware import QuantizationAware
from convert.saving import copy_side_files
from convert.source import check_apart, fingerprint
from convert.weights import Weights, open_weights


def quantize(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    scheme: str = NF4_NESTED.target,
    nested: bool = True,
    skip: Sequence[str] = (),
    activations: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    allow_nonfinite: bool = False,
    monitor: Monitor | None = None,
) -> Written:
    """Write a model folder whose layers' matrices are quantised: NF4 as bitsandbytes saves it, or compressed-tensors.

    Args:
        source: Model folder of 16 or 32 bits, or FP8, which is decoded first.
        folder: The final place.
        scheme: A key of `convert.formats.WRITERS`: "nf4", "int4-128", "fp8-row", …
        nested: Quantise NF4's scales too (``bnb_4bit_use_double_quant``).
        skip: Modules, or ends of their names ("layers.0.mlp.down_proj", "o_proj"), that stay as they are.
        activations: What the folder tells servers of the matrices' inputs: "none" (they stay as they are), or a format
            in which they are quantised token by token, of the scheme's `inputs`; None: what the source was trained for,
            if that is the scheme and the format is known with it; else the scheme's usual.
        dtype: "bfloat16", "float16" or "float32": what the matrices decode to and the rest is cast to; None: each
            keeps its own.
        max_shard_bytes: A shard is closed before it would grow beyond this.
        force: Replace a model folder that is there.
        allow_nonfinite: Keep NaN and infinity in tensors that stay plain; a matrix with any is always refused.
        monitor: Called with the bytes done and the bytes to do.

    Returns:
        The folder and its size.

    Raises:
        ConvertError: The folder is damaged, quantised already, or an entry of `skip` matches nothing; or the place is
            taken.
        OSError: The disk has no room, …; the place is as it was.
    """
    if dtype is not None and dtype not in FLOATS:
        raise unexpected(folder, "dtype", f"one of {', '.join(FLOATS)}", dtype)
    if scheme not in WRITERS:
        raise unexpected(folder, "scheme", f"one of {', '.join(WRITERS)}", scheme)
    writer = writer_for(scheme, activations, QuantizationAware.read(Path(source)), folder)
    if not nested and scheme != NF4.target:
        raise unexpected(folder, "nested", f"true (only {NF4.label} has scales of scales)", False)
    writer = writer if nested else NF4
    check_apart(folder, source)
    weights = open_weights(source)
    if f"{SCORE}.weight" in weights.specs:
        raise ConvertError(
            f"{source}: expected a model with logits, got one with a score in their place (a reward model)"
        )
    small = [found for found in weights.formats() if found.bits <= writer.bits]
    if small:
        raise ConvertError(
            f"{source}: expected weights of 16 bits or more, got {small[0].label}: it is quantised already"
        )
    kept = modules_named(weights, skip)
    packed = [path for path, row in weights.specs.items() if row.kind in QUANTIZED and path not in kept]
    if not packed:
        raise ConvertError(f"{source}: expected a matrix to quantise, got none that is not skipped")
    config = _config(weights, packed, writer, dtype)

    def finish(place: Path) -> None:
        copy_side_files(weights.checkpoint.folder, place)
        for card in weights.checkpoint.folder.glob("README.md"):
            shutil.copyfile(card, place / card.name)
        write_config(place / CONFIG, config)
        open_weights(place)

    return write_folder(
        folder,
        _jobs(weights, set(packed), writer, dtype),
        made_from={
            "source": fingerprint(source),
            "settings": [scheme, nested, list(skip), writer.activations, dtype, max_shard_bytes],
        },
        finish=finish,
        max_shard_bytes=max_shard_bytes,
        force=force,
        allow_nonfinite=allow_nonfinite,
        monitor=monitor,
    )


def _jobs(weights: Weights, packed: set[str], writer: Writer, dtype: str | None) -> Iterator[Job]:
    apart = any(weights.specs[path].kind == "experts" for path in packed)
    together = served_together(weights, apart=apart)
    for name, tensor, place in derived_tensors(weights, apart=apart):
        if tensor is None or place is None:
            yield copied(weights.checkpoint, [name])
            continue
        own, stored = weights.tensor_dtype(tensor.name), weights.tensor_format(tensor.name).name
        spec = place.weights[0]
        target = own if dtype is None or spec.kind in UNCAST else np.dtype(dtype)
        packs = spec.path in packed
        if not packs and stored == target.name and place.name == tensor.name:
            yield copied(weights.checkpoint, [name])
            continue
        written = writer if packs else FORMATS[target.name]
        blocks = tensor_blocks(place, weights.blocks)
        peers = [
            tensor_blocks(peer, weights.blocks)
            for peer in (together[place.name] if packs and writer.whole else ())
            if peer.name != place.name and peer.weights[0].path in packed
        ]
        yield written.job(Values(weights.checkpoint.folder, place.name, blocks, place.shape, target, peers))


def writer_for(
    scheme: str, activations: str | None, trained: QuantizationAware | None, folder: str | os.PathLike[str]
) -> Writer:
    """What writes a scheme, for servers that quantise inputs as they are to.

    Args:
        scheme: A key of `convert.formats.WRITERS`.
        activations: As of `quantize`.
        trained: What the result was trained for; None: nothing.
        folder: For messages.

    Raises:
        ConvertError: Activations that are not known with the scheme.
    """
    writer = WRITERS[scheme]
    if activations is not None:
        wanted = None if activations == "none" else activations
        if wanted not in writer.inputs:
            known = ", ".join("none" if name is None else name for name in writer.inputs)
            raise unexpected(folder, "activations", f"one of those that {scheme} is served with: {known}", activations)
        return writer.serving(wanted)
    if trained is not None and trained.weights == scheme and trained.activations in writer.inputs:
        return writer.serving(trained.activations)
    return writer


def loading_note(family: Family, scheme: str | None) -> str | None:
    """A sentence about a written folder that transformers does not load; None for others.

    Args:
        family: The model's.
        scheme: A key of `convert.formats.WRITERS`, or None.
    """
    if scheme != NF4_NESTED.target or family.mixture is None:
        return None
    return (
        "transformers and bitsandbytes have no experts in 4 bits and do not load this folder, which fastjax does; for "
        "them merge in 16 bits, for servers take --scheme (of quantize) or --dtype (of merge) int4-128 or fp8-row"
    )


def modules_named(weights: Weights, skip: Sequence[str]) -> set[str]:
    """The paths of matrices that stay as they are.

    Args:
        weights: of the model.
        skip: as of `quantize`.

    Raises:
        ConvertError: an entry matches nothing.
    """
    kept: set[str] = set()
    for entry in skip:
        matching = {
            path
            for path, row in weights.specs.items()
            if any(f".{name}".endswith(f".{entry}.weight") for name in (row.name, path))
            or (row.path.of_experts and f".{path}".endswith(f".{entry}.{row.path.part}.{row.path.leaf}"))
        }
        if not matching:
            raise ConvertError(f"{weights.checkpoint.folder}: skip: no module is named {entry}, or ends with it")
        kept |= matching
    return kept


def _config(weights: Weights, packed: Sequence[str], writer: Writer, dtype: str | None) -> dict[str, Any]:
    target = weights.decoded_dtype(packed[0]).name if dtype is None else dtype
    left = [path for path, row in weights.specs.items() if row.kind in MODULES and path not in set(packed)]
    config = dict(weights.checkpoint.config)
    config["quantization_config"] = writer.quantization_config(target, weights.family.unquantized(left))
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    return config
