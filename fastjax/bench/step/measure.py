"""One case, in this process: model, compilation, steps, and a trace of three more.

The time of a step is the median from one step's end to the next one's, each dispatched before the step ahead of it has
ended, as in training; compiling is timed apart. A figure is given only for steps that train: every loss and gradient is
finite, and every trained array has a gradient.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fastjax.bench.step.build import build_model, documents_of, make_batch, open_case_mesh
from fastjax.bench.step.case import StepCase
from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.language_model import LanguageModel
from fastjax.parallel import place, row_shardings
from fastjax.runs.steps import sums_once
from fastjax.training.flops import attended_length, flops_per_token
from fastjax.training.health import GradientCheck, leaf_names
from fastjax.training.metrics import peak_memory
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.placement import start_on_mesh
from fastjax.training.step import TrainState, init_state, make_train_step
from pallas_kernels.attention import attention_implementation

_RATE = 1e-4
#: Steps of a trace.
PROFILED = 3


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a case; without a figure `error` or `fault` says why.

    Attributes:
        device: its name.
        jax: version.
        dtype: of the computation.
        step_seconds: median.
        tokens_per_second: of the median step, of all devices.
        model_tflops_per_second: `flops_per_token` of the step's tokens over the median step.
        compile_seconds: tracing, lowering and compiling.
        peak_bytes: the allocator's peak in this process, of the device where it is highest; None where devices keep no
            count.
        step_bytes: arguments and temporaries of the step on a device by the compiler's plan.
        losses: of every step, warm-up included.
        error: the device cannot serve the case.
        fault: the step does not train, or not what the others of its call do.
    """

    device: str
    jax: str
    dtype: str | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    model_tflops_per_second: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    step_bytes: int | None = None
    losses: Sequence[float] = ()
    error: str | None = None
    fault: str | None = None


def measure(case: StepCase, profile: Path | None = None) -> StepResult:
    """Build the model, compile the step, time it.

    Args:
        case: the settings.
        profile: folder for a trace of further steps; None: no trace.

    Raises:
        ConfigError: settings that the model or the devices do not take.
    """
    try:
        return _measure(case, profile)
    except TrainingError as fault:
        return _result(fault=str(fault))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _result(error="out of memory")


def _result(**found: Any) -> StepResult:
    return StepResult(jax.devices()[0].device_kind, jax.__version__, **found)


def _measure(case: StepCase, profile: Path | None) -> StepResult:
    mesh = open_case_mesh(case)
    model = build_model(case, mesh)
    total = case.warmup + case.steps
    rule = OptimizerConfig(name=case.optimizer, learning_rate=_RATE)  # pyright: ignore[reportArgumentType]
    optimizer = make_optimizer(rule, total, offload=case.offload_optimizer)
    lengths = [length for row in documents_of(case) for length in row]
    tokens = sum(lengths)
    flops = tokens * flops_per_token(model.config, model.trainable, attended_length(lengths))
    names, dtype = leaf_names(model.trainable, model.plan), str(model.dtype)
    batch = make_batch(case, model.config.vocab_size)
    options = {"mesh": mesh, "sum_once": sums_once(model, mesh), "compiler_options": case.xla_options}
    step: Any = make_train_step(model.graphdef, optimizer, model.trainable_filter, **options)
    arguments = _placed(model, optimizer, batch, step, mesh)

    start = time.perf_counter()
    with attention_implementation(case.attention):
        traced = step.trace(*arguments)  # not their shapes: those of one device say nothing of the host's memory
        del arguments, model  # as in a run: the compiler tries products out without the model on the device
        compiled = traced.lower().compile()
    compile_seconds = time.perf_counter() - start
    state, frozen, batch = _placed(build_model(case, mesh), optimizer, batch, step, mesh)

    check, ends, losses = GradientCheck(names), [time.perf_counter()], []
    running = None
    for number in range(total + 1):  # the last one is not timed: a step's time has the next one's dispatch in it
        state, queued = compiled(state, frozen, batch)
        if running is not None:
            values = jax.device_get(running)
            ends.append(time.perf_counter())
            losses.append(float(values["loss"]))
            if not values["finite"]:
                raise TrainingError(f"step {number - 1}: loss {losses[-1]:g}, or a gradient that is not finite")
            check.step(values["squared_norms"], _RATE, last=number == total)
        running = queued
    jax.block_until_ready(state)
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    peak = peak_memory()
    if profile is not None:
        with jax.profiler.trace(str(profile)):
            for _ in range(PROFILED):
                state, metrics = compiled(state, frozen, batch)
            jax.block_until_ready((state, metrics))
    median, plan = statistics.median(seconds[case.warmup :]), compiled.memory_analysis()
    return _result(
        dtype=dtype,
        step_seconds=median,
        tokens_per_second=tokens / median,
        model_tflops_per_second=flops / median / 1e12,
        compile_seconds=compile_seconds,
        peak_bytes=peak,
        step_bytes=None if plan is None else plan.argument_size_in_bytes + plan.temp_size_in_bytes,
        losses=losses,
    )


def _placed(
    model: LanguageModel, optimizer: optax.GradientTransformation, batch: Batch, step: Any, mesh: Mesh | None
) -> tuple[TrainState, Any, Batch]:
    """The step's arguments; the state has a copy of what is trained."""
    scale = 2.0**12 if model.dtype == jnp.float16 else None  # that no gradient of such a model exceeds

    def begin(trainable: Any) -> TrainState:
        return init_state(trainable, optimizer, jax.random.key(0), scale)

    if mesh is None:
        return begin(model.trainable), model.frozen, batch
    state, frozen = start_on_mesh(begin, model.trainable, model.frozen, batch, step)
    return state, frozen, place(batch, row_shardings(batch, mesh))
