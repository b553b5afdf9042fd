"""FLOPs of a traced step, counted in its products, recomputation included.

Kernels hide their products, so a step is traced for a CPU, where every operation takes its plain path. What a policy of
rematerialisation adds is the difference to the step that keeps everything: it does not depend on the path.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh


@contextlib.contextmanager
def plain_path() -> Iterator[None]:
    """The context in which tracing plans for a CPU, whatever devices there are."""
    device = AbstractDevice(device_kind="plain", num_cores=None, platform="cpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def product_flops(jaxpr: Any) -> float:
    """FLOPs of the products in a jaxpr: two a multiplication, loops by their length, of branches the largest.

    Args:
        jaxpr: closed or open; what no result needs is not computed.
    """
    program = getattr(jaxpr, "jaxpr", jaxpr)
    return _product_flops(dce_jaxpr(program, [True] * len(program.outvars))[0])


def _product_flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
            continue
        if name == "ragged_dot_general":  # each row meets one group's matrix, in the product or in its gradient
            total += 2.0 * math.prod(equation.invars[0].aval.shape) * equation.outvars[0].aval.shape[-1]
            continue
        inside = [_product_flops(inner) for inner in jaxprs_in_params(params)]
        if name == "cond":
            total += max(inside, default=0.0)
        else:
            total += sum(inside) * (params["length"] if name == "scan" else 1)
    return total


def stacked_bytes(jaxpr: Any) -> int:
    """Bytes that the longest-lived results of a scan over the layers take: a step cannot hold less.

    Args:
        jaxpr: closed or open, of a step.

    Returns:
        The largest sum of the stacked results of one scan that stay on the device; 0 without a scan.
    """
    largest, program = 0, getattr(jaxpr, "jaxpr", jaxpr)
    used = {id(one) for one in [*program.outvars, *(one for equation in program.eqns for one in equation.invars)]}
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"]
            pairs = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
            stacked = [whole.aval for whole, one in pairs if id(whole) in used and whole.aval.ndim > one.aval.ndim]
            here = [aval for aval in stacked if aval.memory_space != jax.memory.Space.Host]
            largest = max(largest, sum(aval.size * aval.dtype.itemsize for aval in here))
        largest = max([largest, *(stacked_bytes(inner) for inner in jaxprs_in_params(equation.params))])
    return largest
