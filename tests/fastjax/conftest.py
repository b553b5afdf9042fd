"""What tests of whole models share."""

import jax
import pytest


@pytest.fixture
def quick_compilation():
    """Compile for the test, not for speed: its programs run for milliseconds and would compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
