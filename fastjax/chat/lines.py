"""Messages from lines: a line is a message, unless it ends with a backslash or begins a block."""

from collections.abc import Callable, Iterator

BLOCK = '"""'
"""Begins and ends a message of several lines."""


def read_messages(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Messages until there are no more lines.

    Args:
        read: gives the next line without its end, None when there is none; it is told whether the line goes on with a
            message.

    Yields:
        Messages that are not blank. A command, which begins with a slash, is a line.
    """
    while (line := read(False)) is not None:
        if line.strip().startswith(BLOCK):
            line = _block(line.strip()[len(BLOCK) :], read)
        else:
            while line.endswith("\\") and (more := read(True)) is not None:
                line = f"{line[:-1]}\n{more}"
        if line.strip():
            yield line


def _block(line: str, read: Callable[[bool], str | None]) -> str:
    """The lines of a block, to its end or that of all."""
    lines = [line]
    while BLOCK not in lines[-1] and (more := read(True)) is not None:
        lines.append(more)
    lines[-1] = lines[-1].partition(BLOCK)[0]
    return "\n".join(lines).strip("\n")
