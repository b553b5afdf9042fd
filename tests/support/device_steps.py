"""One train step on any device, compared leaf by leaf with float32 on the CPU from the same weights.

Models are made on the CPU and their arrays sent to the device, which runs the step alone. The gradients are the inputs
of the step's optimizer.

The yardstick of a 16-bit step's error is the same step in bfloat16 on the CPU, in XLA's plain operations with every
intermediate result rounded: kernels round other intermediate results, in another order, and may be off by `FACTOR`
times as much (FlashAttention's own tests allow twice for one operation, three times for its gradients). float16 has
three more bits, so an eighth of that is allowed.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.runs.steps import sums_once
from fastjax.training.step import init_state, make_train_step
from pallas_kernels import dispatch
from tests.support import steps, tiny

FACTOR = 3.0

#: The relative rounding error of a dtype.
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}

#: Float32's own error: sums in another order and another exponential function, over all layers. A product in TF32 alone
#: would be off by 5e-4.
FLOOR = {"bfloat16": 0.0, "float16": 0.0, "float32": 1e-5}

#: With float16: the default of `training.initial_loss_scale` would do as well.
LOSS_SCALE = 2.0**12

#: The CPU's programs run for milliseconds and would compile for seconds.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Besides: 16-bit results that XLA would keep in float32 inside its fusions are rounded.
ROUNDED = {**QUICK, "xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The loss and gradients of a step.

    Attributes:
        loss: the mean over the targets.
        targets: their number.
        leaves: the gradients by name, one of each layer, float64.
        chosen: (operation, implementation) of every dispatch.
    """

    loss: float
    targets: int
    leaves: Mapping[str, np.ndarray]
    chosen: frozenset[tuple[str, str]]


def cpu():
    return jax.devices("cpu")[0]


def in_dtype(model, dtype):
    """A bfloat16 model computed in another dtype from the same values, its frozen arrays widened."""
    dtype, held = jnp.dtype(dtype), jnp.dtype(jnp.bfloat16)
    assert model.dtype == held
    precision = dataclasses.replace(model.precision, dtype=dtype)
    decoder = model.module()
    decoder.precision = precision
    graphdef, _, _ = nnx.split(decoder, model.trainable_filter, ...)
    frozen = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == held else leaf, model.frozen)
    return model.replace(graphdef=graphdef, frozen=frozen, precision=precision)


def step_on(device, model, batch, *, key=0, mesh=None, compiler_options=None):
    """The outcome of one step of a model; its arrays may lie anywhere.

    Args:
        device: where it runs, or the first of the mesh.
        model: with its trained arrays.
        batch: on the host.
        key: number of the dropout's key.
        mesh: of several devices, as in a run.
        compiler_options: XLA's.
    """
    scale = LOSS_SCALE if model.dtype == jnp.float16 else None
    step = make_train_step(
        model.graphdef,
        steps.RECORDER,
        model.trainable_filter,
        donate=False,
        mesh=mesh,
        sum_once=sums_once(model, mesh),
        compiler_options=compiler_options,
    )
    with jax.default_device(device), selections() as chosen:
        trainable, frozen = jax.device_put((model.trainable, model.frozen), device)
        state = init_state(trainable, steps.RECORDER, jax.random.key(key), scale)
        state, metrics = jax.device_get(step(state, frozen, batch))
    assert metrics["finite"]
    found, _ = jax.tree_util.tree_flatten_with_path(tiny.by_layer(state.opt_state, model.plan))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, np.float64) for path, leaf in found
    }
    return Outcome(float(metrics["loss"]), int(metrics["num_targets"]), leaves, frozenset(chosen))


@contextlib.contextmanager
def quick_compilation():
    """A context of compilation without optimisation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def selections():
    """(operation, implementation) of every dispatch in the context."""
    chosen, select = set(), dispatch.select

    def recorded(op, *arguments):
        name = select(op, *arguments)
        chosen.add((op, name))
        return name

    with mock.patch.object(dispatch, "select", recorded):
        yield chosen


def errors(found, exact):
    """The loss's and each leaf's relative error: the norm of the difference over the exact one's."""
    assert found.targets == exact.targets > 0
    assert found.leaves.keys() == exact.leaves.keys()
    off = {"loss": abs(found.loss - exact.loss) / abs(exact.loss)}
    for name, leaf in exact.leaves.items():
        norm = np.linalg.norm(leaf)
        assert norm > 0, f"{name}: a gradient of zero proves nothing"
        off[name] = float(np.linalg.norm(found.leaves[name] - leaf) / norm)
    return off


def allowed(yardstick, dtype):
    """The allowed relative error of each leaf.

    Args:
        yardstick: `errors` of the step in bfloat16 on the CPU.
        dtype: of the judged step.

    Returns:
        By name: `FACTOR` times the yardstick's error, in units of the dtype. Where the yardstick was lucky: as the same
        weight's gradient in another layer, or as the median leaf; the loss as one rounding.
    """
    worst: dict[str, float] = {}
    median = float(np.median([error for name, error in yardstick.items() if name != "loss"]))
    assert median < 0.1, "rounding alone makes another gradient of this model's: it proves nothing"
    for name, error in yardstick.items():
        least = UNIT["bfloat16"] if name == "loss" else median
        worst[_kind(name)] = max(error, least, worst.get(_kind(name), 0.0))
    scale = FACTOR * UNIT[dtype] / UNIT["bfloat16"]
    return {name: scale * worst[_kind(name)] + FLOOR[dtype] for name in yardstick}


def _kind(name):
    return re.sub(r"^layers\.\d+\.", "layers.", name)


def assert_within(found, exact, bounds, title):
    """Assert every leaf and the loss within their bounds; prints the leaf nearest to its bound.

    Args:
        found: the judged outcome.
        exact: the float32 one.
        bounds: of `allowed`.
        title: of the printed line.
    """
    off = errors(found, exact)
    shares = {name: error / bounds[name] for name, error in off.items()}
    worst = max(shares, key=shares.__getitem__)
    report = f"{title}: loss off by {off['loss']:.1e}, of {len(off) - 1} leaves worst {worst}: {off[worst]:.2e}"
    report += f" of {bounds[worst]:.2e}"
    print(report)
    beyond = {name: f"{off[name]:.2e} of {bounds[name]:.2e}" for name, share in shares.items() if not share <= 1}
    assert not beyond, f"{title}: {beyond}"
