"""The launch of Mosaic kernels whose warpgroups have roles: by thread block or cluster, references by name."""

import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    kernel: Any,
    inputs: Mapping[str, Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    name: str,
    grid: tuple[str, int],
    threads: int,
    cluster: int = 1,
    interpret: Any = None,
    **options: Any,
) -> tuple[Array, ...]:
    """Run `kernel(references by name, and whether it is interpreted)`, a thread being a warpgroup.

    Args:
        kernel: the body.
        inputs: arrays in global memory; None are left out.
        outputs: shapes of the results.
        scratch: shared memory and barriers; None are left out.
        name: of the kernel, in profiles.
        grid: name and size of its axis: thread blocks, or clusters of them.
        threads: warpgroups of a thread block, along the axis "warpgroup".
        cluster: thread blocks of a cluster; more than one lie along the axis "rank".
        interpret: parameters of Mosaic's interpreter; None compiles.
        options: of the compiler, beside the semantics of lanes. Barriers are the body's own unless they say otherwise.
    """
    present = {key: array for key, array in inputs.items() if array is not None}
    wanted = {key: kind for key, kind in scratch.items() if kind is not None}
    names = (*present, *outputs, *wanted)
    named: dict[str, Any] = dict.fromkeys((*inputs, *scratch)) | {"interpreted": interpret is not None}

    def body(*refs):
        kernel(types.SimpleNamespace(**(named | dict(zip(names, refs, strict=True)))))

    clusters: Any = {"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(wanted.values()),
        grid=(grid[1],),
        grid_names=(grid[0],),
        **clusters,
        num_threads=threads,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, **{"unsafe_no_auto_barriers": True, **options}
        ),
        kernel_name=name,
        interpret=interpret,
    )(*present.values())


def stay(free: Any, count: Any, stages: int) -> None:
    """Wait until every stage is released: a thread block's barriers must outlive its neighbour's last arrival on them.

    Args:
        free: barriers on which both thread blocks of a cluster release stages.
        count: pieces loaded in all.
        stages: pieces in shared memory at a time; so many releases have not been waited for yet.
    """

    def wait(index, _):
        plgpu.barrier_wait(free.at[lax.rem(index, jnp.int32(stages))])

    lax.fori_loop(lax.max(count - stages, 0), count, wait, None)
