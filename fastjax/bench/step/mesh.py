"""The meshes of a measurement: read from the command line, and refused where a case does not suit them."""

import re

from jax.sharding import Mesh

from fastjax.bench.step.case import StepCase
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape
from fastjax.parallel.checks import check_mesh, check_rows
from fastjax.runs.mesh import open_mesh


def read_mesh(text: str) -> MeshShape | None:
    """A mesh from the command line; None: one device.

    Args:
        text: "one", or sizes of axes as "fsdp=2,tensor=2".

    Raises:
        ConfigError: it is neither.
    """
    if text == "one":
        return None
    axes = [re.fullmatch(r"(\w+)=([1-9]\d{0,3})", part) for part in text.split(",")]
    sizes = {found[1]: int(found[2]) for found in axes if found and found[1] in MeshShape._fields}
    if len(sizes) != len(axes):
        known = ", ".join(MeshShape._fields)
        raise ConfigError(f"bench step: --mesh: expected one, or sizes of {known} such as fsdp=2,tensor=2, got {text}")
    shape = MeshShape(**sizes)
    return None if shape.size == 1 else shape


def open_case_mesh(case: StepCase) -> Mesh | None:
    """The mesh of a case's devices; None: there is one.

    Args:
        case: the settings.

    Raises:
        ConfigError: there are fewer devices, or the case does not suit them.
    """
    shape = case.mesh
    if shape is None:
        return None
    try:
        mesh = open_mesh(shape)
        check_mesh(case.config, shape)
        check_rows(case.step_rows, case.seq, shape)
    except ConfigError as error:
        raise ConfigError(f"bench step: --mesh {shape}: {error}") from error
    return mesh
