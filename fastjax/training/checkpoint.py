"""Checkpoints of a run: the train state, progress, data position and settings.

One folder a step under `checkpoints/`, which is renamed when it is whole, so a killed run leaves whole checkpoints
only. A background thread writes from a copy of the state: on the device if there is room, which costs the run a
millisecond, otherwise on the host. The arrays are stored under their names in the state, but for the learning rates,
which follow from the settings; beside them, as JSON, progress, data position and settings. A checkpoint is
renamed before it is deleted.

With several processes each writes what its devices hold, and the first one the JSON, when all have told that theirs is
written; what goes wrong in one is told to all before any goes on. Each reads what its devices are to hold then, so a
run goes on on another mesh (`checkpoint_parts`). Large arrays are stored in chunks of a layer, or of some rows of a
table, for readers that need a part of them.
"""

import concurrent.futures
import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.errors import ConfigError, TrainingError
from fastjax.host_memory import in_host_memory
from fastjax.parallel.processes import is_primary, told
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint_earlier import apart, mismatch, with_parts, with_stacks
from fastjax.training.checkpoint_parts import copied_regions, held_regions, put, whole
from fastjax.training.checkpoint_store import (
    METADATA,
    UNCHECKED_FORMAT,
    UNFINISHED,
    StoredArray,
    Unreadable,
    finish,
    read_arrays,
    read_metadata,
    retire,
    seal,
    sweep,
    write_arrays,
)
from fastjax.training.optimizers import LearningRates

#: Version of the JSON beside the arrays; later ones are refused. Those from 2 to 3 have checksums of the arrays there.
FORMAT = 4


class SaveFailed(TrainingError):
    """A checkpoint that could not be written; the earlier ones are whole."""


class Checkpoints:
    """The checkpoints in a folder.

    Attributes:
        folder: of the checkpoints.
        extra: further JSON of a step.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 1, extra: Callable[[int], Mapping[str, Any]] = lambda step: {}
    ):
        """Open a folder, which need not exist, and remove a killed run's unfinished checkpoints.

        Args:
            folder: of the checkpoints.
            keep: number of newest checkpoints to keep, beside the best.
            extra: further JSON of a step.
        """
        self.folder, self._keep, self.extra = Path(folder).absolute(), keep, extra
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copied: tuple[int, Callable[[], None]] | None = None
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self._writer.submit(importlib.import_module, "tensorstore")  # later it would delay a step
        if is_primary():
            sweep(self.folder)

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, the newest first."""
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(f.name) for f in folders if f.name.isdecimal() and f.is_dir()), reverse=True)

    def save(self, state: Any, progress: Progress) -> None:
        """Copy a state, to be written in the background from `begin` on; one write at a time.

        Args:
            state: the TrainState after `progress.step` steps.
            progress: of the run.

        Raises:
            SaveFailed: the write before this one failed.
        """
        self.wait()
        arrays = named_arrays(state)
        metadata: Any = {"format": FORMAT, "progress": progress._asdict(), "arrays": _described(arrays)}
        metadata |= self.extra(progress.step)
        arrays = {name: array for name, array in arrays.items() if array.size}  # zarr has no empty arrays
        if jax.process_count() > 1:
            stored = {name: copied_regions(array) for name, array in arrays.items()}
            self._copied = progress.step, lambda: self._write(stored, metadata, progress)
            return
        copied = _copy(arrays)

        def write() -> None:
            # One at a time: all at once would delay the dispatch of the next steps.
            fetched = {name: whole(np.asarray(copied.pop(name))) for name in list(copied)}
            self._write(fetched, metadata, progress)

        self._copied = progress.step, write

    def _write(self, arrays: Mapping[str, StoredArray], metadata: Mapping[str, Any], progress: Progress) -> None:
        """Write this process's regions, and with the others' make a checkpoint, or none: all get one answer."""
        target = self.folder / str(progress.step)
        unfinished = self.folder / f"{progress.step}{UNFINISHED}"
        error: Exception | None = None
        try:
            write_arrays(unfinished, jax.process_index(), arrays)
        except Exception as caught:
            error = caught
        wrong = told("checkpoint", _reason(error))
        if is_primary():
            try:
                if not any(wrong):
                    finish(unfinished, jax.process_count(), {**metadata, "checksum": seal(metadata)}, target)
                    self._retire(progress)
            except Exception as caught:
                error = caught
            shutil.rmtree(unfinished, ignore_errors=True)
        ends = told("checkpoint", _reason(error))
        for rank, reason in enumerate(wrong if any(wrong) else ends):
            if reason:
                by = f" by rank {rank}" if len(ends) > 1 else ""
                text = f"the checkpoint of step {progress.step} could not be written to {self.folder}{by}: {reason}"
                raise SaveFailed(text) from error

    def begin(self) -> None:
        """Start to write the copy. It keeps Python busy at first: call it when the device has its next step."""
        if self._copied is not None:
            (step, write), self._copied = self._copied, None
            self._pending = step, self._writer.submit(write)

    def poll(self) -> int | None:
        """The step of a save that has ended since the last call; None: none has.

        Raises:
            SaveFailed: it failed.
        """
        if self._pending is None or not self._pending[1].done():
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Wait for the current save, and return its step; None: there is none.

        Raises:
            SaveFailed: it failed.
        """
        self.begin()
        if self._pending is None:
            return None
        (step, future), self._pending = self._pending, None
        future.result()
        return step

    def close(self) -> None:
        """End the background thread after its current write."""
        self._writer.shutdown()

    def metadata(self, step: int) -> dict[str, Any]:
        """The JSON of a checkpoint.

        Raises:
            ConfigError: a later version of the format.
            Unreadable: it is damaged.
        """
        where = self.folder / str(step)
        metadata = read_metadata(where)
        if metadata["format"] not in range(UNCHECKED_FORMAT, FORMAT + 1):
            raise ConfigError(
                f"{where}: expected a checkpoint of format {FORMAT} or before, got {metadata['format']}; it was "
                "written by another version of fastjax"
            )
        try:
            named = Progress(**metadata["progress"]).step
        except (LookupError, TypeError) as error:  # of the format without a checksum
            raise Unreadable(where, f"{METADATA} is damaged: {error!r}") from error
        if named != step:
            raise Unreadable(where, f"{METADATA} is damaged: it is of step {named}")
        return metadata

    def load(self, step: int, like: Any, field: str | None = None) -> Any:
        """Read the state of a checkpoint, or one field of it.

        Args:
            step: of the checkpoint.
            like: a state, or the field's tree, with the arrays' shapes, dtypes and shardings.
            field: of the state, such as "trainable"; None: all of it.

        Returns:
            The state, or the field.

        Raises:
            ConfigError: the checkpoint's arrays differ; names the first.
            Unreadable: it is damaged.
        """
        prefix, metadata = "" if field is None else f"{field}.", self.metadata(step)
        wanted = {prefix + name: array for name, array in named_arrays(like).items()}
        described = {name: entry for name, entry in metadata["arrays"].items() if name.startswith(prefix)}
        unstacked = apart(wanted, described)
        arrays = with_parts(wanted, unstacked)
        _check(_described(arrays), described, self.folder / str(step))
        stored = with_stacks(self._read(step, metadata, arrays), wanted, unstacked)
        values = (
            stored[name] if array.size else jnp.zeros(array.shape, array.dtype, device=array.sharding)
            for name, array in wanted.items()
        )

        def value(old: Any) -> Any:
            if _is_setting(old):
                return old
            new = next(values)
            return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if _is_key(old) else new

        return jax.tree.map(value, like, is_leaf=_is_setting)

    def _read(self, step: int, metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The stored values of `arrays`, on their devices; damage that one process finds is all processes'."""
        folder, checksums = self.folder / str(step), metadata.get("checksums", {})
        arrays = {name: array for name, array in arrays.items() if array.size}
        regions = {name: held_regions(array.shape, array.sharding) for name, array in arrays.items()}

        def placed(name: str, values: list[np.ndarray]) -> jax.Array:
            return put(values, arrays[name].shape, arrays[name].sharding)

        def check(name: str, array: np.ndarray) -> str | None:
            return None if metadata["format"] == UNCHECKED_FORMAT else mismatch(array, checksums.get(name))

        error, stored = None, {}
        try:
            earlier = metadata["format"] < FORMAT
            stored = read_arrays(folder, _described(arrays), regions, placed, check if earlier else None)
        except Unreadable as caught:
            error = caught
        damaged = told("restore", "" if error is None else str(error))
        if error is not None:
            raise error
        for rank, reason in enumerate(damaged):
            if reason:
                raise Unreadable(folder, f"rank {rank} finds it damaged")
        return stored

    def _retire(self, progress: Progress) -> None:
        """Delete checkpoints that are neither among the newest nor the best.

        Unreadable ones of later steps, from before the run resumed here, do not count.
        """
        for step in [step for step in self.steps() if step <= progress.step][self._keep :]:
            if step != progress.best_step:
                retire(self.folder / str(step))


@jax.jit
def _copy_on_device(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def _copy(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Copies that survive the donation of the original arrays to a step."""
    if jax.default_backend() == "cpu":
        return {name: np.array(array) for name, array in arrays.items()}
    in_host = {name: np.array(array) for name, array in arrays.items() if in_host_memory(array)}
    arrays = {name: array for name, array in arrays.items() if name not in in_host}
    stats = jax.local_devices()[0].memory_stats() or {}
    room = stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)  # unused by every step so far
    if sum(array.nbytes for array in arrays.values()) < room:
        return _copy_on_device(arrays) | in_host
    return jax.device_get(arrays) | in_host


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state by their path in it, but those of its settings; random keys as their data.

    Args:
        state: any tree of arrays.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_setting)[0]:
        if _is_setting(leaf):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        named[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return named


def _described(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Shape and dtype of arrays, for JSON."""
    return {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}


def _is_setting(node: Any) -> bool:
    return isinstance(node, LearningRates)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _check(wanted: Mapping[str, Sequence[Any]], stored: Mapping[str, Sequence[Any]], where: Path) -> None:
    problems = [
        f"{name}: expected {_show(wanted.get(name))}, got {_show(stored.get(name))}"
        for name in [*wanted, *(name for name in stored if name not in wanted)]
        if list(wanted.get(name, ())) != list(stored.get(name, ()))
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(f"{where} is a checkpoint of another model or adapter: {'; '.join(problems[:3])}{more}")


def _show(described: Sequence[Any] | None) -> str:
    return "nothing" if described is None else f"{described[1]}{list(described[0])}"


def _reason(error: Exception | None) -> str:
    """The short cause of a failed write; empty: there was none."""
    if error is None:
        return ""
    text = " ".join(str(error).split("[tensorstore_spec")[0].split()) or type(error).__name__
    if "No space left" in text or "ENOSPC" in text:
        return "the disk is full"
    if "[os_error_code" in text:  # behind it all that is open, before it what the system says
        text = text.split(" [os_error_code")[0].rpartition(": ")[2]
    return text if len(text) <= 300 else f"{text[:297]}..."
