"""Base and adapter as one plain model folder, computed in float32 and written tensor by tensor.

The base is the folder that the user names: 16 or 32 bits, or NF4 and FP8, whose decoded values then are the base.
Tensors that the adapter leaves alone are copied byte for byte where their format may stay; so are those that the
family's table ignores, such as a vision tower.
"""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from convert.adapters import Adapter, open_adapter
from convert.card import Card, read_training, whole_use, write_card
from convert.checkpoint import CONFIG, write_config
from convert.conversion import Conversion
from convert.errors import unexpected
from convert.formats import FLOATS, WRITERS
from convert.generation_config import add_ends, end_tokens, missing_ends
from convert.model.spec import QUANTIZED
from convert.output import WriteOptions, Written, write_folder
from convert.plan_merge import changes
from convert.quantization_aware import QuantizationAware
from convert.quantize import loading_note, modules_named, writer_for
from convert.saving import copy_side_files
from convert.source import TOKENIZER_FILES, check_apart, count_tokens, fingerprint
from convert.trained_over import base_notes, held_as
from convert.weights import Weights, open_weights

DTYPES = (*FLOATS, *WRITERS)
#: Setting of a quantised dtype -> its absence.
_NOTHING = {"skip": "no module", "activations": "none"}


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        written: The folder and its size.
        changed: Tensors with the adapter in them.
        copied: Tensors as they were.
        untied: Whether the adapter has untied a head from the embedding.
        vocabulary: Rows of the embedding.
        notes: Further facts, in sentences.
    """

    written: Written
    changed: int
    copied: int
    untied: bool
    vocabulary: int
    notes: tuple[str, ...]


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    base_in_nf4: bool = False,
    skip: Sequence[str] = (),
    activations: str | None = None,
    unsloth_expert_layout: bool = False,
    config: Mapping[str, Any] | None = None,
    **write: Unpack[WriteOptions],
) -> Merged:
    """Write a model folder with an adapter merged into its base.

    Args:
        base: The model folder that the adapter is added to: 16 or 32 bits, NF4 or FP8. For an adapter that was trained
            over 4-bit weights the 4-bit folder and the original are different models; this one is taken.
        adapter: PEFT folder.
        folder: The final place.
        dtype: "bfloat16", "float16" or "float32" for the whole model; or a key of `convert.formats.WRITERS`, such as
            "nf4", for its layers' matrices quantised and the rest as it is (matrices that the base has in that scheme
            stay what they are where the adapter leaves them alone); None: each tensor keeps its dtype, or takes the
            one that it decodes to.
        base_in_nf4: The base has 16 bits but the adapter was trained with its layers' matrices quantised to NF4 as
            they were read: they are quantised and decoded before the adapter is added.
        skip: With a quantised `dtype` or `base_in_nf4`, modules or ends of their names ("layers.0.mlp.down_proj",
            "o_proj") that are not quantised.
        activations: With a quantised `dtype`, as of `convert.quantize.quantize`; None: what the adapter was trained
            for, on its conditions.
        unsloth_expert_layout: The adapter is on experts and from an Unsloth before September 2026, which ordered B
            otherwise than PEFT.
        config: Contents of config.json in place of the base's.
        write: As of `convert.output.write_folder`; a matrix that is quantised is refused with any NaN or infinity.

    Returns:
        The result. The folder has the base's config, generation config (with the ends that the adapter's names too),
        chat template and licence, the adapter's tokenizer if it knows as many tokens, and a model card; not quantised
        yet, also what it was trained for.

    Raises:
        ConvertError: A folder is damaged, the adapter is of another model, values are not finite, or the place is
            taken; the message names file and tensor.
        OSError: The disk has no room, …; the place is as it was.
    """
    _check_options(folder, dtype, base_in_nf4, {"skip": list(skip), "activations": activations})
    check_apart(folder, base, adapter)
    weights, allow = open_weights(base), write.get("allow_nonfinite", False)
    experts = {"specs": weights.specs.values(), "unsloth_expert_layout": unsloth_expert_layout}
    opened = open_adapter(adapter, family=weights.family, allow_nonfinite=allow, **experts)
    merging = _Merge(Path(folder), weights, opened, dtype, base_in_nf4, skip, activations, config)
    return merging.write({"unsloth_expert_layout": unsloth_expert_layout}, **write)


def _check_options(
    folder: str | os.PathLike[str], dtype: str | None, base_in_nf4: bool, quantised: Mapping[str, Any]
) -> None:
    """Refuse an unknown dtype, and settings of a quantised one beside another."""
    if dtype is not None and dtype not in DTYPES:
        raise unexpected(folder, "dtype", f"one of {', '.join(DTYPES)}", dtype)
    for name, value in quantised.items():
        if value and dtype not in WRITERS and not (name == "skip" and base_in_nf4):
            expected = f"{_NOTHING[name]}, unless dtype is one of {', '.join(WRITERS)}"
            raise unexpected(folder, name, expected, value)


class _Merge:
    """A merge with all that it is made from: the tensors, config.json, and the sentences about it."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        adapter: Adapter,
        dtype: str | None,
        base_in_nf4: bool,
        skip: Sequence[str],
        activations: str | None,
        config: Mapping[str, Any] | None,
    ):
        self.folder, self.weights, self.adapter = folder, weights, adapter
        self.training = read_training(adapter.folder)
        self.dtype, self.base_in_nf4, self.skip = dtype, base_in_nf4, skip
        self.base, scheme = weights.checkpoint.folder, dtype if dtype in WRITERS else None
        self.skipped = modules_named(weights, skip)
        self.changes = changes(weights, adapter, base_in_nf4=base_in_nf4, kept=self.skipped)
        if self.changes.scored and scheme is not None:
            expected = f"one of {', '.join(FLOATS)} for a model with a score in place of logits"
            raise unexpected(folder, "dtype", expected, dtype)
        self.trained = QuantizationAware.read(adapter.folder)
        self.writer = None if scheme is None else writer_for(scheme, activations, self.trained, folder)
        self.conversion = Conversion(
            weights,
            self.changes,
            dtype=None if scheme is not None else dtype,
            scheme=scheme,
            writer=self.writer,
            skipped=self.skipped,
        )
        for name, value in {"skip": list(skip), "activations": activations}.items():
            if value and self.conversion.packed:
                raise unexpected(folder, name, f"{_NOTHING[name]} of a base that is in {dtype} already", value)
        self.config = self.conversion.config(config)
        self.ends = missing_ends(self.base, end_tokens(adapter.folder))
        self.notes = self._notes()

    def write(self, settings: Mapping[str, Any], **write: Unpack[WriteOptions]) -> Merged:
        """Write the folder.

        Args:
            settings: Further ones that it is made with.
            write: As of `merge`.
        """
        served = None if self.writer is None else self.writer.activations
        made_from = {
            "base": fingerprint(self.base),
            "adapter": fingerprint(self.adapter.folder),
            "settings": [self.dtype, self.base_in_nf4, list(self.skip), served, self.training, settings],
            "config": self.config,
        }
        written = write_folder(self.folder, self.conversion.jobs, made_from=made_from, finish=self._finish, **write)
        untied, vocabulary = self.changes.untied, self.changes.vocabulary
        return Merged(written, self.conversion.changed, self.conversion.copied, untied, vocabulary, tuple(self.notes))

    def _finish(self, folder: Path) -> None:
        """Write config.json, tokenizer, model card and the like into the folder."""
        copy_side_files(self.base, folder)
        _copy_tokenizer(self.adapter.folder, self.base, folder)
        if self.ends:
            add_ends(folder, self.ends, self.base)
        if self.config == self.weights.checkpoint.config:
            shutil.copyfile(self.base / CONFIG, folder / CONFIG)
        else:
            write_config(folder / CONFIG, self.config)
        if self.trained is not None and self.writer is None:
            self.trained.write(folder)
        write_card(folder, self._card(), self.folder)
        open_weights(folder)

    def _card(self) -> Card:
        """The card of the merged folder."""
        adapter, base = self.adapter.config, self.weights.checkpoint
        named = str(adapter.base_model_name_or_path or base.config.get("_name_or_path") or base.folder.name)
        quantization = base.config.get("quantization_config") or {}
        kind = "its weights as they are stored"
        if quantization:
            kind = f"its {quantization.get('quant_method', '4 or 8 bits')} weights, decoded"
        if self.base_in_nf4:
            kind = "its layers' matrices quantised to NF4 (nested scales) and decoded"
        revision = f", revision {adapter.revision}" if adapter.revision else ""
        about = (
            f"{Path(named).name}{revision} with a LoRA adapter merged into it, in float32, by fastjax.",
            "",
            f"- Base: `{base.folder.name}`, {kind}.",
            f"- Stored as: {self.dtype or 'each tensor in the dtype of the base'}.",
            *(f"- {note[0].upper()}{note[1:]}." for note in self.notes),
        )
        use = whole_use(shlex.quote(self.folder.name), scored=self.changes.scored)
        return Card(named, "transformers", about, adapter, self.training, use, base.folder)

    def _notes(self) -> list[str]:
        """The remarks for the user."""
        weights, adapter, changes, notes = self.weights, self.adapter, self.changes, []
        specs = weights.specs.items()
        apart = [spec.path.module for path, spec in specs if path in self.skipped and spec.kind in QUANTIZED]
        given = held_as(weights, self.base_in_nf4, name=str(self.base), skipped=apart)
        if differences := base_notes(adapter.config.base_model_name_or_path, adapter.over, given):
            notes += differences
        elif adapter.over is not None and given.when_read:
            notes.append(f"the adapter was trained over {adapter.over.told}, and so is what it was added to")
        if changes.untied:
            notes.append("the adapter treats embedding and head differently: they are no longer tied")
        before = weights.specs["embed_tokens.weight"].shape[0]
        if changes.scored:
            notes.append("a reward model: one score a text, read at its last token, in the place of logits")
        if changes.vocabulary > before:
            notes.append(f"the vocabulary has grown from {before} to {changes.vocabulary} rows")
        if (note := loading_note(weights.family, self.dtype)) is not None:
            notes.append(note)
        if self.ends:
            names = ", ".join(map(str, self.ends))
            notes.append(f"generation_config.json names {names} too, at which learnt answers end")
        if (
            self.trained is not None
            and self.dtype is not None
            and self.writer is not None
            and not self.conversion.packed
        ):
            differences = self.trained.differences(self.dtype, self.writer.activations, self.skip)
            notes += [f"{adapter.folder.name} was {each}" for each in differences]
        return notes


def _copy_tokenizer(adapter: Path, base: Path, target: Path) -> None:
    """The adapter's tokenizer, unless it knows fewer tokens than the base's, and with it its chat template."""
    tokens, known = count_tokens(adapter), count_tokens(base)
    if tokens is None or tokens < (known or 0):
        return
    for file in sorted({file for pattern in TOKENIZER_FILES for file in target.glob(pattern)}):
        file.unlink()
    files = {file for pattern in (*TOKENIZER_FILES, "chat_template*") for file in adapter.glob(pattern)}
    for file in sorted(file for file in files if file.is_file()):
        shutil.copyfile(file, target / file.name)
