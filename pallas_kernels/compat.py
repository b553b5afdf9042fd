"""Differences of the supported JAX versions (0.10.2 and 0.11); no other file knows of them."""

import warnings
from typing import Any

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """`plgpu.load` of a whole reference into registers of a layout; 0.10 takes an index beside the reference.

    Args:
        ref: reference in shared or global memory; index it with `.at[…]` first.
        layout: the registers' layout.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = ((),) if JAX_VERSION < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def reading_peers(**options: Any) -> Any:
    """`plgpu.CompilerParams` of a kernel that reads what no device writes in the program: none waits for the others.

    Args:
        options: others.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if JAX_VERSION >= (0, 11):
        options["skip_device_barrier"] = True
    return plgpu.CompilerParams(**options)


def peer_ref(ref: Any, axis_name: str, index: Any, *, interpreted: bool) -> Any:
    """A kernel's reference to the same argument on another device.

    Args:
        ref: in global memory; interpreted, that of all devices along its first axis: the interpreter knows one device.
        axis_name: mesh axis along which the device lies.
        index: its place there.
        interpreted: whether Mosaic's interpreter runs the kernel.
    """
    if interpreted:
        return ref.at[index]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    device: Any = {axis_name: index}
    return plgpu.remote_ref(ref, device)


def silence_triton_deprecation() -> None:
    """Keep jax 0.11 from warning, at every lowering, that it will drop Pallas-Triton one day; that warning alone."""
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
