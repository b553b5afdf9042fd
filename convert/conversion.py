"""A folder derived from another: the job of each tensor, and config.json; changed by an adapter, cast or quantised."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.blocks import Blocks, copied
from convert.derived import derived_tensors, served_together, tensor_blocks
from convert.formats import FORMATS, Values, Writer
from convert.model.paths import HEAD, TABLES
from convert.model.spec import MODULES, QUANTIZED, UNCAST, WHOLE
from convert.model.tensors import TensorSpec
from convert.output import Job
from convert.plan_merge import Changes
from convert.weights import Weights


class Conversion:
    """The jobs and config.json of a derived folder.

    Attributes:
        packed: Whether the folder has matrices in the scheme that is asked for, and keeps the others as they are.
        changed: Tensors with an adapter in them.
        copied: Tensors as they were.
    """

    def __init__(
        self,
        weights: Weights,
        changes: Changes,
        *,
        dtype: str | None,
        scheme: str | None,
        writer: Writer | None,
        skipped: Collection[str],
    ):
        """Plan a conversion.

        Args:
            weights: The folder.
            changes: An adapter's.
            dtype: What plain tensors are cast to, and packed ones decode to; None: each tensor's own.
            scheme: What the layers' matrices are quantised to, a key of `convert.formats.WRITERS`; None: nothing.
            writer: What quantises them.
            skipped: Paths of matrices that are not quantised.
        """
        self.weights, self.changes, self.dtype = weights, changes, dtype
        self.scheme, self.writer, self.skipped = scheme, writer, skipped
        self.changed = self.copied = 0
        self.packed = writer is not None and any(weights.scheme(name) == scheme for name in weights.tensors)
        quantised = [spec for spec in weights.specs.values() if spec.kind in QUANTIZED and spec.path not in skipped]
        #: Whether each expert gets tensors of its own.
        self.apart = writer is not None and not self.packed and any(spec.kind == "experts" for spec in quantised)
        self.together = {} if writer is None else served_together(weights, apart=self.apart)
        #: Of the first packed tensor: what wrote it, and what it decodes to.
        self.written: tuple[Writer, np.dtype] | None = None
        self.unpacked: list[str] = []  # paths of the layers' other matrices
        self.jobs = list(self._jobs())

    def _jobs(self) -> Iterator[Job]:
        """In the order of the folder's files."""
        weights, changes = self.weights, self.changes
        stale = any(f"{module}.weight" in changes.tensors for module in TABLES)
        for name, tensor, target in derived_tensors(weights, apart=self.apart):
            if changes.scored and (name if tensor is None else tensor.weights[0].path) == f"{HEAD}.weight":
                continue  # of logits
            if tensor is not None and target is not None:
                yield self._job(tensor, target)
                continue
            rule = weights.ignored(name)
            if rule is not None and rule.same_as is not None and stale:
                continue  # a copy of a table that has changed
            self.copied += 1
            yield copied(weights.checkpoint, [name])
        for path, change in changes.tensors.items():
            if path not in weights.specs:  # the head that is no longer tied, or the score in its place
                self.changed += 1
                blocks = change.values(path, None)
                yield self._written(change.name, change.shape, self._cast(change.dtype), blocks, None)

    def _job(self, tensor: TensorSpec, target: TensorSpec) -> Job:
        """A tensor of the folder, written as `target`."""
        weights, spec = self.weights, target.weights[0]
        form, decoded = weights.tensor_format(tensor.name), weights.tensor_dtype(tensor.name)
        dtype = decoded if spec.kind in UNCAST else self._cast(decoded)
        writer = self._writer(tensor)
        if spec.kind in MODULES and writer is None:
            self.unpacked += [weight.path for weight in target.weights]
        changes = [self.changes.tensors.get(weight.path) for weight in target.weights]
        peers = self._peers(target, writer)
        self.changed, self.copied = self.changed + any(changes), self.copied + (not any(changes))
        if not any(changes) and not any(
            weight.path in self.changes.tensors for peer in peers for weight in peer.weights
        ):
            if writer is not None and self.packed:
                self.written = self.written or (writer, decoded)
                return copied(weights.checkpoint, weights.stored_names(tensor.name))
            if writer is None and form.name == dtype.name and target.name == tensor.name:
                return copied(weights.checkpoint, weights.stored_names(tensor.name))
        shape = next((change.shape for change in changes if change and tensor.layout == WHOLE), target.shape)
        return self._written(target.name, shape, dtype, tensor_blocks(target, self._values), writer, peers)

    def _writer(self, tensor: TensorSpec) -> Writer | None:
        """The writer that packs a tensor; None: it stays plain, or as it is."""
        if self.writer is None:
            return None
        if not self.packed:
            spec = tensor.weights[0]
            return self.writer if spec.kind in QUANTIZED and spec.path not in self.skipped else None
        if self.weights.scheme(tensor.name) != self.scheme:
            return None
        form = self.weights.tensor_format(tensor.name)
        return form if form.writable else self.writer  # a variant of the folder's own

    def _peers(self, target: TensorSpec, writer: Writer | None) -> list[TensorSpec]:
        """The other matrices whose values a matrix's scale depends on."""
        together = self.together.get(target.name, ()) if writer is not None and writer.whole else ()
        return [peer for peer in together if peer.name != target.name and self._writer(peer) is not None]

    def _values(self, path: str, expert: int | None) -> Blocks:
        change = self.changes.tensors.get(path)
        return self.weights.blocks(path, expert) if change is None else change.values(path, expert)

    def _written(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        blocks: Blocks,
        packer: Writer | None,
        peers: Sequence[TensorSpec] = (),
    ) -> Job:
        """A tensor of values that decode to `dtype`, packed or plain."""
        if packer is not None:
            self.written = self.written or (packer, dtype)
        writer = packer or FORMATS[dtype.name]
        others = [tensor_blocks(peer, self._values) for peer in peers]
        return writer.job(Values(self.weights.checkpoint.folder, name, blocks, shape, dtype, others))

    def _cast(self, dtype: np.dtype) -> np.dtype:
        return dtype if self.dtype is None else np.dtype(self.dtype)

    def config(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """config.json of the derived folder.

        Args:
            given: In place of the folder's own.
        """
        changes, family = self.changes, self.weights.family
        config = json.loads(json.dumps(self.weights.checkpoint.config if given is None else given))
        if self.written is not None and not self.packed:
            writer, dtype = self.written
            config["quantization_config"] = writer.quantization_config(dtype.name, family.unquantized(self.unpacked))
        elif self.written is None:
            config.pop("quantization_config", None)
        if changes.scored:
            config = family.scored(config)
        if changes.untied:
            config["tie_word_embeddings"] = False
        inner = config.get("text_config")
        for level in [config, *([inner] if isinstance(inner, dict) else [])]:
            if changes.untied and "tie_word_embeddings" in level:
                level["tie_word_embeddings"] = False
            if "vocab_size" in level and changes.vocabulary > level["vocab_size"]:
                level["vocab_size"] = changes.vocabulary
            for key in ("dtype", "torch_dtype"):
                if self.dtype is not None and key in level:
                    level[key] = self.dtype
        return config
