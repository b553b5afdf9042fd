"""A 16-bit folder in 4 or 8 bits, as transformers and servers load it, written tensor by tensor."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from convert.card import CARD, is_foreign, renamed
from convert.checkpoint import CONFIG, write_config
from convert.conversion import Conversion
from convert.errors import ConvertError, unexpected
from convert.families import Family
from convert.formats import FLOATS, WRITERS, Writer
from convert.formats.nf4_format import NF4, NF4_NESTED
from convert.model.paths import SCORE
from convert.model.spec import QUANTIZED
from convert.output import WriteOptions, Written, write_folder
from convert.plan_merge import Changes
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
    **write: Unpack[WriteOptions],
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
        write: As of `convert.output.write_folder`; a matrix with NaN or infinity is always refused.

    Returns:
        The folder and its size.

    Raises:
        ConvertError: The folder is damaged, quantised already, or an entry of `skip` matches nothing; or the place is
            taken.
        OSError: The disk has no room, …; the place is as it was.
    """
    if dtype is not None and dtype not in FLOATS:
        raise unexpected(folder, "dtype", f"one of {', '.join(FLOATS)}", dtype)
    writer = writer_for(scheme, activations, QuantizationAware.read(Path(source)), folder)
    if not nested and scheme != NF4.target:
        raise unexpected(folder, "nested", f"true (only {NF4.label} has scales of scales)", False)
    check_apart(folder, source)
    writer = writer if nested else NF4
    weights = _open(source, writer.bits)
    skipped = modules_named(weights, skip)
    if all(spec.kind not in QUANTIZED or path in skipped for path, spec in weights.specs.items()):
        raise ConvertError(f"{source}: expected a matrix to quantise, got none that is not skipped")
    conversion = Conversion(weights, Changes(), dtype=dtype, scheme=scheme, writer=writer, skipped=skipped)
    config = conversion.config()
    if dtype is not None and not {"dtype", "torch_dtype"} & config.keys():
        config["torch_dtype"] = dtype

    def finish(unfinished: Path) -> None:
        copy_side_files(weights.checkpoint.folder, unfinished)
        _copy_card(weights.checkpoint.folder, unfinished, Path(folder).name, scheme)
        write_config(unfinished / CONFIG, config)
        open_weights(unfinished)

    made_from = {"source": fingerprint(source), "settings": [scheme, nested, list(skip), writer.activations, dtype]}
    return write_folder(folder, conversion.jobs, made_from=made_from, finish=finish, **write)


def _copy_card(source: Path, target: Path, name: str, scheme: str) -> None:
    """Copy a model card; one by fastjax names the new folder and its format."""
    if not (source / CARD).is_file():
        return
    text = (source / CARD).read_text("utf-8", errors="replace")
    if not is_foreign(source / CARD):
        text = renamed(text, source.name, name).replace("\n## Use it\n", f"\nQuantised to {scheme}.\n\n## Use it\n", 1)
    (target / CARD).write_text(text, encoding="utf-8")


def _open(source: str | os.PathLike[str], bits: int) -> Weights:
    """Open a folder that can be quantised to fewer bits."""
    weights = open_weights(source)
    refuse_scored(weights)
    small = [form for form in weights.formats() if form.bits <= bits]
    if small:
        raise ConvertError(
            f"{source}: expected weights of 16 bits or more, got {small[0].label}: it is quantised already"
        )
    return weights


def refuse_scored(weights: Weights) -> None:
    """Raise ConvertError for a reward model, which servers and llama.cpp do not know."""
    if f"{SCORE}.weight" in weights.specs:
        expected = "expected a model with logits, got one with a score in their place (a reward model)"
        raise ConvertError(f"{weights.checkpoint.folder}: {expected}")


def writer_for(
    scheme: str, activations: str | None, trained: QuantizationAware | None, folder: str | os.PathLike[str]
) -> Writer:
    """The writer of a scheme, for servers that quantise inputs in one way.

    Args:
        scheme: A key of `convert.formats.WRITERS`.
        activations: As of `quantize`.
        trained: What the result was trained for; None: nothing.
        folder: For messages.

    Raises:
        ConvertError: An unknown scheme, or activations that are not known with it.
    """
    if scheme not in WRITERS:
        raise unexpected(folder, "scheme", f"one of {', '.join(WRITERS)}", scheme)
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
    paths: set[str] = set()
    for entry in skip:
        matching = {
            path
            for path, row in weights.specs.items()
            if any(f".{name}".endswith(f".{entry}.weight") for name in (row.name, path))
            or (row.path.of_experts and f".{path}".endswith(f".{entry}.{row.path.part}.{row.path.leaf}"))
        }
        if not matching:
            raise ConvertError(f"{weights.checkpoint.folder}: skip: no module is named {entry}, or ends with it")
        paths |= matching
    return paths
