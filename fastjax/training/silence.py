"""No logs and tracebacks of Orbax where it fails to write: the error is raised, and told in one sentence.

Orbax writes all arrays at once. Where one cannot be written, it raises the first error and closes its event loop; the
tasks of the others are never asked for their errors, which asyncio logs, and the threads of TensorStore that call back
into the closed loop end in exceptions that no one can catch. Only these are dropped.
"""

import functools
import logging
import sys


@functools.cache
def silence() -> None:
    """Drop what Orbax, and what is left behind by a write of its that failed, would print."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_of_others)
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _is_late_callback(unraisable):
            previous(unraisable)

    sys.unraisablehook = hook


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is of another's task."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or "never retrieved" not in record.getMessage():
        return True
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return "tensorstore" not in str(error) and not any("orbax" in file for file in files)


def _is_late_callback(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Whether a thread has called back into a closed event loop, from outside of Python."""
    trace = unraisable.exc_traceback
    if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != "Event loop is closed" or trace is None:
        return False
    return trace.tb_frame.f_code.co_name.endswith("call_soon_threadsafe")
