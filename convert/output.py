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
from typing import Any

import numpy as np

from convert.checkpoint import INDEX, MAX_SHARD_BYTES, SINGLE, write_config
from convert.errors import ConvertError
from convert.files import full_disk_names
from convert.shard import Counter, Job, Monitor, Part, Shard
from convert.tensor_file import Layout, lay_out
from convert.unfinished import Unfinished

__all__ = ["Job", "Monitor", "Part", "Written", "write_folder"]

FORMAT = 1  # of the fingerprints; a conversion with another version begins anew
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
    place = folder.resolve() if folder.is_symlink() else folder  # a link stays, as with cp
    shards = _shards(folder, jobs, max_shard_bytes)
    layouts = {
        name: lay_out(folder / name, {key: value for job in group for key, value in job.outputs.items()})
        for name, group in shards.items()
    }
    sizes = {name: sum(info.nbytes for info in layout.tensors.values()) for name, layout in layouts.items()}
    written = Written(folder, sum(len(layout.tensors) for layout in layouts.values()), sum(sizes.values()), len(shards))
    state = Unfinished(place)
    with state.claimed():
        if not state.begin({"format": FORMAT, "made_from": made_from, "shards": list(shards)}, force):
            return written
        try:
            kept = {name for name, layout in layouts.items() if state.has(name, layout)}
            written.kept = len(kept)
            check_room(place, sum(layout.size for name, layout in layouts.items() if name not in kept))
            with full_disk_names(folder):
                counter = Counter(monitor, 2 * sum(layout.size for layout in layouts.values()))
                counter.add(2 * sum(layouts[name].size for name in kept))
                wanted = {name: group for name, group in shards.items() if name not in kept}
                written.nonfinite = sorted(
                    {*state.nonfinite(kept), *_write_shards(state, wanted, layouts, allow_nonfinite, counter)}
                )
                if len(shards) > 1:
                    files = {key: name for name, layout in layouts.items() for key in layout.tensors}
                    index = {"metadata": {"total_size": written.bytes}, "weight_map": dict(sorted(files.items()))}
                    write_config(state.folder / INDEX, index)
                finish(state.folder)
                state.publish()
        except (ConvertError, OSError):
            state.remove()
            raise
    state.remove()
    return written


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
    place = folder.absolute().parent
    free = shutil.disk_usage(place).free
    if free < size + _ROOM:
        text = f"{os.strerror(errno.ENOSPC)}: {size + _ROOM:,} bytes are needed and {free:,} are free"
        raise OSError(errno.ENOSPC, text, str(place))


def _write_shards(
    state: Unfinished, shards: Mapping[str, Sequence[Job]], layouts: Mapping[str, Layout], allow: bool, counter: Counter
) -> list[str]:
    """Write the shards, checking one while writing the next; return the tensors that are not finite."""
    found: list[str] = []
    stop = threading.Event()
    checking: concurrent.futures.Future[None] | None = None
    with (
        concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="convert") as workers,
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="check") as checker,
    ):
        try:
            for name, jobs in shards.items():
                shard = Shard(state.folder / f"{name}.part", layouts[name], allow, stop, counter, checker)
                try:
                    for future in [workers.submit(shard.fill, job) for job in jobs]:
                        future.result()
                except BaseException:
                    stop.set()
                    workers.shutdown(cancel_futures=True)
                    checker.shutdown(cancel_futures=True)
                    os.close(shard.descriptor)
                    raise
                if checking is not None:
                    checking.result()
                found += shard.nonfinite
                checking = checker.submit(shard.close, state, name)
            if checking is not None:
                checking.result()
        finally:
            stop.set()
    return found
