"""Silence for Orbax's logs and tracebacks of a failed write: the error itself is raised, in one sentence.

Orbax writes all arrays at once. If one cannot be written, it raises the first error and closes its event loop; asyncio
then logs the unretrieved errors of the other tasks, and TensorStore's threads call back into the closed loop, which
raises exceptions that nothing can catch. Only these are dropped.
"""

import functools
import logging
import sys


@functools.cache
def silence() -> None:
    """Drop the output of Orbax and of the threads behind its failed write."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_of_others)
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _is_late_callback(unraisable):
            previous(unraisable)

    sys.unraisablehook = hook


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether an asyncio record comes from a task outside Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or "never retrieved" not in record.getMessage():
        return True
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    # An error of TensorStore's threads has no trace; it names its format, or the database in the checkpoint's files.
    named = any(name in str(error) for name in ("tensorstore", "OCDBT"))
    return not named and not any("orbax" in file for file in files)


def _is_late_callback(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Whether a thread outside Python has called back into a closed event loop."""
    trace = unraisable.exc_traceback
    if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != "Event loop is closed" or trace is None:
        return False
    return trace.tb_frame.f_code.co_name.endswith("call_soon_threadsafe")
