"""Run Mosaic GPU kernels on CPU through Pallas' interpreter, the same way on every supported jax."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support import mgpu_interp_ext


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
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        # As on the card, a copy reads 0 behind the end of an array.
        yield InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
