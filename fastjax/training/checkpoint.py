"""Checkpoints of a run: the train state, progress, data position and settings.

One folder a step under `checkpoints/`, which is renamed when it is whole, so a killed run leaves whole checkpoints
only. A background thread writes from a copy of the state: on the device if there is room, which costs the run a
millisecond, otherwise on the host. The arrays are stored under their names in the state, but for the learning rates,
which follow from the settings; beside them, as JSON, a checksum of each, progress, data position and settings. A
checkpoint is renamed before it is deleted.

With several processes each writes the parts that its devices hold, and the first one the JSON, when all have told that
their parts are written; what goes wrong in one is told to all before any goes on. Each reads the parts that its devices
are to hold then, so a run goes on on another mesh (`checkpoint_parts`). Large arrays are stored in chunks of a layer,
or of some rows of a table, for readers that need a part of them.
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
from fastjax.training.checkpoint_files import (
    METADATA,
    UNCHECKED_FORMAT,
    Unreadable,
    read_arrays,
    read_metadata,
    seal,
)
from fastjax.training.checkpoint_parts import Parts, check_sums, gather_all, own_parts, put, whole
from fastjax.training.checkpoint_stacks import apart, with_parts, with_stacks
from fastjax.training.checkpoint_sums import checksum, element_sum, sum_checksum
from fastjax.training.checkpoint_writing import UNFINISHED, Stored, finish, retire, sweep, write_parts
from fastjax.training.optimizers import LearningRates

#: Version of the JSON beside the arrays; later ones are refused. Of several processes the checksums are sums.
SOLE_FORMAT, FORMAT = 2, 3


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
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(f.name) for f in found if f.name.isdecimal() and f.is_dir()), reverse=True)

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
        shared = jax.process_count() > 1
        number = FORMAT if shared else SOLE_FORMAT
        metadata: Any = {"format": number, "progress": progress._asdict(), "arrays": _described(arrays)}
        metadata |= self.extra(progress.step)
        arrays = {name: array for name, array in arrays.items() if array.size}  # zarr has no empty arrays
        if shared:  # only the caller's thread may wait for other processes' devices
            sums = {name: sum_checksum(value) for name, value in jax.device_get(_element_sums(arrays)).items()}
            parts = {name: own_parts(array) for name, array in arrays.items()}
            self._copied = progress.step, lambda: self._write(parts, metadata | {"checksums": sums}, progress)
            return
        copied = _copy(arrays)

        def write() -> None:
            # One at a time: all at once would delay the dispatch of the next steps.
            values = {name: np.asarray(copied.pop(name)) for name in list(copied)}
            sums = {name: checksum(array) for name, array in values.items()}
            parts = {name: whole(array) for name, array in values.items()}
            self._write(parts, metadata | {"checksums": sums}, progress)

        self._copied = progress.step, write

    def _write(self, arrays: Mapping[str, Stored], metadata: Mapping[str, Any], progress: Progress) -> None:
        """Write this process's parts, and with the others' make a checkpoint of them, or none: all get one answer."""
        target = self.folder / str(progress.step)
        unfinished = self.folder / f"{progress.step}{UNFINISHED}"
        error: Exception | None = None
        try:
            write_parts(unfinished, jax.process_index(), arrays)
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
        found = read_metadata(where)
        if found["format"] not in (UNCHECKED_FORMAT, SOLE_FORMAT, FORMAT):
            raise ConfigError(
                f"{where}: expected a checkpoint of format {FORMAT} or before, got {found['format']}; it was "
                "written by another version of fastjax"
            )
        try:
            named = Progress(**found["progress"]).step
        except (LookupError, TypeError) as error:  # of the format without a checksum
            raise Unreadable(where, f"{METADATA} is damaged: {error!r}") from error
        if named != step:
            raise Unreadable(where, f"{METADATA} is damaged: it is of step {named}")
        return found

    def load(self, step: int, like: Any) -> Any:
        """Read the state of a checkpoint.

        Args:
            step: of the checkpoint.
            like: a state with the arrays' shapes, dtypes and places.

        Returns:
            The state.

        Raises:
            ConfigError: the checkpoint's arrays differ; names the first.
            Unreadable: it is damaged.
        """
        arrays, metadata = named_arrays(like), self.metadata(step)
        parts = apart(arrays, metadata["arrays"])
        read = with_parts(arrays, parts)
        _check(_described(read), metadata["arrays"], self.folder / str(step))
        stored = with_stacks(self._read(step, metadata, read), arrays, parts)
        found = iter([stored.get(name, array) for name, array in arrays.items()])

        def value(old: Any) -> Any:
            if _is_setting(old):
                return old
            new = next(found)
            return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if _is_key(old) else new

        return jax.tree.map(value, like, is_leaf=_is_setting)

    def load_part(self, step: int, field: str, like: Any) -> Any:
        """Read one field of a checkpoint's state alone.

        Args:
            step: of the checkpoint.
            field: of the state, such as "trainable".
            like: a tree with the arrays' shapes, dtypes and places.

        Returns:
            The field.

        Raises:
            ConfigError: the checkpoint's arrays differ; names the first.
            Unreadable: it is damaged.
        """
        metadata = self.metadata(step)
        arrays = {f"{field}.{name}": array for name, array in named_arrays(like).items()}
        here = {name: entry for name, entry in metadata["arrays"].items() if name.startswith(f"{field}.")}
        _check(_described(arrays), here, self.folder / str(step))
        stored = self._read(step, metadata, arrays)
        found = [stored[name] if array.size else jnp.zeros(array.shape, array.dtype) for name, array in arrays.items()]
        return jax.tree.unflatten(jax.tree.structure(like), found)

    def _read(self, step: int, metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The stored values of `arrays`, on their devices."""
        folder, checksums = self.folder / str(step), metadata.get("checksums")
        arrays = {name: array for name, array in arrays.items() if array.size}
        parts = {name: Parts.of(array.shape, array.sharding) for name, array in arrays.items()}
        regions = {name: one.own for name, one in parts.items()}

        def placed(name: str, values: list[np.ndarray]) -> jax.Array:
            return put(values, parts[name], arrays[name].sharding)

        found, sums, error = {}, {}, None
        try:
            found, sums = read_arrays(folder, _described(arrays), checksums, regions, placed)
        except Unreadable as caught:
            error = caught
        check_sums(folder, checksums, parts, sums, error, gather_all if jax.process_count() > 1 else None)
        return found

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


@jax.jit
def _element_sums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

    def bits(array: jax.Array) -> jax.Array:
        plain = array.astype(jnp.uint8) if array.dtype == bool else array
        return jax.lax.bitcast_convert_type(plain, kinds[plain.dtype.itemsize])

    return {name: element_sum(bits(array), jnp) for name, array in arrays.items()}


def _copy(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Copies that survive the donation of the original arrays to a step."""
    if jax.default_backend() == "cpu":
        return {name: np.array(array) for name, array in arrays.items()}
    held = {name: np.array(array) for name, array in arrays.items() if in_host_memory(array)}
    arrays = {name: array for name, array in arrays.items() if name not in held}
    stats = jax.local_devices()[0].memory_stats() or {}
    room = stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)  # unused by every step so far
    if sum(array.nbytes for array in arrays.values()) < room:
        return _copy_on_device(arrays) | held
    return jax.device_get(arrays) | held


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


def _check(wanted: Mapping[str, Sequence[Any]], found: Mapping[str, Sequence[Any]], where: Path) -> None:
    problems = [
        f"{name}: expected {_show(wanted.get(name))}, got {_show(found.get(name))}"
        for name in [*wanted, *(name for name in found if name not in wanted)]
        if list(wanted.get(name, ())) != list(found.get(name, ()))
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
