"""The mesh of a run: the sizes of its settings, with "auto" settled by the devices and by the model's memory."""

import math
from collections.abc import Callable
from typing import Any

from jax import device_count, process_count
from jax.sharding import Mesh

from fastjax.errors import ConfigError
from fastjax.execution.execution import Execution
from fastjax.execution.opening import OpenModel
from fastjax.language_model import LanguageModel
from fastjax.parallel import MeshShape, make_mesh
from fastjax.parallel.checks import check_exchange, check_mesh
from fastjax.runs.opening import within
from fastjax.training.config import ParallelSection, TrainConfig


def run_meshes(config: TrainConfig) -> tuple[MeshShape, ...]:
    """`mesh_shapes` for the devices there are."""
    return mesh_shapes(config.parallel, device_count(), process_count())


def suited_meshes(config: TrainConfig, model: LanguageModel, tell: Callable[[str], None]) -> tuple[MeshShape, ...]:
    """`mesh_shapes` for the devices there are; one device, and why, where the settings ask for none and do not suit.

    Args:
        config: the run.
        model: its model, in memory.
        tell: takes the reason.

    Raises:
        ConfigError: sizes that the settings name and the model does not suit.
    """
    shapes = run_meshes(config)
    try:
        check_model(config, model, shapes)
    except ConfigError as error:
        if config.parallel != ParallelSection():
            raise
        tell(f"one of {device_count()} devices: {error}")
        shapes = (MeshShape(),)
    return shapes


def check_model(config: TrainConfig, opened: OpenModel | LanguageModel, shapes: tuple[MeshShape, ...]) -> None:
    """Refuse meshes that a run's model does not suit.

    Args:
        config: the run.
        opened: its model, in memory or not.
        shapes: of the meshes.

    Raises:
        ConfigError: the setting, what it may be, and what it is.
    """
    for shape in shapes:
        adapters = {"lora_dropout": config.lora.lora_dropout, "use_dora": config.lora.use_dora}
        check_mesh(opened.config, shape, **adapters)
        check_exchange(opened.config, shape, config.parallel.gradient_exchange)
        length, parts = config.model.max_seq_length, shape.token_parts
        if length % parts:
            where = f"context {shape.context} × tensor {shape.tensor}"
            raise ConfigError(f"model.max_seq_length: expected a multiple of {parts} with {where}, got {length}")
        if shape.tensor > 1 and config.training.qat is not None:
            raise ConfigError(f"parallel.tensor: expected 1 with training.qat, got {shape.tensor}")
        if shape.tensor > 1:
            with within("model", config.model):
                Execution.of(config.model, opened.config).without_chunks(f"tensor {shape.tensor}")
        sections = {
            "model.offload_embedding": config.model.offload_embedding,
            "model.offload_layers": config.model.offload_layers,
            "training.offload_optimizer": config.training.offload_optimizer,
        }
        if shape.size > 1 and config.output.sample_answers:
            raise ConfigError(
                f"output.sample_answers: expected 0 on {shape.size} devices, got {config.output.sample_answers}; "
                "fastjax generate --adapter answers afterwards"
            )
        for name, given in sections.items():
            if given and shape.size > 1:
                raise ConfigError(
                    f"{name}: expected false on {shape.size} devices, got true; parallel.data: 1 with parallel.fsdp: 1 "
                    "takes one"
                )


def mesh_shapes(section: ParallelSection, devices: int, processes: int = 1) -> tuple[MeshShape, ...]:
    """The devices of a run along each axis: of the shapes that the settings leave open, the fastest first.

    Args:
        section: of the settings.
        devices: their number, of all processes.
        processes: each has devices, so that of several all are used.

    Returns:
        The shapes; a step has as many rows on each.

    Raises:
        ConfigError: more devices than there are, or fewer than the processes have.
    """
    given = section.sizes
    known = math.prod(given.values())
    left = devices // known
    choices = 1 if left == 1 or section.gradient_exchange != "float32" else 2
    free = [name for name in ("data", "fsdp") if name not in given][:choices]
    shapes = tuple(MeshShape(**given, **{name: left}) for name in free) or (MeshShape(**given),)
    if not left or (processes > 1 and shapes[0].size != devices):
        asked = " × ".join(f"{name} {size}" for name, size in given.items())
        which = f"at most {devices}" if processes == 1 else f"{devices}, all devices of {processes} processes"
        raise ConfigError(f"parallel: expected a product of {which}, got {asked}")
    return shapes


def open_mesh(shape: MeshShape, devices: list[Any] | None = None) -> Mesh | None:
    """The mesh of a run's devices; None: there is one.

    Args:
        shape: its axes.
        devices: the first of these; None: of JAX's.
    """
    return None if shape.size == 1 else make_mesh(*shape, devices=devices)
