"""Base and adapter as one plain model folder, computed in float32 and written tensor by tensor.

The base is the folder that the user names: 16 or 32 bits, or NF4 and FP8, whose decoded values then are the base.
Tensors that the adapter leaves alone are copied byte for byte where their format may stay; so are those that the
family's table ignores, such as a vision tower.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.adapters import Adapter, open_adapter
from convert.blocks import Blocks, copied
from convert.card import write_card
from convert.checkpoint import CONFIG, MAX_SHARD_BYTES, write_config
from convert.derived import derived_tensors, served_together, tensor_blocks
from convert.errors import unexpected
from convert.formats import FLOATS, FORMATS, WRITERS, Values, Writer
from convert.generation_config import add_ends, end_tokens, missing_ends
from convert.model.paths import HEAD, TABLES
from convert.model.spec import MODULES, QUANTIZED, UNCAST, WHOLE
from convert.model.tensors import TensorSpec
from convert.output import Job, Monitor, Written, write_folder
from convert.plan_merge import Changes, changes
from convert.quantization_aware import QuantizationAware
from convert.quantize import loading_note, modules_named, writer_for
from convert.saving import copy_side_files
from convert.source import TOKENIZER_FILES, check_apart, count_tokens, fingerprint
from convert.trained_over import base_notes, held_as
from convert.weights import Weights, open_weights

DTYPES = (*FLOATS, *WRITERS)


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
    recipe: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    allow_nonfinite: bool = False,
    monitor: Monitor | None = None,
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
            for, likewise.
        unsloth_expert_layout: The adapter is on experts and from an Unsloth before September 2026, which ordered B
            otherwise than PEFT.
        config: Contents of config.json in place of the base's.
        recipe: How the adapter was trained, in Markdown, for the model card.
        max_shard_bytes: A shard is closed before it would grow beyond this.
        force: Replace a model folder that is there.
        allow_nonfinite: Write NaN and infinity, and report them, instead of refusing; a matrix that becomes NF4 is
            refused with any.
        monitor: Called with the bytes done and the bytes to do.

    Returns:
        The result. The folder has the base's config, generation config (with the ends that the adapter's names too),
        chat template and licence, the adapter's tokenizer if it knows as many tokens, and a model card; not quantised
        yet, also what it was trained for.

    Raises:
        ConvertError: A folder is damaged, the adapter is of another model, values are not finite, or the place is
            taken; the message names file and tensor.
        OSError: The disk has no room, …; the place is as it was.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unexpected(folder, "dtype", f"one of {', '.join(DTYPES)}", dtype)
    given = {"skip": ("no module", list(skip)), "activations": ("none", activations)}
    for name, (nothing, value) in given.items():
        if value and dtype not in WRITERS and not (name == "skip" and base_in_nf4):
            raise unexpected(folder, name, f"{nothing}, unless dtype is one of {', '.join(WRITERS)}", value)
    check_apart(folder, base, adapter)
    weights = open_weights(base)
    opened = open_adapter(
        adapter,
        family=weights.family,
        specs=weights.specs.values(),
        unsloth_expert_layout=unsloth_expert_layout,
        allow_nonfinite=allow_nonfinite,
    )
    kept = modules_named(weights, skip)
    found = changes(weights, opened, base_in_nf4=base_in_nf4, kept=kept)
    if found.scored and dtype in WRITERS:
        raise unexpected(
            folder, "dtype", f"one of {', '.join(FLOATS)} for a model with a score in place of logits", dtype
        )
    trained = QuantizationAware.read(opened.folder)
    writer = writer_for(dtype, activations, trained, folder) if dtype in WRITERS else None
    plan = _Plan(weights, found, dtype, writer, kept)
    for name, (nothing, value) in given.items():
        if value and plan.packed:
            raise unexpected(folder, name, f"{nothing} of a base that is in {dtype} already", value)
    jobs = list(plan.jobs())
    new_config = _new_config(weights, found, plan, config)
    notes = _notes(weights, opened, found, base_in_nf4, kept)
    notes += [note for note in [loading_note(weights.family, dtype)] if note is not None]
    ends = missing_ends(weights.checkpoint.folder, end_tokens(opened.folder))
    if ends:
        notes.append(f"generation_config.json names {', '.join(map(str, ends))} too, at which learnt answers end")
    if trained is not None and dtype is not None and writer is not None and not plan.packed:
        notes += [f"{opened.folder.name} was {each}" for each in trained.differences(dtype, writer.activations, skip)]

    def finish(place: Path) -> None:
        copy_side_files(weights.checkpoint.folder, place)
        _copy_tokenizer(opened.folder, weights.checkpoint.folder, place)
        if ends:
            add_ends(place, ends, weights.checkpoint.folder)
        if new_config is None:
            shutil.copyfile(weights.checkpoint.folder / CONFIG, place / CONFIG)
        else:
            write_config(place / CONFIG, new_config)
        if trained is not None and writer is None:
            trained.write(place)
        write_card(place, weights.checkpoint, opened, dtype=dtype, base_in_nf4=base_in_nf4, notes=notes, recipe=recipe)
        open_weights(place)

    made_from = {
        "base": fingerprint(base),
        "adapter": fingerprint(adapter),
        "settings": [
            *(dtype, base_in_nf4, list(skip), writer and writer.activations),
            *(unsloth_expert_layout, max_shard_bytes, allow_nonfinite, recipe),
        ],
        "config": new_config,
    }
    written = write_folder(
        folder,
        jobs,
        made_from=json.loads(json.dumps(made_from)),
        finish=finish,
        max_shard_bytes=max_shard_bytes,
        force=force,
        allow_nonfinite=allow_nonfinite,
        monitor=monitor,
    )
    return Merged(written, plan.changed, plan.copied, found.untied, found.vocabulary, tuple(notes))


class _Plan:
    """The job of each tensor of the base."""

    def __init__(self, weights: Weights, found: Changes, dtype: str | None, writer: Writer | None, skipped: set[str]):
        self.weights, self.found, self.dtype, self.writer, self.skipped = weights, found, dtype, writer, skipped
        self.changed = self.copied = 0
        #: Of matrices: whether the base has any in the scheme that is asked for, and keeps the others as they are.
        self.packed = dtype in WRITERS and any(weights.scheme(name) == dtype for name in weights.tensors)
        self.together = served_together(weights, apart=self.apart) if dtype in WRITERS else {}
        #: Of the first packed tensor: what wrote it, and what it decodes to.
        self.written: tuple[Writer, np.dtype] | None = None
        self.unpacked: list[str] = []  # paths of the layers' other matrices

    @property
    def apart(self) -> bool:
        """Whether each expert gets tensors of its own."""
        return self.dtype in WRITERS and not self.packed

    def jobs(self) -> Iterator[Job]:
        """In the order of the base's files."""
        weights = self.weights
        stale = any(f"{module}.weight" in self.found.tensors for module in TABLES)
        for name, tensor, place in derived_tensors(weights, apart=self.apart):
            if self.found.scored and (name if tensor is None else tensor.weights[0].path) == f"{HEAD}.weight":
                continue  # of logits
            if tensor is not None and place is not None:
                yield self._job(tensor, place)
                continue
            rule = weights.family.ignores(name, weights.checkpoint.config, weights.checkpoint.folder / CONFIG)
            if rule is not None and rule.same_as is not None and stale:
                continue  # a copy of a table that has changed
            self.copied += 1
            yield copied(weights.checkpoint, [name])
        for path, change in self.found.tensors.items():
            if path not in weights.specs:  # the head that is no longer tied, or the score in its place
                self.changed += 1
                yield self._written(
                    change.name, change.shape, self._target(change.dtype), change.values(path, None), None
                )

    def _job(self, tensor: TensorSpec, place: TensorSpec) -> Job:
        """A tensor of the base in its place."""
        weights, spec = self.weights, place.weights[0]
        form, decoded = weights.tensor_format(tensor.name), weights.tensor_dtype(tensor.name)
        target = decoded if spec.kind in UNCAST else self._target(decoded)
        into = self._writer(tensor)
        if spec.kind in MODULES and into is None:
            self.unpacked += [part.path for part in place.weights]
        changes = [self.found.tensors.get(part.path) for part in place.weights]
        peers = self._peers(place, into)
        self.changed, self.copied = self.changed + any(changes), self.copied + (not any(changes))
        if not any(changes) and not any(part.path in self.found.tensors for peer in peers for part in peer.weights):
            if into is not None and self.packed:
                self.written = self.written or (into, decoded)
                return copied(weights.checkpoint, weights.stored_names(tensor.name))
            if into is None and form.name == target.name and place.name == tensor.name:
                return copied(weights.checkpoint, weights.stored_names(tensor.name))
        shape = next((change.shape for change in changes if change and tensor.layout == WHOLE), place.shape)
        return self._written(place.name, shape, target, tensor_blocks(place, self._values), into, peers)

    def _writer(self, tensor: TensorSpec) -> Writer | None:
        """What packs a tensor of the base; None: it stays plain, or as it is."""
        if not self.packed:
            spec = tensor.weights[0]
            return self.writer if spec.kind in QUANTIZED and spec.path not in self.skipped else None
        if self.weights.scheme(tensor.name) != self.dtype:
            return None
        form = self.weights.tensor_format(tensor.name)
        return form if form.writable else self.writer  # a variant of the base's own

    def _peers(self, place: TensorSpec, writer: Writer | None) -> list[TensorSpec]:
        """The other matrices whose values a matrix's scale depends on."""
        together = self.together.get(place.name, ()) if writer is not None and writer.whole else ()
        return [peer for peer in together if peer.name != place.name and self._writer(peer) is not None]

    def _values(self, path: str, expert: int | None) -> Blocks:
        change = self.found.tensors.get(path)
        return self.weights.blocks(path, expert) if change is None else change.values(path, expert)

    def _written(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        blocks: Blocks,
        into: Writer | None,
        peers: Sequence[TensorSpec] = (),
    ) -> Job:
        """A tensor of values that decode to `dtype`, packed `into` a format or plain."""
        if into is not None:
            self.written = self.written or (into, dtype)
        writer = into or FORMATS[dtype.name]
        others = [tensor_blocks(peer, self._values) for peer in peers]
        return writer.job(Values(self.weights.checkpoint.folder, name, blocks, shape, dtype, others))

    def _target(self, own: np.dtype) -> np.dtype:
        return np.dtype(self.dtype) if self.dtype in FLOATS else own


def _new_config(
    weights: Weights, found: Changes, plan: _Plan, given: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """config.json of the merged model; None where the base's can be copied."""
    original = weights.checkpoint.config
    config = json.loads(json.dumps(original if given is None else given))
    if plan.written is not None and not plan.packed:
        form, dtype = plan.written
        skipped = weights.family.unquantized(plan.unpacked)
        config["quantization_config"] = form.quantization_config(dtype.name, skipped)
    elif plan.written is None:
        config.pop("quantization_config", None)
    if found.scored:
        config = weights.family.scored(config)
    inner = config.get("text_config")
    levels = [config, *([inner] if isinstance(inner, dict) else [])]
    if found.untied:
        config["tie_word_embeddings"] = False
    for level in levels:
        if found.untied and "tie_word_embeddings" in level:
            level["tie_word_embeddings"] = False
        if "vocab_size" in level and found.vocabulary > level["vocab_size"]:
            level["vocab_size"] = found.vocabulary
        for key in ("dtype", "torch_dtype"):
            if plan.dtype in FLOATS and key in level:
                level[key] = plan.dtype
    return None if config == original else config


def _copy_tokenizer(adapter: Path, base: Path, place: Path) -> None:
    """The adapter's tokenizer, unless it knows fewer tokens than the base's, and with it its chat template."""
    own, known = count_tokens(adapter), count_tokens(base)
    if own is None or own < (known or 0):
        return
    for file in sorted({file for pattern in TOKENIZER_FILES for file in place.glob(pattern)}):
        file.unlink()
    files = {file for pattern in (*TOKENIZER_FILES, "chat_template*") for file in adapter.glob(pattern)}
    for file in sorted(file for file in files if file.is_file()):
        shutil.copyfile(file, place / file.name)


def _notes(weights: Weights, adapter: Adapter, found: Changes, base_in_nf4: bool, kept: set[str]) -> list[str]:
    """The remarks for the user."""
    notes = []
    apart = [spec.path.module for path, spec in weights.specs.items() if path in kept and spec.kind in QUANTIZED]
    given = held_as(weights, base_in_nf4, name=str(weights.checkpoint.folder), skipped=apart)
    if differences := base_notes(adapter.config.base_model_name_or_path, adapter.over, given):
        notes += differences
    elif adapter.over is not None and given.when_read:
        notes.append(f"the adapter was trained over {adapter.over.told}, and so is what it was added to")
    if found.untied:
        notes.append("the adapter treats embedding and head differently: they are no longer tied")
    before = weights.specs["embed_tokens.weight"].shape[0]
    if found.scored:
        notes.append("a reward model: one score a text, read at its last token, in the place of logits")
    if found.vocabulary > before:
        notes.append(f"the vocabulary has grown from {before} to {found.vocabulary} rows")
    return notes
