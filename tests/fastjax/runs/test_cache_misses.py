"""Before XLA compiles a function is called, before a program is read back from JAX's cache it is not."""

import logging
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fastjax.runs.cache_misses import before_compiling, reads_back


@pytest.fixture(autouse=True)
def programs(tmp_path):
    """A cache of JAX's that is empty, and afterwards the one before."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def events():
    """What happens, in order: JAX's events of its cache."""
    found = []

    def heard(event, **_):
        if event.endswith(("cache_hits", "cache_misses")):
            found.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(heard)
    yield found
    jax.monitoring.unregister_event_listener(heard)


def lowered():
    """A program, made anew: of the same text each time."""
    return jax.jit(lambda x: x * 3 + 1).lower(jnp.int32(2))


def compiled(events):
    program, x = lowered(), jnp.int32(2)
    events.clear()  # of the argument's program
    with before_compiling(lambda: events.append("called")):
        assert int(program.compile()(x)) == 7


def test_what_is_compiled_and_what_is_read_back(events, caplog):
    logger = logging.getLogger("jax._src.compiler")
    before = logger.level, list(logger.filters)
    assert reads_back()
    for expected in (["called", "cache_misses"], ["cache_hits"]):  # JAX tells of a miss once the program is written
        compiled(events)
        assert events == expected
    assert (logger.level, logger.filters) == before and not caplog.records


def test_what_another_thread_compiles_is_its_own_affair(events):
    program = lowered()
    events.clear()
    with before_compiling(lambda: events.append("called")):
        thread = threading.Thread(target=program.compile)
        thread.start()
        thread.join()
    assert events == ["cache_misses"]


@pytest.mark.parametrize("switch", ["no cache", "no folder", "no messages"])
def test_what_jax_would_not_tell(events, switch):
    compiled(events)  # it could be read back
    try:
        if switch == "no cache":
            jax.config.update("jax_enable_compilation_cache", False)
        elif switch == "no folder":
            jax.config.update("jax_compilation_cache_dir", None)
        else:
            logging.disable(logging.DEBUG)
        compilation_cache.reset_cache()
        assert reads_back() == (switch == "no messages")
        compiled(events)
    finally:
        logging.disable(logging.NOTSET)
        jax.config.update("jax_enable_compilation_cache", True)
    assert events[0] == "called"
