"""The reference's log-probabilities of a run's rows, computed once before its first step.

They are the numbers that each step would compute: the same function over the same frozen arrays, compiled as the
evaluation is. They are kept in a file, named by a fingerprint of all that they depend on; deleting it is always safe. A
model that came in memory has no fingerprint, so nothing of it is kept.
"""

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from convert.files import atomic_file
from fastjax.data import Batches, Dataset
from fastjax.data.batches import Batch
from fastjax.data.packing import PackedRows
from fastjax.data.preferences import with_reference
from fastjax.parallel import MeshShape
from fastjax.parallel.processes import barrier, gathered_numbers, is_primary
from fastjax.runs.datasets import RunData
from fastjax.runs.identity import Identity, digest
from fastjax.training.config import TrainConfig

#: The version; raise it when equal input gives other numbers.
_FORMAT = 2
#: Computes the log-probabilities of a batch's documents, float32 [1, B, D].
Program = Callable[[Batch], Any]


def with_references(
    data: RunData,
    program: Program,
    batched: Callable[[PackedRows], Batches],
    keep: Callable[[Dataset], Path] | None,
    tell: Callable[[str], None],
) -> RunData:
    """The data of a run with the reference's log-probabilities of every document, held-out ones too.

    Args:
        data: the run's, of a loss with a reference.
        program: computes them.
        batched: the batches of rows that it is called with, in their order.
        keep: data set -> its file; None: nothing is kept.
        tell: takes a message for people.
    """

    def one(name: str, dataset: Dataset) -> Dataset:
        file = None if keep is None else keep(dataset)
        log_probs = None if file is None else _read(file, dataset.rows)
        if not all(gathered_numbers(int(log_probs is not None))):  # all processes compute, or none
            log_probs = _compute(batched(dataset.rows), program)
            tell(f"{name}: log-probabilities of the reference computed")
            if file is not None:
                _write(file, log_probs, tell)
        else:
            tell(f"{name}: log-probabilities of the reference from {file}")
        assert log_probs is not None
        return dataset._replace(rows=with_reference(dataset.rows, log_probs))

    assert isinstance(data.train, Dataset), "preferences are not streamed"
    train = one("train", data.train)
    held_out = None if data.held_out is None else one("held out", data.held_out)
    batches: Any = data.batches
    return data._replace(train=train, held_out=held_out, batches=batches._replace(rows=train.rows))


def reference_file(
    config: TrainConfig, identity: Identity, weights: Any, mesh: MeshShape
) -> Callable[[Dataset], Path] | None:
    """The file of a data set's log-probabilities under a run's reference; None: the run keeps no data.

    Args:
        config: the run.
        identity: its fingerprints.
        weights: names, sizes and times of the base's files; fingerprints of tensors are samples.
        mesh: shape of the mesh, whose devices add in another order.
    """
    if config.data.cache_dir is None:
        return None
    device = jax.devices()[0]
    depends = {
        "format": _FORMAT,
        "base": [identity.model, identity.weights, weights],
        "start": identity.adapter_weights,
        "model": dataclasses.asdict(config.model),
        "lora": dataclasses.asdict(config.lora),  # the reference's products are the adapted ones, at scale zero
        "deterministic": config.training.deterministic,
        "computed": [jax.__version__, device.platform, device.device_kind, str(mesh)],
    }
    home = Path(config.data.cache_dir).expanduser() / "references"

    def file(dataset: Dataset) -> Path:
        return home / f"{digest(json.dumps([depends, dataset.fingerprint], sort_keys=True, default=str))}.npz"

    return file


def _compute(batches: Batches, program: Program) -> Float32[np.ndarray, "R D"]:
    computed = [np.asarray(program(batch))[0] for batch in batches.epoch()]
    return np.concatenate(computed)[: len(batches.rows)]  # those behind the last are rows of padding


def _read(file: Path, rows: PackedRows) -> Float32[np.ndarray, "R D"] | None:
    """The numbers in a file; None: there is none, or it is damaged (the format has checksums)."""
    try:
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as content:
            log_probs = content["log_probs"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    fits = log_probs.dtype == np.float32 and log_probs.shape == (len(rows), rows.documents_per_row)
    return log_probs if fits and np.isfinite(log_probs).all() else None


def _write(file: Path, log_probs: Float32[np.ndarray, "R D"], tell: Callable[[str], None]) -> None:
    """Keep the numbers; a failure is a message and no error."""
    if is_primary():
        try:
            with atomic_file(file) as stream:
                np.savez(stream, log_probs=log_probs)
        except OSError as error:
            tell(f"the reference's log-probabilities are not kept for the next run: {error.strerror or error} ({file})")
    barrier("references")
