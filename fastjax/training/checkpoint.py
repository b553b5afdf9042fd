"""Checkpoints of a run through Orbax: the train state, progress, data position and settings.

One folder a step under `checkpoints/`, which Orbax writes under a temporary name and renames when it is whole, so a
killed run leaves whole checkpoints only. A background thread writes from a copy of the state: on the device if there is
room, which costs the run a millisecond, otherwise on the host. The arrays are stored under their names in the state,
but for the learning rates, which follow from the settings; beside them, as JSON, a checksum of each, progress, data
position and settings. A checkpoint is renamed before it is deleted.

Of several processes each writes the parts that its devices hold, and the first one the JSON. Each reads the parts that
its devices are to hold then, so a run goes on on another mesh (`checkpoint_parts`). Large arrays are stored in chunks
of a layer, or of some rows of a table, for readers that need a part of them.
"""

import concurrent.futures
import contextlib
import functools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.errors import ConfigError, TrainingError
from fastjax.host_memory import in_host_memory
from fastjax.parallel.placing import spans_processes
from fastjax.parallel.processes import gathered_numbers, is_primary
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint_files import (
    BLOCK_BYTES,
    METADATA,
    UNCHECKED_FORMAT,
    Unreadable,
    read_arrays,
    read_metadata,
    seal,
)
from fastjax.training.checkpoint_parts import Parts, check_sums, gather_all, put
from fastjax.training.checkpoint_stacks import apart, with_parts, with_stacks
from fastjax.training.checkpoint_sums import checksum, element_sum, sum_checksum
from fastjax.training.optimizers import LearningRates
from fastjax.training.silence import silence

#: Version of the JSON beside the arrays; later ones are refused. Of several processes the checksums are sums.
SOLE_FORMAT, FORMAT = 2, 3
#: Bytes of the smallest chunks that an array is cut into.
LEAST_CHUNK = 2**20
_GONE = ".deleted"
#: After a failed save: looks for what it left, seconds between them, and looks in a row that must find nothing.
_LOOKS, _PAUSE, _ABSENT = 40, 0.05, 4


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
        self._writer.submit(_orbax)  # its import takes a second; later it would delay a step
        lefts = [*self.folder.glob(f"*{_GONE}"), *self.folder.glob("*.orbax-checkpoint-tmp*")] if is_primary() else ()
        for left in lefts:
            shutil.rmtree(left, ignore_errors=True)

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
            SaveFailed: the write before this one failed, or this one at its start.
        """
        self.wait()
        arrays = named_arrays(state)
        shared = jax.process_count() > 1
        number = FORMAT if shared else SOLE_FORMAT
        metadata: Any = {"format": number, "progress": progress._asdict(), "arrays": _described(arrays)}
        metadata |= self.extra(progress.step)
        arrays = {name: array for name, array in arrays.items() if array.size}  # zarr has no empty arrays
        path = self.folder / str(progress.step)
        failed = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):  # Orbax leaves threads behind where it cannot even begin
                pass
        except OSError as error:
            failed = error
        ranks = [rank for rank, wrong in enumerate(gathered_numbers(failed is not None)) if wrong]  # all save, or none
        if failed is not None:
            raise self._failed(progress.step, failed) from failed
        if ranks:
            raise SaveFailed(
                f"the checkpoint of step {progress.step} could not be written to {self.folder} by rank "
                f"{', '.join(map(str, ranks))}"
            )
        if shared:
            self._pending = progress.step, self._write_parts(path, arrays, metadata, progress)
            return
        stored = _copy(arrays)

        def write(arrays: dict[str, Any]) -> None:
            # One at a time: Orbax would send all at once and delay the dispatch of the next steps.
            arrays = {name: np.asarray(arrays.pop(name)) for name in list(arrays)}
            checked = metadata | {"checksums": {name: checksum(array) for name, array in arrays.items()}}
            sealed = checked | {"checksum": seal(checked)}
            with _storage() as orbax:
                orbax.save_checkpointables(
                    str(path), {"state": arrays}, overwrite=path.exists(), custom_metadata=sealed
                )
            self._retire(progress)

        self._copied = progress.step, functools.partial(write, stored)

    def _write_parts(
        self, path: Path, arrays: dict[str, jax.Array], metadata: Mapping[str, Any], progress: Progress
    ) -> "concurrent.futures.Future[None]":
        """Write the arrays with the other processes: the parts are copied to the host here, and written later.

        Only the caller's thread may wait for other processes' devices: they do everything in one order.
        """
        sums = jax.device_get(_element_sums(arrays))
        checked = {**metadata, "checksums": {name: sum_checksum(value) for name, value in sums.items()}}
        parts = {name: array if spans_processes(array) else np.asarray(array) for name, array in arrays.items()}
        try:
            with _storage() as orbax:
                response = orbax.save_checkpointables_async(
                    str(path),
                    {"state": parts},
                    overwrite=path.exists(),
                    custom_metadata=checked | {"checksum": seal(checked)},
                )
        except Exception as error:
            raise self._failed(progress.step, error) from error

        def finish() -> None:
            response.result()
            if is_primary():
                self._retire(progress)

        return self._writer.submit(finish)

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
        try:
            future.result()
        except Exception as error:
            raise self._failed(step, error) from error
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
                path = self.folder / str(step)
                gone = path.rename(path.with_name(f"{step}{_GONE}"))
                shutil.rmtree(gone, ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> SaveFailed:
        # Orbax gives up with the first array; writes of others that are under way make their folder again.
        absent = 0
        for _ in range(_LOOKS):
            lefts = list(self.folder.glob(f"{step}.orbax-checkpoint-tmp*"))
            for left in lefts:
                shutil.rmtree(left, ignore_errors=True)
            absent = 0 if lefts else absent + 1
            if absent == _ABSENT:
                break
            time.sleep(_PAUSE)
        text = " ".join(str(error).split())
        return SaveFailed(f"the checkpoint of step {step} could not be written to {self.folder}: {_reason(text)}")


def _orbax() -> Any:
    """Orbax, imported on first use, its long logs of a failure silenced: the error is raised here."""
    from orbax.checkpoint import v1

    silence()
    return v1


@contextlib.contextmanager
def _storage() -> Iterator[Any]:
    """Orbax, which stores arrays in chunks."""
    orbax = _orbax()
    context = orbax.Context()
    options = context.array.saving
    options.scoped_storage_options_creator = lambda _, array: options.StorageOptions(**chunks_of(array))
    with context:
        yield orbax


def chunks_of(array: Any) -> dict[str, Any]:
    """How Orbax cuts what a process writes of an array: nothing, a layer each, or rows of a table.

    Args:
        array: of NumPy, or of JAX.
    """
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    row = math.prod(shape[1:]) * array.dtype.itemsize
    if not shape or shape[0] * row <= BLOCK_BYTES:
        return {}
    if len(shape) > 2:
        return {"shard_axes": (0,)} if row >= LEAST_CHUNK else {}
    most = max(1, BLOCK_BYTES // row)
    rows = next(count for count in range(most, 0, -1) if shape[0] % count == 0)  # Orbax cuts into equal chunks
    return {"chunk_byte_size": rows * row} if rows * row >= LEAST_CHUNK else {}


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


def _reason(text: str) -> str:
    """The short cause of a storage error."""
    if "No space left" in text or "ENOSPC" in text:
        return "the disk is full"
    return text if len(text) <= 300 else f"{text[:297]}..."
