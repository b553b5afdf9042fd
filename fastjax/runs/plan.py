"""A plan of a run: its real train step compiled for a card with each policy, its memory and its time estimated."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fastjax.errors import ConfigError
from fastjax.execution.opening import OpenModel
from fastjax.host_memory import in_host_memory
from fastjax.parallel import MeshShape
from fastjax.planning.choice import first_layers
from fastjax.planning.collectives import Collective, collectives, link_seconds
from fastjax.planning.device import Device
from fastjax.planning.hlo import kernels
from fastjax.planning.longest import LongestRow, longest_row
from fastjax.planning.memory import MemoryLimits, StepMemory
from fastjax.planning.speed import step_seconds
from fastjax.planning.work import plain_path, product_flops
from fastjax.runs.mesh import open_mesh
from fastjax.runs.opening import open_shapes
from fastjax.runs.policies import less_memory, run_candidates
from fastjax.runs.steps import RunShapes, StepRecipe
from fastjax.training.compiled import DETERMINISTIC
from fastjax.training.config import TrainConfig
from fastjax.training.flops import flops_per_token
from pallas_kernels.cards import Card, peak_flops

#: Steps of a run whose number is not known: its step takes the learning rates of 65,536 in any case.
_STEPS = 1000
#: The policies for rows of tens of thousands of tokens, of which others keep too much.
LONG_POLICIES = ("full", "offload", "offload_attention")
_ONE_DEVICE = MeshShape()


class Planned(NamedTuple):
    """The step with one policy.

    Attributes:
        policy: of rematerialisation.
        memory: of the step.
        flops: of the mathematics, with every row one document.
        recomputed: further FLOPs, of the backward pass's recomputation.
        seconds: estimate of the step's time, with that on the link.
        tokens: of a step, whole rows, of all devices.
        mesh: shape of the mesh.
        collectives: what the devices say to each other.
        link_seconds: estimate of the time that it takes; nothing is taken to overlap.
    """

    policy: str
    memory: StepMemory
    flops: float
    recomputed: float
    seconds: float
    tokens: int
    mesh: MeshShape = _ONE_DEVICE
    collectives: Sequence[Collective] = ()
    link_seconds: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    @property
    def tokens_per_second(self) -> float:
        """Estimated speed."""
        return self.tokens / self.seconds


class RunPlan(NamedTuple):
    """A run's step with several policies.

    Attributes:
        steps: one a policy, at least one.
        refused: the policies that the run cannot take, and why.
        settings: where no step fits on the device, those with which the smallest would hold less
            (`policies.less_memory`).
        best: the fastest step that fits; None: none fits.
    """

    steps: Sequence[Planned]
    refused: Mapping[str, str]
    settings: Sequence[str]
    best: Planned | None = None


def plan_run(
    config: TrainConfig,
    opened: OpenModel,
    device: Device,
    policies: Sequence[str] | None,
    room: MemoryLimits,
    progress: Callable[[str], None],
    shape: MeshShape = _ONE_DEVICE,
) -> RunPlan:
    """Compile a run's train step with each policy; no weight is read, no array is made.

    Args:
        config: the run.
        opened: its model.
        device: compiled for.
        policies: of rematerialisation; None: all to choose from that suit the model, and where there is room left,
            projections in as many layers as fit.
        room: what the step may take.
        progress: takes what is being done.
        shape: of the mesh; figures are a device's.

    Returns:
        The steps, in the order of the policies.

    Raises:
        ConfigError: settings that do not fit the model or the card, or a policy of those given that does not.
    """
    planner = _Planner(config, opened, device, progress, shape)
    found: dict[str, Planned] = {}
    refused: dict[str, str] = {}

    def add(policy: str) -> None:
        try:
            found[policy] = planner.planned(policy)
        except ConfigError as error:  # it does not suit the model
            if policies is not None or policy == order[-1] and not found:
                raise
            refused[policy] = str(error)

    order = policies or run_candidates(config, shape)
    for policy in order:
        add(policy)
    if policies is None and {"full", "projections"} <= found.keys():
        full, projections = (found[policy].memory.device for policy in ("full", "projections"))
        layers = planner.run.model("full").config.num_hidden_layers
        if (partial := first_layers(room.device, full, projections, layers)) is not None:
            add(partial)
    steps = list(found.values())
    least, settings = smallest(steps), []
    if least.memory.device > room.device:
        tried, model = found.keys() | refused.keys(), planner.run.model(least.policy)
        settings = less_memory(planner.run.config, model, shape, least.policy, tried)
    best = min((one for one in steps if room.holds(one.memory)), key=lambda one: one.seconds, default=None)
    return RunPlan(steps, refused, settings, best)


class _Planner:
    """A run's step, compiled with one policy after another.

    Attributes:
        run: the shapes of the step.
    """

    def __init__(
        self,
        config: TrainConfig,
        opened: OpenModel,
        device: Device,
        progress: Callable[[str], None],
        shape: MeshShape,
    ):
        _check_dtype(config, device.card)
        progress("shapes of the model")
        self.run = run = _shapes(config, opened, device, shape.replicas)
        self._config, self._device, self._progress, self._shape = config, device, progress, shape
        self._mesh = open_mesh(shape, device.devices if shape.size > 1 else None)
        model, reference = run.model("full"), config.preferences.reference_in_step
        flops = flops_per_token(model.config, model.trainable, config.model.max_seq_length, reference=reference)
        self._flops = flops * run.batch.tokens.size / shape.size
        progress("products of the step")
        # MLPs by chunks are computed again under any policy; with all tokens at once each product is there once.
        whole, unchunked = run, config.model.without_chunks()
        if unchunked != config.model:
            whole = _shapes(dataclasses.replace(config, model=unchunked), opened, device, shape.replicas)
        self._once = self._products("none", whole)

    def _products(self, policy: str, run: RunShapes) -> float:
        """FLOPs of a device's products in a step."""
        step, arguments = run.step(policy)
        with plain_path():
            return product_flops(step.trace(*arguments).jaxpr) / self._shape.size

    def planned(self, policy: str) -> Planned:
        """The step with a policy.

        Args:
            policy: of rematerialisation.
        """
        card, model = self._device.card, self.run.model(policy)
        self._progress(f"compiling for {card.device_kind}: {policy}")
        recomputed = max(0.0, self._products(policy, self.run) - self._once)
        compiled = _compiled(self.run, policy, self._device, self._mesh)
        memory, text = StepMemory.of(compiled), compiled.as_text()
        said = collectives(text, self._shape.size)
        linked, frozen = link_seconds(said, card), model.frozen
        accumulation = self._config.training.gradient_accumulation_steps
        seconds = step_seconds(
            kernels(text),
            flops=self._flops + recomputed,
            offloaded_bytes=memory.host - _host_bytes(frozen),
            streamed_bytes=2 * accumulation * _host_bytes(frozen.get("layers", {})),
            card=card,
            dtype=model.dtype,
        )
        tokens = self.run.batch.tokens.size
        return Planned(policy, memory, self._flops, recomputed, seconds + linked, tokens, self._shape, said, linked)


def smallest(planned: Sequence[Planned]) -> Planned:
    """The step that holds least on the device.

    Args:
        planned: the steps.
    """
    return min(planned, key=lambda one: one.memory.device)


def longest_rows(
    config: TrainConfig,
    positions: int,
    device: Device,
    policies: Sequence[str] | None,
    room: MemoryLimits,
    progress: Callable[[str], None],
    shape: MeshShape = _ONE_DEVICE,
) -> dict[str, LongestRow | None]:
    """Search for the longest rows that a run's train step fits with, by compiling it.

    Args:
        config: the run, whose `max_seq_length` does not matter.
        positions: most tokens of a row of its model.
        device: compiled for.
        policies: of rematerialisation; None: `LONG_POLICIES`.
        room: what the step may take.
        progress: takes what is being done.
        shape: of the mesh; figures are a device's.

    Returns:
        For each policy the longest row; None: the shortest one tried does not fit.

    Raises:
        ConfigError: settings that do not fit the model or the card.
    """
    _check_dtype(config, device.card)
    mesh = open_mesh(shape, device.devices if shape.size > 1 else None)

    def measure(policy: str, tokens: int) -> StepMemory:
        progress(f"compiling for {device.card.device_kind}: {policy}, rows of {tokens:,} tokens")
        own = dataclasses.replace(config, model=dataclasses.replace(config.model, max_seq_length=tokens))
        run = _shapes(own, open_shapes(own), device, shape.replicas)
        return StepMemory.of(_compiled(run, policy, device, mesh))

    return {
        policy: longest_row(functools.partial(measure, policy), room, positions, shape.token_parts)
        for policy in policies or LONG_POLICIES
    }


def _shapes(config: TrainConfig, opened: OpenModel, device: Device, replicas: int = 1) -> RunShapes:
    options = DETERMINISTIC if config.training.deterministic else None
    recipe = StepRecipe(config, _STEPS, compiler_options=options)
    with device.tracing():
        return RunShapes(recipe, opened, replicas)


def _compiled(run: RunShapes, policy: str, device: Device, mesh: Mesh | None) -> Any:
    """The step with a policy, as the device or the mesh of several runs it."""
    step, arguments = run.step(policy, mesh)
    return device.compile(step, *arguments) if mesh is None else step.trace(*arguments).lower().compile()


def _host_bytes(tree: Any) -> int:
    """Bytes of the arrays in the host's memory."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if in_host_memory(leaf))


def _check_dtype(config: TrainConfig, card: Card) -> None:
    if config.model.dtype == "bfloat16" and peak_flops(card.device_kind, jnp.bfloat16) is None:
        raise ConfigError(
            f"model.dtype: expected float16 or float32 on {card.device_kind}, which has no products in bfloat16, got "
            "bfloat16; leave it out"
        )
