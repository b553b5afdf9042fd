"""The hazard that tests of compiled kernels look for: a tile that is fetched over one that a product still reads."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.resources import of_triton

ROWS, COLUMNS, LOOP = 64, 128, 8


def _kernel(x_ref, same_ref, w_ref, double_ref, product_ref):
    rows = pl.ds(pl.program_id(0) * ROWS, ROWS)

    def body(number, total):
        cols = pl.ds(number * COLUMNS, COLUMNS)
        x = x_ref[rows, cols]
        double_ref[rows, cols] = 2 * (x if same_ref is None else same_ref[rows, cols])
        return total + pltriton.dot(x, w_ref[cols, :])

    product_ref[rows, :] = jax.lax.fori_loop(0, LOOP, body, jnp.zeros((ROWS, 64), jnp.float32))


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.parametrize("twice", [True, False])
def test_a_tile_that_a_product_reads_and_registers_too_is_found(twice, tmp_path):
    """Once Triton gives such a tile a buffer more, the second case fails: then kernels need not read theirs twice."""
    aot = AOT("h200")
    x, w = aot.spec((1024, LOOP * COLUMNS), jnp.bfloat16), aot.spec((LOOP * COLUMNS, 64), jnp.bfloat16)

    def both(x, w):
        return pl.pallas_call(
            _kernel,
            out_shape=(
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                jax.ShapeDtypeStruct((x.shape[0], 64), jnp.float32),
            ),
            grid=(x.shape[0] // ROWS,),
            compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
            name="twice" if twice else "once",
        )(x, x if twice else None, w)

    if twice:
        of_triton(aot, both, x, w, folder=tmp_path)
    else:
        with pytest.raises(AssertionError, match="once fetches tiles 2 rounds ahead, while a product reads one of 2"):
            of_triton(aot, both, x, w, folder=tmp_path)
