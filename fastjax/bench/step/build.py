"""A case's devices, its model with random weights, drawn on them layer by layer, and its rows."""

import re

import numpy as np
from jax.sharding import Mesh

from convert.model.config import ModelConfig
from fastjax.bench.documents import Documents, packed, segment_ids
from fastjax.bench.step.case import StepCase
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel, LanguageModel
from fastjax.language_model.host import with_host_embedding, with_host_layers
from fastjax.language_model.loading import random_model
from fastjax.language_model.variants import with_fake_quantization
from fastjax.lora.sites import projections
from fastjax.parallel import MeshShape
from fastjax.parallel.checks import check_mesh, check_rows
from fastjax.runs.mesh import open_mesh
from fastjax.training.config.qat import NAMED

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def build_model(case: StepCase, mesh: Mesh | None = None) -> LanguageModel:
    """The model with what the case trains.

    Args:
        case: the settings.
        mesh: of the devices that get parts of the base's weights, layer by layer; None: one has all.

    Raises:
        ConfigError: settings that the model does not take.
    """
    model: LanguageModel = random_model(case.hf_config, case.options, mesh=mesh)
    if case.method != "full":
        model = with_adapters(model, case.rank, case.adapters, case.seed)
    if case.qat is not None:
        qat, hf_config = NAMED[case.qat], {**model.hf_config, "dtype": str(model.dtype)}
        model = with_fake_quantization(model.replace(hf_config=hf_config), qat.weights, qat.activations)
    model = with_host_embedding(model) if case.offload_embedding else model
    return with_host_layers(model) if case.offload_layers else model


def with_adapters(model: LanguageModel, rank: int, adapters: str, seed: int) -> LanguageModel:
    """The model with fresh adapters.

    Args:
        model: without any.
        rank: theirs.
        adapters: "all", a mixture's experts included, or "attention".
        seed: of their first values.
    """
    with_experts = adapters == "all" and model.config.moe is not None
    return FastLanguageModel.get_peft_model(
        model,
        r=rank,
        target_modules=adapted_modules(model.config, adapters),
        target_parameters=_EXPERTS if with_experts else None,
        random_state=seed,
    )


def adapted_modules(config: ModelConfig, adapters: str) -> list[str]:
    """The projections that get an adapter, by name, without a mixture's experts.

    Args:
        config: the model's.
        adapters: "all" or "attention".
    """
    inside = {spec.path.part for spec in config.specs if adapters == "all" or spec.path.block == "self_attn"}
    return [name for name in projections(config) if name in inside]


def documents_of(case: StepCase) -> Documents:
    """The documents of each row, of all devices: one, or those of the case's lengths packed.

    Raises:
        ConfigError: there are not enough documents.
    """
    rows, length = case.step_rows, case.seq
    return ((length,),) * rows if case.lengths is None else packed(case.lengths, rows, length)


def make_batch(case: StepCase, vocab_size: int) -> Batch:
    """Random rows of the case's documents, the last place of each without a target.

    Args:
        case: the settings.
        vocab_size: number of tokens.
    """
    documents, shape = documents_of(case), (1, case.step_rows, case.seq)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    targets = np.full(shape, -100, np.int32)
    targets[..., :-1] = tokens[..., 1:]
    positions = np.array(np.broadcast_to(np.arange(case.seq, dtype=np.int32), shape))
    for row, lengths in enumerate(documents):
        ends = np.cumsum(lengths)
        positions[0, row, : ends[-1]] -= np.repeat(ends - lengths, lengths)
        targets[0, row, ends - 1] = -100
        targets[0, row, ends[-1] :] = -100
    segments = None if case.lengths is None else segment_ids(documents, case.seq)[None]  # None: whole rows
    return Batch(tokens, targets, segments, positions)  # pyright: ignore[reportArgumentType]


def read_mesh(text: str) -> MeshShape | None:
    """A mesh from the command line; None: one device.

    Args:
        text: "one", or sizes of axes as "fsdp=2,tensor=2".

    Raises:
        ConfigError: it is neither.
    """
    if text == "one":
        return None
    axes = [re.fullmatch(r"(\w+)=([1-9]\d{0,3})", part) for part in text.split(",")]
    sizes = {found[1]: int(found[2]) for found in axes if found and found[1] in MeshShape._fields}
    if len(sizes) != len(axes):
        known = ", ".join(MeshShape._fields)
        raise ConfigError(f"bench step: --mesh: expected one, or sizes of {known} such as fsdp=2,tensor=2, got {text}")
    shape = MeshShape(**sizes)
    return None if shape.size == 1 else shape


def open_case_mesh(case: StepCase) -> Mesh | None:
    """The mesh of a case's devices; None: there is one.

    Args:
        case: the settings.

    Raises:
        ConfigError: there are fewer devices, or the case does not suit them.
    """
    shape = case.mesh
    if shape is None:
        return None
    try:
        mesh = open_mesh(shape)
        check_mesh(case.config, shape)
        check_rows(case.step_rows, case.seq, shape)
    except ConfigError as error:
        raise ConfigError(f"bench step: --mesh {shape}: {error}") from error
    return mesh
