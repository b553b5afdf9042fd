"""Gathering sharded weights where they are used."""

from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def gathered(tree: Any) -> Any:
    """Gather the leaves on every device if the ambient mesh splits weights over `fsdp`; else return the tree.

    Called inside the body of the layer loop, on packed codes: 4 bits a weight travel, one layer at a time.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get("fsdp", 1) == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types):
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, P()), tree)
