"""What a run tells of its step where it hangs."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel import MeshShape, make_mesh
from fastjax.runs.training_run import told_collectives


@pytest.mark.parametrize(
    ("devices", "compiled", "told"), [(4, True, "a step has all-reduce × 1"), (4, False, ""), (1, True, "")]
)
def test_the_collectives_of_a_step_that_hangs(devices, compiled, told):
    shape = MeshShape(data=devices)
    rows = NamedSharding(make_mesh(*shape), P("data"))
    program = jax.jit(jnp.sum, in_shardings=rows).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    choice = types.SimpleNamespace(compiled=program) if compiled else None
    assert told_collectives(types.SimpleNamespace(choice=choice, mesh=shape)) == told
