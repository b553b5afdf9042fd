"""Tests' workers share one cache of compiled programs, which JAX writes in place."""

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache


def test_a_program_that_is_still_being_written_is_compiled_again(tmp_path):
    """Another worker's write shows itself to a reader as a file that ends too early, or is empty."""
    shared = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compilation_cache.reset_cache()
        number = np.int32(2)
        times = jax.jit(lambda x: x * 7103 + 1)
        assert int(times(number)) == 14207
        (program,) = tmp_path.glob("*-cache")
        whole = program.read_bytes()
        for length in (len(whole) // 2, 0):
            program.write_bytes(whole[:length])
            times.clear_cache()
            assert int(times(number)) == 14207
            assert program.stat().st_size == length  # read, and not written over
    finally:
        jax.config.update("jax_compilation_cache_dir", shared)
        compilation_cache.reset_cache()
