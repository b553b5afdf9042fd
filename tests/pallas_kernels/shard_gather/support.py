"""Stacks whose rows devices share, and islands over them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel import make_mesh

#: Rows of a device and the rest, by dtype: whole tiles of the kernel, a tile and a bit, less than a tile.
SHARDS = [
    ("uint8", (512, 128)),
    ("uint8", (73, 144)),
    ("uint8", (32, 64)),
    ("bfloat16", (130, 256)),
    ("float32", (512,)),
]


def stacks(devices, layers=3):
    """Random arrays [layers, devices · rows, …]."""
    rng = np.random.default_rng()
    made = []
    for dtype, (rows, *rest) in SHARDS:
        shape = (layers, devices * rows, *rest)
        values = rng.integers(0, 256, shape) if dtype == "uint8" else rng.normal(size=shape)
        made.append(jnp.asarray(values, dtype))
    return made


def island(devices, op, arrays):
    """`op(layer, *shards)` on each device, jitted; its results are the same on all."""
    mesh = make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    places = (P(), *[P(None, "fsdp")] * len(arrays))
    local = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=places, out_specs=P(), check_vma=False))

    def call(layer, *arrays):
        placed = [
            jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, places[1:], strict=True)
        ]
        return local(jnp.int32(layer), *placed)

    return call
