"""A new model folder, written tensor by tensor: resumable, checked, and under its name only when it is whole.

Headers alone give every shard's size and the place of each tensor in it. Two threads compute parts of tensors and write
them in place; another flushes them, reads them back and compares checksums. So memory holds a few parts, whatever the
size of a tensor or a shard.

An unfinished folder lies in ``.NAME.converting`` beside its final place, with fingerprints of its inputs. After a kill
the next run checks the finished shards again and keeps them, and writes the others anew.
"""

import concurrent.futures
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from convert.checkpoint import INDEX, MAX_SHARD_BYTES, SINGLE, write_config
from convert.errors import ConvertError
from convert.files import full_disk_names
from convert.shard import Chunk, Counter, Job, Monitor, Shard
from convert.tensor_file import Layout, lay_out
from convert.unfinished import Unfinished

__all__ = ["Job", "Monitor", "Chunk", "Written", "write_folder"]

FORMAT = 2  # of the fingerprints; a conversion with another version begins anew
THREADS = 2  # compute; the checking one mostly waits for the disk
_ROOM = 2**24  # bytes for config, tokenizer and the like, beside the weights


@dataclass
class Written:
    """A written folder.

    Attributes:
        folder: Its place.
        tensors: Their number.
        bytes: Of all tensors.
        shards: Number of their files.
        kept: Number of files that an earlier, interrupted conversion had finished.
        nonfinite: Tensors with NaN or infinity, if these were allowed.
    """

    folder: Path
    tensors: int = 0
    bytes: int = 0
    shards: int = 0
    kept: int = 0
    nonfinite: list[str] = field(default_factory=list)


class WriteOptions(TypedDict, total=False):
    """Keywords of `write_folder` that conversions hand on to it."""

    max_shard_bytes: int
    force: bool
    allow_nonfinite: bool
    monitor: Monitor | None


def write_folder(
    folder: str | os.PathLike[str],
    jobs: Iterable[Job],
    *,
    made_from: Mapping[str, Any],
    finish: Callable[[Path], None],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    allow_nonfinite: bool = False,
    monitor: Monitor | None = None,
) -> Written:
    """Write a model folder.

    Args:
        folder: The final place.
        jobs: The tensors, in the order of the files.
        made_from: Fingerprints of the sources and settings as JSON; an interrupted conversion resumes only if they
            still match.
        finish: Writes config.json, tokenizer and so on into a folder, and checks the whole.
        max_shard_bytes: A shard is closed before it would grow beyond this.
        force: Replace a model folder that is there.
        allow_nonfinite: Write NaN and infinity, and report them, instead of refusing.
        monitor: Called with the bytes done and the bytes to do; writing and checking count half each.

    Raises:
        ConvertError: The place is taken, another process is at work on it, a tensor comes twice or is not finite, or
            checksums differ after reading back.
        OSError: The disk has no room, …; the place is as it was.
    """
    folder = Path(folder)
    target = folder.resolve() if folder.is_symlink() else folder  # a link stays, as with cp
    shards = _shards(folder, jobs, max_shard_bytes)
    layouts = {
        name: lay_out(folder / name, {key: value for job in group for key, value in job.outputs.items()})
        for name, group in shards.items()
    }
    sizes = {name: sum(info.nbytes for info in layout.tensors.values()) for name, layout in layouts.items()}
    written = Written(folder, sum(len(layout.tensors) for layout in layouts.values()), sum(sizes.values()), len(shards))
    files = {name: (layout, shards[name]) for name, layout in layouts.items()}

    def finish_folder(unfinished: Path) -> None:
        if len(shards) > 1:
            homes = {key: name for name, layout in layouts.items() for key in layout.tensors}
            index = {"metadata": {"total_size": written.bytes}, "weight_map": dict(sorted(homes.items()))}
            write_config(unfinished / INDEX, index)
        finish(unfinished)

    progress = write_files(
        Unfinished(target),
        files,
        {"format": FORMAT, "made_from": made_from, "options": [max_shard_bytes, allow_nonfinite]},
        finish=finish_folder,
        force=force,
        allow=allow_nonfinite,
        monitor=monitor,
    )
    written.kept, written.nonfinite = progress.files, progress.nonfinite
    return written


class Progress(NamedTuple):
    """The course of a conversion.

    Attributes:
        files: Number of files that an earlier, interrupted conversion had finished.
        tensors: Number of tensors that it had made, in these and in an unfinished one.
        nonfinite: Tensors with NaN or infinity.
    """

    files: int = 0
    tensors: int = 0
    nonfinite: list[str] = []


def write_files(
    state: Unfinished,
    files: Mapping[str, tuple[Layout, Sequence[Job]]],
    inputs: Mapping[str, Any],
    *,
    finish: Callable[[Path], None],
    force: bool,
    allow: bool,
    monitor: Monitor | None,
) -> Progress:
    """Write a folder's files, or the one file, whole or not at all.

    Args:
        state: The target.
        files: Name -> layout, and what makes its tensors.
        inputs: Fingerprints of the inputs, as JSON.
        finish: Called with the unfinished folder, before it gets its name.
        force: Replace what is there.
        allow: Write NaN and infinity.
        monitor: Called with the bytes done and the bytes to do.

    Raises:
        ConvertError: As `write_folder`.
        OSError: As `write_folder`.
    """
    with state.claimed():
        if not state.begin(inputs, force):
            return Progress()
        try:
            finished = {name for name, (layout, _) in files.items() if state.has(name, layout)}
            check_room(state.target, sum(layout.size for name, (layout, _) in files.items() if name not in finished))
            with full_disk_names(state.target):
                counter = Counter(monitor, 2 * sum(layout.size for layout, _ in files.values()))
                counter.add(2 * sum(files[name][0].size for name in finished))
                wanted = {name: file for name, file in files.items() if name not in finished}
                shards = _write_shards(state, wanted, allow, counter)
                finish(state.folder)
                nonfinite = sorted(
                    {*state.nonfinite(finished), *(name for shard in shards for name in shard.nonfinite)}
                )
                state.publish()
        except (ConvertError, OSError):
            state.remove()
            raise
    state.remove()
    tensors = sum(len(files[name][0].tensors) for name in finished) + sum(shard.kept for shard in shards)
    return Progress(len(finished), tensors, nonfinite)


def _shards(folder: Path, jobs: Iterable[Job], limit: int) -> dict[str, list[Job]]:
    """File name -> its jobs."""
    groups: list[list[Job]] = [[]]
    seen: set[str] = set()
    filled = 0
    for job in jobs:
        twice = sorted(seen.intersection(job.outputs))
        if twice:
            raise ConvertError(f"{folder}: expected every tensor once, got a second {', '.join(twice)}")
        seen.update(job.outputs)
        size = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in job.outputs.values())
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(job)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def check_room(folder: Path, size: int) -> None:
    """Refuse to begin without room on the disk.

    Args:
        folder: The final place.
        size: Bytes to write.

    Raises:
        OSError: There is less room.
    """
    parent = folder.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < size + _ROOM:
        text = f"{os.strerror(errno.ENOSPC)}: {size + _ROOM:,} bytes are needed and {free:,} are free"
        raise OSError(errno.ENOSPC, text, str(parent))


def _write_shards(
    state: Unfinished, files: Mapping[str, tuple[Layout, Sequence[Job]]], allow: bool, counter: Counter
) -> list[Shard]:
    """Write the files, checking one while writing the next."""
    shards: list[Shard] = []
    stop = threading.Event()
    checking: concurrent.futures.Future[None] | None = None
    with (
        concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="convert") as workers,
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="check") as checker,
    ):
        try:
            for name, (layout, jobs) in files.items():
                shard = Shard(state, name, layout, jobs, allow=allow, stop=stop, counter=counter, checker=checker)
                try:
                    for future in [workers.submit(shard.fill, job) for job in shard.jobs]:
                        future.result()
                except BaseException:
                    stop.set()
                    workers.shutdown(cancel_futures=True)
                    concurrent.futures.wait(shard.checks)  # what is noted then is kept
                    os.close(shard.descriptor)
                    raise
                if checking is not None:
                    checking.result()
                shards.append(shard)
                checking = checker.submit(shard.close)
            if checking is not None:
                checking.result()
        finally:
            stop.set()
    return shards
