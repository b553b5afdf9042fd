"""Run Mosaic GPU kernels on CPU through Pallas' interpreter, the same way on every supported jax."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support import mgpu_interp_ext
from tests.support.attention import QUICK


def _call(*arguments, callback, **_):
    """`io_callback_impl` without `device_put` of every argument, which takes most of an interpreted kernel's time."""
    return jax.tree.map(np.asarray, callback(*map(np.asarray, arguments)))


class _Programs:
    """`_run_jaxpr` that compiles a kernel once for all of its threads, which come at once, and without optimisation."""

    def __init__(self):
        self.lock, self.compiled = threading.Lock(), {}

    def __call__(self, jaxpr, consts, *arguments):
        with self.lock:
            if id(jaxpr) not in self.compiled:
                lowered = jax.jit(functools.partial(jax.core.eval_jaxpr, jaxpr)).lower(consts, *arguments)
                # The jaxpr is kept, so that no other one has its id.
                self.compiled[id(jaxpr)] = jaxpr, lowered.compile(compiler_options=QUICK)
            _, program = self.compiled[id(jaxpr)]
        program(consts, *arguments)


def _place(number):
    """A number of a place in the mesh, NumPy's too."""
    return number if isinstance(number, jax.core.Tracer) else int(number)


@contextlib.contextmanager
def mosaic_interpreter(num_cores: int = 4) -> Iterator[Any]:
    """A context that yields a kernel's argument `interpret=`.

    Args:
        num_cores: simulated multiprocessors; few are fast.
    """
    mgpu_interp_ext.install()
    mgpu_interp_ext.relax_barriers()
    try:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
    except ImportError:  # jax 0.10
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret_pallas_call.gpu_callbacks.reset_gpu_interpret_mode_state()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=num_cores, platform="cuda")
    mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "io_callback_impl", _call)
        patch.setattr(thread_map, "_run_jaxpr", _Programs())
        patch.setattr(shared_memory, "_to_int", _place, raising=False)
        # As on the card, a copy reads 0 behind the end of an array.
        yield InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
