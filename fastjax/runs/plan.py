"""A plan of a run: its real train step compiled for a card with each policy, its memory and its time estimated."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastjax.errors import ConfigError
from fastjax.execution.opening import OpenModel
from fastjax.host_memory import in_host_memory
from fastjax.parallel import MeshShape
from fastjax.planning.cache import CacheRoom
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
from pallas_kernels.cards import peak_flops

#: Steps of a run whose number is not known: its step takes the learning rates of 65,536 in any case.
_STEPS = 1000
#: The policies for rows of tens of thousands of tokens, of which others keep too much.
LONG_POLICIES = ("full", "offload", "offload_attention")
_ONE_DEVICE = MeshShape()


class PlannedStep(NamedTuple):
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
        cache: of generation with the model; None: on several devices, and of a reward model.
    """

    steps: Sequence[PlannedStep]
    refused: Mapping[str, str]
    settings: Sequence[str]
    best: PlannedStep | None = None
    cache: CacheRoom | None = None


class Planner:
    """A run's step compiled for a device: no weight is read, no array is made, and figures are a device's."""

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        room: MemoryLimits,
        progress: Callable[[str], None],
        shape: MeshShape = _ONE_DEVICE,
    ):
        """Open the mesh.

        Args:
            config: the run.
            device: compiled for.
            room: what the step may take.
            progress: takes what is being done.
            shape: of the mesh.

        Raises:
            ConfigError: a dtype that the card has no products in.
        """
        if config.model.dtype == "bfloat16" and peak_flops(device.card.device_kind, jnp.bfloat16) is None:
            raise ConfigError(
                f"model.dtype: expected float16 or float32 on {device.card.device_kind}, which has no products in "
                "bfloat16, got bfloat16; leave it out"
            )
        self._config, self._device, self._room = config, device, room
        self._progress, self._shape = progress, shape
        self._mesh = open_mesh(shape, device.devices if shape.size > 1 else None)

    def plan(self, opened: OpenModel, policies: Sequence[str] | None = None) -> RunPlan:
        """The step with each policy, in their order.

        Args:
            opened: the run's model.
            policies: of rematerialisation; None: all to choose from that suit the model, and where there is room left,
                projections in as many layers as fit.

        Raises:
            ConfigError: settings that do not fit the model, or a policy of those given that does not.
        """
        self._progress("shapes of the model")
        run, room = self._shapes(self._config, opened), self._room
        flops, products = self._mathematics(run, opened)
        found: dict[str, PlannedStep] = {}
        refused: dict[str, str] = {}

        def add(policy: str) -> None:
            try:
                found[policy] = self._planned(run, policy, flops, products)
            except ConfigError as error:  # it does not suit the model
                if policies is not None or policy == order[-1] and not found:
                    raise
                refused[policy] = str(error)

        order = policies or run_candidates(self._config, self._shape)
        for policy in order:
            add(policy)
        if policies is None and {"full", "projections"} <= found.keys():
            full, projections = (found[policy].memory.device for policy in ("full", "projections"))
            layers = run.model("full").config.num_hidden_layers
            if (partial := first_layers(room.device, full, projections, layers)) is not None:
                add(partial)
        steps = list(found.values())
        least, settings = smallest(steps), []
        if least.memory.device > room.device:
            tried, model = found.keys() | refused.keys(), run.model(least.policy)
            settings = less_memory(run.config, model, self._shape, least.policy, tried)
        best = min((one for one in steps if room.holds(one.memory)), key=lambda one: one.seconds, default=None)
        return RunPlan(steps, refused, settings, best, self._cache(run))

    def longest(self, positions: int, policies: Sequence[str] | None = None) -> dict[str, LongestRow | None]:
        """Search for the longest rows that the step fits with, by compiling it; the settings' length does not matter.

        Args:
            positions: most tokens of a row of the model.
            policies: of rematerialisation; None: `LONG_POLICIES`.

        Returns:
            For each policy the longest row; None: the shortest one tried does not fit.

        Raises:
            ConfigError: settings that do not fit the model.
        """

        def measure(policy: str, tokens: int) -> StepMemory:
            self._progress(f"compiling for {self._device.card.device_kind}: {policy}, rows of {tokens:,} tokens")
            model = dataclasses.replace(self._config.model, max_seq_length=tokens)
            config = dataclasses.replace(self._config, model=model)
            return StepMemory.of(self._compiled(self._shapes(config, open_shapes(config)), policy))

        return {
            policy: longest_row(functools.partial(measure, policy), self._room, positions, self._shape.token_parts)
            for policy in policies or LONG_POLICIES
        }

    def _cache(self, run: RunShapes) -> CacheRoom | None:
        """The cache of generation, in the dtype of the computation, beside the weights as the run holds them."""
        model = run.model("full")
        if self._mesh is not None or model.config.scored:
            return None
        return CacheRoom.of(model.config, run.model_bytes, model.dtype, self._room.device, model.max_seq_length)

    def _shapes(self, config: TrainConfig, opened: OpenModel) -> RunShapes:
        options = DETERMINISTIC if config.training.deterministic else None
        with self._device.tracing():
            return RunShapes(StepRecipe(config, _STEPS, compiler_options=options), opened, self._shape.replicas)

    def _mathematics(self, run: RunShapes, opened: OpenModel) -> tuple[float, float]:
        """FLOPs of the mathematics of a step, and of its products where each is there once."""
        config, model = self._config, run.model("full")
        reference = config.preferences.reference_in_step
        flops = flops_per_token(model.config, model.trainable, config.model.max_seq_length, reference=reference)
        self._progress("products of the step")
        # MLPs by chunks are computed again under any policy; with all tokens at once each product is there once.
        unchunked = config.model.without_chunks()
        if unchunked != config.model:
            run = self._shapes(dataclasses.replace(config, model=unchunked), opened)
        return flops * run.batch.tokens.size / self._shape.size, self._products(run, "none")

    def _products(self, run: RunShapes, policy: str) -> float:
        """FLOPs of a device's products in a step."""
        step, arguments = run.step(policy)
        with plain_path():
            return product_flops(step.trace(*arguments).jaxpr) / self._shape.size

    def _planned(self, run: RunShapes, policy: str, flops: float, products: float) -> PlannedStep:
        card, model = self._device.card, run.model(policy)
        self._progress(f"compiling for {card.device_kind}: {policy}")
        recomputed = max(0.0, self._products(run, policy) - products)
        compiled = self._compiled(run, policy)
        memory, text = StepMemory.of(compiled), compiled.as_text()
        exchanged = collectives(text, self._shape.size)
        linked, frozen = link_seconds(exchanged, card), model.frozen
        accumulation = self._config.training.gradient_accumulation_steps
        seconds = step_seconds(
            kernels(text),
            flops=flops + recomputed,
            offloaded_bytes=memory.host - _host_bytes(frozen),
            streamed_bytes=2 * accumulation * _host_bytes(frozen.get("layers", {})),
            card=card,
            dtype=model.dtype,
        )
        tokens = run.batch.tokens.size
        return PlannedStep(policy, memory, flops, recomputed, seconds + linked, tokens, self._shape, exchanged, linked)

    def _compiled(self, run: RunShapes, policy: str) -> Any:
        """The step with a policy, as the device or the mesh of several runs it."""
        step, arguments = run.step(policy, self._mesh)
        if self._mesh is None:
            return self._device.compile(step, *arguments)
        return step.trace(*arguments).lower().compile()


def smallest(planned: Sequence[PlannedStep]) -> PlannedStep:
    """The step that holds least on the device.

    Args:
        planned: the steps.
    """
    return min(planned, key=lambda one: one.memory.device)


def _host_bytes(tree: Any) -> int:
    """Bytes of the arrays in the host's memory."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if in_host_memory(leaf))
