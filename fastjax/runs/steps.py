"""A run's train step, from its settings: what training compiles and what a plan compiles are one."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from fastjax.data.batches import Batch
from fastjax.execution.opening import OpenModel
from fastjax.execution.policies import offloads
from fastjax.host_memory import in_host_memory, shapes_of, to_host_memory
from fastjax.language_model import LanguageModel
from fastjax.language_model.variants import with_checkpointing
from fastjax.quantization import read_in_place
from fastjax.runs.messages import say
from fastjax.runs.model import run_shapes
from fastjax.training.config import TrainConfig
from fastjax.training.loss import Loss, loss_sums
from fastjax.training.optimizers import make_optimizer
from fastjax.training.placement import start_on_mesh, sums_apart
from fastjax.training.preferences import LOSSES
from fastjax.training.step import TrainState, init_state, make_train_step
from pallas_kernels import dispatch
from pallas_kernels.shard_gather import why_not_peers

#: Documents a row of preferences where the data are not known.
_DOCUMENTS = 8


#: An optimizer of a program's own, alone or with its schedule (updates made -> learning rate), for the metrics.
Optimizer = optax.GradientTransformation | tuple[optax.GradientTransformation, Callable[[Any], Any]]


def run_loss(config: TrainConfig) -> Loss:
    """The loss of a run: that of its preferences, or the cross-entropy with smoothing, noise and further losses.

    Args:
        config: the run.
    """
    training, preferences = config.training, config.preferences
    if preferences.loss is not None:
        return LOSSES[preferences.loss](**preferences.options)
    return functools.partial(
        loss_sums,
        label_smoothing_factor=training.label_smoothing_factor,
        z_loss_coef=training.z_loss_coef,
        neftune_noise_alpha=training.neftune_noise_alpha,
        router_aux_loss_coef=training.router_aux_loss_coef,
        router_z_loss_coef=training.router_z_loss_coef,
    )


class StepRecipe:
    """The inputs of a run's train step beside its model: training, its plan and its export make the same step."""

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        documents_per_row: int | None = None,
        longest: int | None = None,
    ):
        """Settle loss and optimizer.

        Args:
            config: the run.
            total_steps: of the run, for the schedule.
            loss: of a microbatch; None: the settings' own.
            optimizer: of the trained arrays; None: the settings' own.
            compiler_options: XLA's; None: nothing to set.
            documents_per_row: of preferences, `RunData.documents_per_row`; None: the data are not known, or have no
                such.
            longest: tokens of a row in the longest batch; None: the data are not known, and it is a whole one.
        """
        self._rates = None  # of all steps, where the optimizer's state does not hold them
        if optimizer is None:
            optimizer = make_optimizer(config.optimizer, total_steps, offload=config.training.offload_optimizer)
        if not isinstance(optimizer, optax.GradientTransformation):
            optimizer, schedule = optimizer
            self._rates = np.asarray([float(schedule(jnp.int32(step))) for step in range(total_steps)], np.float32)
        self.config, self.loss, self.compiler_options = config, loss or run_loss(config), compiler_options
        self._optimizer, self._documents = optimizer, documents_per_row or _DOCUMENTS
        self._longest = longest or config.model.max_seq_length

    def step(self, model: LanguageModel, mesh: Mesh | None = None) -> Callable[..., Any]:
        """The jitted train step (`training.step.make_train_step`).

        Args:
            model: the run's, or one of shapes.
            mesh: of several devices; None: there is one.
        """
        training = self.config.training
        return make_train_step(
            model.graphdef,
            self._optimizer,
            model.trainable_filter,
            loss=self.loss,
            accumulation_dtype=training.accumulation_dtype,
            loss_scale_window=training.loss_scale_window,
            mesh=mesh,
            gradient_exchange=self._exchange(mesh),
            sum_once=sums_once(model, mesh, self.config),
            quantize_from=training.quantization.start_step if training.quantization else 0,
            learning_rates=self._rates,
            compiler_options=self.compiler_options,
        )

    def state(self, model: LanguageModel, mesh: Mesh | None = None, replicas: int = 1) -> TrainState:
        """The state before the first step.

        Args:
            model: with the trained arrays' initial values.
            mesh: of several devices; None: there is one.
            replicas: parts in which the devices take a step's rows.
        """
        training = self.config.training
        scale = training.initial_loss_scale if model.dtype == jnp.float16 else None
        exchange, key = self._exchange(mesh), jax.random.key(training.seed)
        return init_state(model.trainable, self._optimizer, key, scale, gradient_exchange=exchange, replicas=replicas)

    def _exchange(self, mesh: Mesh | None) -> str:
        return "float32" if mesh is None else self.config.parallel.gradient_exchange  # of one device nothing travels

    def batch(self, replicas: int = 1) -> Batch:
        """The shapes of the longest batch.

        Args:
            replicas: parts in which the devices take a step's rows.
        """
        config, training = self.config, self.config.training
        rows = training.per_device_train_batch_size * replicas
        shape = (training.gradient_accumulation_steps, rows, self._longest)
        array: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        if config.preferences.loss is None:
            return Batch(array, array, array, array)
        documents = (*shape[:2], self._documents)
        fields = {"roles": jnp.int32} | ({"margins": jnp.float32} if config.preferences.scores else {})
        fields |= {"reference_log_probs": jnp.float32} if config.preferences.precompute_ref_log_probs else {}
        extra: Any = {name: jax.ShapeDtypeStruct(documents, dtype) for name, dtype in fields.items()}
        return Batch(array, array, array, array, extra)

    def start(self, model: LanguageModel, step: Any, mesh: Mesh | None, replicas: int) -> tuple[TrainState, Any]:
        """The state before the first step and the frozen weights, on a mesh each array made or put in its parts.

        Args:
            model: with the trained arrays' initial values.
            step: of `step`, on the mesh.
            mesh: of several devices; None: there is one.
            replicas: parts in which the devices take a step's rows.
        """
        if mesh is None:
            return self.state(model), model.frozen

        def begin(trainable: Any) -> TrainState:
            return self.state(model.replace(trainable=trainable), mesh, replicas)

        return start_on_mesh(begin, model.trainable, model.frozen, self.batch(replicas), step)


def sums_once(model: LanguageModel, mesh: Mesh | None, config: TrainConfig | None = None) -> bool:
    """Whether devices take gradients of their own rows and sum them once in a step.

    Args:
        model: what is trained.
        mesh: of several devices; None: there is one.
        config: the run; None: its loss is a sum over rows, and gradients travel in float32.
    """
    return mesh is not None and why_not_once(model, mesh, config) is None


def why_not_once(model: LanguageModel, mesh: Mesh, config: TrainConfig | None = None) -> str | None:
    """Why devices do not: a clause; None where they do.

    A device draws numbers of its own there: a model that drops anything would train as on no other mesh. Where `fsdp`
    splits weights it is the way of devices that read one another's shards of NF4 weights where they lie.

    Args:
        model: what is trained.
        mesh: of several devices.
        config: as for `sums_once`.
    """
    if model.lora is None:
        return "every weight is trained"
    if config is not None:
        if config.parallel.gradient_exchange != "float32":
            return f"gradients travel in {config.parallel.gradient_exchange}"
        if config.preferences.loss is not None:  # further losses are not all sums over rows
            return f"the loss is {config.preferences.loss}"
        if config.training.neftune_noise_alpha:
            return "noise is drawn for all rows"
    if model.lora.lora_dropout or model.config.attention_dropout or model.config.residual_dropout:
        return "dropout is drawn for all rows"
    if reason := next(sums_apart(model.trainable, model.frozen, model.config, mesh), None):
        return reason
    return None if mesh.shape["fsdp"] == 1 else _why_not_in_place(model, mesh)


def _why_not_in_place(model: LanguageModel, mesh: Mesh) -> str | None:
    policies = {model.execution.policy(stack.start) for stack in model.plan}
    if "none" in policies or any(map(offloads, policies)):
        return f"with {model.execution.remat} what is read is kept, or does not stay in memory until all have read it"
    if not any(read_in_place(model.frozen["layers"])):
        return "no weights are in NF4 with whole blocks in each row"
    return why_not_peers(_target(mesh))


def tell_gathers(model: LanguageModel, mesh: Mesh | None, config: TrainConfig, console: Console) -> None:
    """Say why a run's GPUs gather what `fsdp` splits, where with adapters they could read it in place.

    Args:
        model: what is trained.
        mesh: of several devices; None: there is one.
        config: the run.
        console: for it.
    """
    if mesh is None or mesh.shape["fsdp"] == 1 or model.lora is None or _target(mesh).platform != "cuda":
        return
    if why := why_not_once(model, mesh, config):
        say(console, f"parallel.fsdp: weights are gathered, and not read where they lie: {why}")


def _target(mesh: Mesh) -> dispatch.Target:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return dispatch.target()


def of_length(length: int, compiled: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The train step by the length of a batch: that of the longest is compiled, another is when it first comes.

    Args:
        length: tokens of a row in the longest.
        compiled: the step of these.
        other: `run_step`'s, of any length.
    """

    def step(state: Any, frozen: Any, batch: Batch) -> Any:
        return (compiled if batch.tokens.shape[-1] == length else other)(state, frozen, batch)

    return step


class RunShapes:
    """A run's train step by policy of rematerialisation, with shapes for arrays: no weight is read, no array is made.

    Attributes:
        config: the settings, with the compute dtype of the model.
        batch: shapes of a batch.
        partial: whether the first layers may get a policy of their own: a model in memory keeps its layers' stacks, and
            layers of one stack have one policy.
    """

    def __init__(self, recipe: StepRecipe, model: OpenModel | LanguageModel, replicas: int = 1):
        """Make the shapes, for the device that is traced for here.

        Args:
            recipe: of the step.
            model: the run's, in memory or not.
            replicas: parts in which the devices take a step's rows.
        """
        self._recipe, config = recipe, recipe.config
        if isinstance(model, LanguageModel):
            trainable, frozen = jax.tree.map(_shape, (model.trainable, model.frozen))
            self._opened, self._whole = None, model.replace(trainable=trainable, frozen=frozen)
        else:
            self._opened, self._whole = model, run_shapes(with_policy(config, "full"), model)
        settled = dataclasses.replace(config.model, dtype=str(self._whole.dtype))
        self.config = dataclasses.replace(config, model=settled)
        self.batch, self.partial, self._replicas = recipe.batch(replicas), self._opened is not None, replicas

    @property
    def model_bytes(self) -> int:
        """Bytes of the model's arrays, but of those in the host's memory."""
        return device_bytes((self._whole.trainable, self._whole.frozen))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the step's arrays that are on the device already: the frozen weights of a model in memory."""
        return 0 if self.partial else device_bytes(self._whole.frozen)

    def model(self, policy: str) -> LanguageModel:
        """The model; where it is not in memory, "NAME:k" may have stacks of its own."""
        if self._opened is not None and ":" in policy:
            return run_shapes(with_policy(self.config, policy), self._opened)
        return with_checkpointing(self._whole, policy)

    def step(self, policy: str, mesh: Mesh | None = None) -> tuple[Any, tuple[Any, Any, Batch]]:
        """The jitted step, and the shapes of its state, frozen weights and batch.

        Args:
            policy: of rematerialisation.
            mesh: of several devices; None: there is one.

        Raises:
            ConfigError: the policy does not suit the model.
        """
        model = self.model(policy)

        def begin(trainable: Any) -> TrainState:
            return self._recipe.state(model.replace(trainable=trainable), mesh, self._replicas)

        return self._recipe.step(model, mesh), (shapes_of(begin, model.trainable), model.frozen, self.batch)


def _shape(array: Any) -> Any:
    """Shape, dtype and memory of an array."""
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return to_host_memory(shape) if in_host_memory(array) else shape


def with_policy(config: TrainConfig, policy: str) -> TrainConfig:
    """The settings with a policy of rematerialisation.

    Args:
        config: the run.
        policy: its name.
    """
    return dataclasses.replace(config, model=dataclasses.replace(config.model, use_gradient_checkpointing=policy))


def device_bytes(arrays: Any, shardings: Any = None) -> int:
    """Bytes of arrays on one device, but of those in the host's memory.

    Args:
        arrays: a tree of arrays or of their shapes.
        shardings: of each; None: the device has them whole.
    """
    leaves = jax.tree.leaves(arrays)
    each = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    parts = [
        (leaf.dtype.itemsize, leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(leaves, each, strict=True)
        if not in_host_memory(leaf)
    ]
    return sum(size * math.prod(shape) for size, shape in parts)
