"""A case's model with random weights, drawn on the device layer by layer, and its rows."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from convert.model.config import ModelConfig
from fastjax.bench.attention.cases import packed, segment_ids
from fastjax.bench.step.case import StepCase
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.model import LanguageModel
from fastjax.lora.sites import projections
from fastjax.training.config.qat import NAMED
from fastjax.training.step import TrainState, init_state

#: Documents of each row.
Documents = Sequence[Sequence[int]]
#: Tokens that a row padded to its batch's longest document is a multiple of, as it is in training.
_STEP = 64
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def build_model(case: StepCase, mesh: Mesh | None = None) -> LanguageModel:
    """The model with what the case trains.

    Args:
        case: the settings.
        mesh: of the devices that get parts of the base's weights, layer by layer; None: one has all.

    Raises:
        ConfigError: settings that the model does not take.
    """
    model = FastLanguageModel.from_config(
        case.hf_config,
        max_seq_length=case.seq,
        dtype=case.dtype,
        load_in_4bit=case.weights != "16bit",
        full_finetuning=case.full,
        use_gradient_checkpointing=case.checkpointing,
        layer_loop=case.layer_loop,  # pyright: ignore[reportArgumentType]
        param_dtype=case.param_dtype,
        mlp_chunk=case.mlp_chunk or "auto",
        mesh=mesh,
        base_compute=case.base_compute,  # pyright: ignore[reportArgumentType]
    )
    if case.full:
        return placed(_quantized(model, case), case)
    with_experts = case.adapters == "all" and model.config.moe is not None
    adapted = FastLanguageModel.get_peft_model(
        model,
        r=case.rank,
        target_modules=adapted_modules(model.config, case.adapters),
        target_parameters=_EXPERTS if with_experts else None,
        random_state=case.seed,
    )
    return placed(_quantized(adapted, case), case)


def placed(model: LanguageModel, case: StepCase) -> LanguageModel:
    """The model with what the case holds in the host's memory there.

    Args:
        model: all of it on the device.
        case: the settings.

    Raises:
        ConfigError: it may not lie there.
    """
    model = model.with_host_embedding() if case.offload_embedding else model
    return model.with_host_layers() if case.offload_layers else model


def _quantized(model: LanguageModel, case: StepCase) -> LanguageModel:
    """With the case's fake quantisers, as over a folder in the dtype of the computation."""
    if case.qat is None:
        return model
    qat, hf_config = NAMED[case.qat], {**model.hf_config, "dtype": str(model.dtype)}
    return model.replace(hf_config=hf_config).with_fake_quantization(qat.weights, qat.activations)


def adapted_modules(config: ModelConfig, adapters: str) -> list[str]:
    """The projections that get an adapter, by name, without a mixture's experts.

    Args:
        config: the model's.
        adapters: "all" or "attention".
    """
    inside = {spec.path.part for spec in config.specs if adapters == "all" or spec.path.block == "self_attn"}
    return [name for name in projections(config) if name in inside]


def first_state(model: LanguageModel, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; under float16 with a loss scale that no gradient of such a model exceeds.

    Args:
        model: with the trained arrays.
        optimizer: of the step.
    """
    return init_state(model.trainable, optimizer, jax.random.key(0), 2.0**12 if model.dtype == jnp.float16 else None)


def filled(case: StepCase) -> tuple[StepCase, Documents | None]:
    """The case with the length that its rows have, and their documents; None: every row is one.

    Of documents that are padded, those of one batch by chance: the batch whose longest document is the median of all
    batches'. Rows as long as that document end at a whole `_STEP`.

    Args:
        case: the settings.

    Raises:
        ConfigError: there are not enough documents.
    """
    if case.lengths is None:
        return case, None
    if case.fill == "packed":
        return case, packed(case.lengths, case.step_rows, case.seq)
    size = case.step_rows
    if len(case.lengths) < size:
        raise ConfigError(f"--lengths: expected a document for each of {size} rows, got {len(case.lengths)}")
    count = len(case.lengths) // size
    shuffled = np.random.default_rng(0).permutation(np.minimum(case.lengths, case.seq))[: count * size]
    batches = sorted(shuffled.reshape(count, size).tolist(), key=max)
    rows = [(length,) for length in batches[count // 2]]
    longest = -(-max(batches[count // 2]) // _STEP) * _STEP
    return dataclasses.replace(case, seq=min(longest, case.seq)) if case.fill == "longest" else case, rows


def make_batch(case: StepCase, vocab_size: int, documents: Documents | None) -> Batch:
    """Random rows of one document or several, of all devices, the last place of each without a target.

    Args:
        case: the settings.
        vocab_size: number of tokens.
        documents: of `filled`.
    """
    shape = (1, case.step_rows, case.seq)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    targets = np.full(shape, -100, np.int32)
    targets[..., :-1] = tokens[..., 1:]
    positions = np.array(np.broadcast_to(np.arange(case.seq, dtype=np.int32), shape))
    if documents is None:
        return Batch(tokens, targets, None, positions)  # pyright: ignore[reportArgumentType]  # None: whole rows
    for row, lengths in enumerate(documents):
        ends = np.cumsum(lengths)
        positions[0, row, : ends[-1]] -= np.repeat(ends - lengths, lengths)
        targets[0, row, ends - 1] = -100
        targets[0, row, ends[-1] :] = -100
    return Batch(tokens, targets, segment_ids(documents, case.seq)[None], positions)
