"""The train step of a run, compiled before its model is loaded, with a policy of rematerialisation that fits.

On a device whose memory is known the compiler's layout of the step is looked at, and what was compiled is what runs. On
a CPU the step is compiled when it is called first.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from fastjax.errors import ConfigError, TrainingError
from fastjax.execution.opening import OpenModel
from fastjax.execution.policies import holds_more
from fastjax.language_model import LanguageModel
from fastjax.parallel import MeshShape
from fastjax.parallel.processes import gathered_numbers
from fastjax.planning.arrays import largest_arrays
from fastjax.planning.choice import PolicyChoice, choose, first_layers
from fastjax.planning.device import host_memory, memory_limit, pinned_limit
from fastjax.planning.memory import ALLOCATOR_BYTES, StepMemory
from fastjax.planning.work import plain_path, product_flops, stacked_bytes
from fastjax.runs.cache_misses import before_compiling, reads_back
from fastjax.runs.context import Run, RunStep
from fastjax.runs.mesh import open_mesh
from fastjax.runs.model_loading import ModelLoading
from fastjax.runs.policies import less_memory, run_candidates, way_out
from fastjax.runs.steps import RunShapes, device_bytes
from fastjax.training.config import TrainConfig

#: Arrays that a message names.
_SHOWN = 5


def run_policies(config: TrainConfig, earlier: str | None, shape: MeshShape) -> tuple[str, ...]:
    """The policies to choose from, the fastest first.

    Args:
        config: the run.
        earlier: policy of the run that is resumed, so that its numbers go on; None: there is none.
        shape: of the mesh.
    """
    setting = config.model.use_gradient_checkpointing
    if setting == "auto":
        return run_candidates(config, shape) if earlier is None else (earlier,)
    return ("full" if setting is True else "projections" if setting is False else setting,)


def device_stats() -> Mapping[str, int] | None:
    """Figures of the run's device, for its allocator; None: it keeps none."""
    return jax.local_devices()[0].memory_stats()


def compile_step(run: Run, model: OpenModel | LanguageModel, loading: ModelLoading | None = None) -> RunStep:
    """Compile the step of a run on the first mesh, with the first policy, that fits on the devices.

    Args:
        run: with its meshes and its recipe.
        model: its model, in memory or not.
        loading: of the model; None: it is in memory. Where the step may be read back from JAX's cache it begins beside
            that, if the mesh is known and of one process, and half of the memory is left: should XLA compile, it tries
            products out.
    """
    meshes, earlier = run.meshes, None if run.earlier is None else run.earlier.checkpointing
    policies = run_policies(run.config, earlier, meshes[0])
    stats = device_stats()
    limit = memory_limit(stats)
    if stats is None or limit is None:
        return RunStep(policies[0] if len(policies) == 1 else "full", None, meshes[0])
    shapes = RunShapes(run.recipe, model, meshes[0].replicas)
    # The step's frozen weights may be those in memory; it has trained arrays of its own.
    limit = min(gathered_numbers(limit - stats["bytes_in_use"] + shapes.resident_bytes))
    *others, last = meshes
    alone = loading is not None and not others and jax.process_count() == 1
    beside = alone and reads_back() and 2 * shapes.model_bytes <= limit
    for shape in others:
        choice = _choose(shapes, shape, policies, limit, run.tell, None, must=False)
        if choice is not None and choice.fits:
            return RunStep(choice.policy, choice, shape, functools.partial(_way_out, shapes, shape, choice))
        run.tell(f"the model does not fit on one device: {last}")
    choice = _choose(shapes, last, policies, limit, run.tell, loading if beside else None, must=True)
    assert choice is not None, "it must be made"
    return RunStep(choice.policy, choice, last, functools.partial(_way_out, shapes, last, choice))


def _choose(
    shapes: RunShapes,
    shape: MeshShape,
    policies: tuple[str, ...],
    limit: int,
    progress: Callable[[str], None],
    loading: ModelLoading | None,
    *,
    must: bool,
) -> PolicyChoice | None:
    """The choice among the policies on one mesh, with the model loaded beside what is read back.

    None: nothing fits by far, and none must be made.
    """
    mesh = open_mesh(shape)

    unsuited: dict[str, ConfigError] = {}

    @functools.cache
    def traced(policy: str) -> Any:
        step, arguments = shapes.step(policy, mesh)
        return step.trace(*arguments), device_bytes(arguments, None if mesh is None else step.shardings(*arguments))

    def at_least(policy: str) -> int | None:
        try:
            program, arguments = traced(policy)
        except ConfigError as error:  # it does not suit the model
            unsuited[policy] = error
            return None
        return arguments + stacked_bytes(program.jaxpr) // shape.size + ALLOCATOR_BYTES

    def compile(policy: str) -> tuple[StepMemory, Any]:
        progress(f"compiling the train step, gradient checkpointing: {policy}")
        program, _ = traced(policy)
        lowered = program.lower()
        if loading is None:
            compiled = lowered.compile()
        else:
            loading.start(shape)  # not before: it would wait at each of its steps for Python, which tracing holds
            with before_compiling(loading.wait):  # XLA times kernels on the device
                compiled = lowered.compile()
        return StepMemory.of(compiled), compiled

    if all(at_least(policy) is None for policy in policies):
        raise unsuited[policies[-1]]
    if not must and all(needed is None or needed > limit for needed in map(at_least, policies)):
        return None
    host = min(gathered_numbers(host_memory() // (1 if mesh is None else jax.local_device_count())))
    pinned = min(gathered_numbers(pinned_limit()))
    choice = choose(policies, limit, host, at_least=at_least, compile=compile, pinned=pinned)
    if shapes.partial and len(policies) > 1 and choice.fits and choice.policy in ("attention", "full"):
        choice = _filled(choice, shapes, at_least, compile)
    return choice


def _filled(
    choice: PolicyChoice,
    shapes: RunShapes,
    at_least: Callable[[str], int | None],
    compile: Callable[[str], tuple[StepMemory, Any]],
) -> PolicyChoice:
    """The choice, or the step that keeps projections in the first layers, if that fits and recomputes less."""
    layers = shapes.model("full").config.num_hidden_layers
    bounds = [at_least(policy) for policy in (choice.policy, "full", "projections")]
    refused = [one.needed for one in choice.refused if one.policy == "projections"]
    if None in bounds or not refused:
        return choice
    chosen, full, rich = (bound for bound in bounds if bound is not None)
    least = choice.memory.device - (chosen - full)
    policy = first_layers(choice.limit, least, max(refused[0], least + rich - full), layers)
    for _ in range(2):
        if policy is None or _less(shapes, choice.policy, policy, layers):
            return choice
        memory, compiled = compile(policy)
        if choice.room.holds(memory):
            return choice._replace(policy=policy, memory=memory, compiled=compiled)
        count = int(policy.partition(":")[2])
        policy = first_layers(choice.limit, least, least + (memory.device - least) * layers / count, layers)
    return choice


def _less(shapes: RunShapes, policy: str, partial: str, layers: int) -> bool:
    """Whether a policy recomputes less than one that keeps projections in the first layers."""
    if policy == "full":
        return False
    with plain_path():
        chosen, full, rich = (
            product_flops(step.trace(*arguments).jaxpr)
            for step, arguments in map(shapes.step, (policy, "full", "projections"))
        )
    return full - chosen >= (full - rich) * int(partial.partition(":")[2]) / layers


@contextlib.contextmanager
def memory_advice(step: RunStep) -> Iterator[None]:
    """Turn a device out of memory into an error with the arrays that take most, and the settings to change.

    Args:
        step: of the run.

    Raises:
        TrainingError: the device is out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(_advice(str(error).splitlines()[0], step)) from error


def _advice(message: str, step: RunStep) -> str:
    text, choice = f"the device has not enough memory: {message}", step.choice
    if choice is not None:
        arrays = "; ".join(map(str, largest_arrays(choice.compiled.as_text(), _SHOWN)))
        held, beside = (count / 2**30 for count in (choice.memory.arguments, choice.memory.temporaries))
        text += f". The step ({choice.policy}) holds {held:.1f} GiB of weights and state and {beside:.1f} beside them"
        text += f", the largest arrays: {arrays}" if arrays else ""
    if step.advice is not None:
        return f"{text}. {step.advice()}"
    settings = ["model.use_gradient_checkpointing: true"] if holds_more(step.policy, "full") else []
    return f"{text}. {way_out(settings)}"


def _way_out(shapes: RunShapes, shape: MeshShape, choice: PolicyChoice) -> str:
    """The way out where the device has no memory for the chosen step."""
    others = [one.policy for one in choice.refused]
    settings = less_memory(shapes.config, shapes.model(choice.policy), shape, choice.policy, others)
    return way_out(settings, shapes.config.training.per_device_train_batch_size)
