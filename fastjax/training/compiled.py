"""Jitted functions of (state, frozen weights, batch), on one device or on a mesh.

On a GPU equal runs need not be equal bit for bit: some of XLA's operations add in the order in which threads arrive
(scatters, some convolutions), and autotuning may choose another kernel in another process. Deterministic operations
exclude the first, autotuning results kept in the run's folder the second, for a resumed run and for one repeated in the
same place.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convert.model.config import ModelConfig
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution import remat
from fastjax.execution.tensor_parts import held_apart
from fastjax.host_memory import in_host_memory
from fastjax.parallel import MeshShape, place, row_shardings
from fastjax.parallel.checks import check_rows
from fastjax.parallel.islands import islands_on
from fastjax.training.placement import state_shardings, weight_shardings

#: XLA's options for a step. Its Triton products hide sums from cuBLAS, which adds a rank product to a large product as
#: it writes this one; and they take part in the autotuning, the longest part of compiling.
COMPILER_OPTIONS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False}

#: XLA's option for operations that add in one order.
DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}
#: In the output folder.
KERNELS = "kernels"


def jitted(
    function: Callable[..., Any],
    graphdef: nnx.GraphDef,
    trainable_filter: Any,
    mesh: Mesh | None,
    compiler_options: Mapping[str, Any] | None,
    *,
    updates: bool = False,
    donate: bool = False,
) -> Callable[..., Any]:
    """Jit a function of (state or trained arrays, frozen weights, batch).

    Args:
        function: to compile.
        graphdef: of the decoder.
        trainable_filter: the nnx filter that split the decoder.
        mesh: of several devices; None: there is one.
        compiler_options: XLA's, beside `COMPILER_OPTIONS` and before them.
        updates: whether it returns the state and metrics.
        donate: reuse the state's memory.

    Returns:
        The jitted function; on a mesh an `OnMesh`.
    """
    # Where every weight is trained, gradients take the link too, and an early start of the gathers does not help.
    gathers = (
        mesh is not None and max(mesh.shape["fsdp"], mesh.shape["tensor"]) > 1 and trainable_filter is not nnx.Param
    )
    options = {**COMPILER_OPTIONS, **remat.compiler_options(graphdef, gathers=gathers), **(compiler_options or {})}
    jit = functools.partial(jax.jit, donate_argnums=(0,) if donate else (), compiler_options=options)
    return jit(function) if mesh is None else OnMesh(function, graphdef, mesh, jit, updates)


class OnMesh:
    """A jitted function on a mesh: rows over all devices, weights and state by the table (`placement`).

    Attributes:
        jitted: the function, called in `jax.set_mesh`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        graphdef: nnx.GraphDef,
        mesh: Mesh,
        jit: Callable[..., Any],
        updates: bool,
    ):
        functools.update_wrapper(self, function)
        self._graphdef, self._mesh, self._shape = graphdef, mesh, MeshShape(**mesh.shape)
        # By the structure of the frozen weights, which splitting over tensor changes.
        self._places: dict[Any, Any] = {}
        self._known: ModelConfig | None = None
        # The last frozen weights and what was made of them: those of a loop are the same in all of its steps.
        self._frozen: tuple[Any, Any] = None, None

        def placed(state: Any, frozen: Any, batch: Batch) -> Any:
            places = self.shardings(state, frozen, batch)
            with islands_on(mesh):
                results = function(*jax.tree.map(jax.lax.with_sharding_constraint, (state, frozen, batch), places))
            result_places = jax.tree.map(lambda _: NamedSharding(mesh, P()), results)
            if updates:
                result_places = places[0], result_places[1]
            return jax.tree.map(jax.lax.with_sharding_constraint, results, result_places)

        self.jitted = jit(placed)

    def __call__(self, state: Any, frozen: Any, batch: Batch) -> Any:
        """Call the function with arrays, which are placed first.

        By the call itself a step that was compiled for a state on one device would be compiled again for its own
        result.
        """
        check_rows(batch.tokens.shape[1], batch.tokens.shape[2], self._shape)
        given, placed = self._frozen
        if frozen is not given:
            placed = self._apart(state, frozen)
        arguments = place((state, placed, batch), self.shardings(state, placed, batch))
        self._frozen = frozen, arguments[1]
        with jax.set_mesh(self._mesh):
            return self.jitted(*arguments)

    def trace(self, state: Any, frozen: Any, batch: Batch) -> Any:
        """Trace the function for shapes in the place of arrays."""
        check_rows(batch.tokens.shape[1], batch.tokens.shape[2], self._shape)
        arguments = (state, jax.eval_shape(lambda frozen: self._apart(state, frozen), frozen), batch)
        specs = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            arguments,
            self.shardings(*arguments),
        )
        with jax.set_mesh(self._mesh):
            return self.jitted.trace(*specs)

    def shardings(self, state: Any, frozen: Any, batch: Batch) -> tuple[Any, Any, Any]:
        """The shardings of the arguments, arrays or shapes."""
        structure = jax.tree.structure(frozen)
        if structure not in self._places:
            model, mesh = self._config(state, frozen), self._mesh
            self._places[structure] = state_shardings(state, model, mesh), weight_shardings(frozen, model, mesh)
        return *self._places[structure], row_shardings(batch, self._mesh)

    def _config(self, state: Any, frozen: Any) -> ModelConfig:
        known = self._known
        if known is None:
            if any(map(in_host_memory, jax.tree.leaves(frozen))):
                raise ConfigError(
                    f"frozen: expected arrays in the memory of {self._mesh.size} devices, got some in the host's"
                )
            known = nnx.merge(self._graphdef, getattr(state, "trainable", state), frozen).config
            self._known = known
        return known

    def _apart(self, state: Any, frozen: Any) -> Any:
        if self._shape.tensor == 1:
            return frozen
        return held_apart(frozen, self._config(state, frozen), self._shape.tensor)


def reproducible(deterministic: bool, folder: Path) -> dict[str, Any] | None:
    """XLA's options for the steps of a run.

    Args:
        deterministic: make the run reproducible bit for bit.
        folder: the run's, for the results of the autotuning.

    Returns:
        For `jax.jit(compiler_options=…)`; None: nothing to set.
    """
    if not deterministic or jax.default_backend() != "gpu":
        return None
    kernels = folder / KERNELS
    kernels.mkdir(parents=True, exist_ok=True)
    return {
        **DETERMINISTIC,
        "xla_gpu_per_fusion_autotune_cache_dir": str(kernels.absolute()),
    }
