"""Misses of JAX's cache of compiled programs, known before XLA compiles them.

A program that is read back takes seconds of XLA's own code, which leave Python and the device alone; one that is
compiled has its kernels timed on the device. JAX tells the two apart in time by a message alone, of level DEBUG.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import jax

_LOGGER = "jax._src.compiler"
_MISSING = "PERSISTENT COMPILATION CACHE MISS"


def reads_back() -> bool:
    """Whether JAX keeps compiled programs and looks for them."""
    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    return enabled and jax.config.jax_compilation_cache_dir is not None  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def before_compiling(call: Callable[[], None]) -> Iterator[None]:
    """The context in which a function is called before XLA compiles a program of this thread.

    Args:
        call: the function. Where no cache is used, or messages are switched off, it is called at once.
    """
    logger, thread = logging.getLogger(_LOGGER), threading.get_ident()
    level, shown = logger.level, logger.getEffectiveLevel()

    def heard(record: logging.LogRecord) -> bool:
        if record.thread == thread and str(record.msg).startswith(_MISSING):
            call()
        return record.levelno >= shown

    logger.addFilter(heard)
    logger.setLevel(min(shown, logging.DEBUG))
    try:
        if not reads_back() or not logger.isEnabledFor(logging.DEBUG):
            call()
        yield
    finally:
        logger.removeFilter(heard)
        logger.setLevel(level)
