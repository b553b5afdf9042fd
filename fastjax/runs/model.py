"""A run's model as it begins: base and adapter from the open folders, and the state before the first step."""

import dataclasses
from collections.abc import Iterator

from rich.console import Console

from convert.model.spec import QUANTIZED
from fastjax.errors import ConfigError
from fastjax.execution.opening import OpenModel
from fastjax.execution.options import LoadOptions
from fastjax.language_model import LanguageModel, variants
from fastjax.language_model.adapters import attach_opened, with_fresh_adapter
from fastjax.language_model.host import with_host_embedding, with_host_layers
from fastjax.language_model.loading import load_opened, shapes_of, zeros_of
from fastjax.language_model.rewards import with_score_head
from fastjax.parallel import MeshShape
from fastjax.runs.datasets import RunData
from fastjax.runs.mesh import open_mesh
from fastjax.runs.messages import say
from fastjax.training.config import TrainConfig
from fastjax.training.device import device_use

_ONE_DEVICE = MeshShape()


def load_model(config: TrainConfig, opened: OpenModel, shape: MeshShape = _ONE_DEVICE) -> LanguageModel:
    """The model of a run as it begins, with its adapter.

    Args:
        config: the run.
        opened: its folders.
        shape: of the mesh, whose devices get their parts of the weights.
    """
    model = with_adapter(load_opened(opened, config.model, open_mesh(shape)), config, opened)
    model = with_host_embedding(model) if config.model.offload_embedding else model
    return model.replace(tokenizer=opened.tokenizer)


def tell_model(model: LanguageModel, console: Console, shape: MeshShape = _ONE_DEVICE) -> None:
    """Say how large a run's model is, where, and how it is executed.

    Args:
        model: the model.
        console: for it.
        shape: of the mesh.
    """
    trained, total = model.num_parameters()
    device = device_use(shape)
    say(
        console,
        f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%}), on {device.used}, {model.dtype}",
    )
    say(console, f"execution: {model.execution}{''.join(_beside(model.options))}")
    if device.idle is not None:
        say(console, f"idle: {device.idle}")


def _beside(options: LoadOptions) -> Iterator[str]:
    """The parts of an execution that the arrays know, by their places and products, and its record does not."""
    if options.base_compute is not None:
        yield f", products of frozen matrices in {options.base_compute.replace('_backward', ' in the backward pass')}"
    for name, given in (("embedding", options.offload_embedding), ("layers", options.offload_layers)):
        if given:
            yield f", {name} in the host's memory"


def run_shapes(config: TrainConfig, opened: OpenModel) -> LanguageModel:
    """The model of a run as it begins, with shapes for arrays; dtypes are those of the device that is traced for.

    Args:
        config: the run.
        opened: its folders.
    """
    alike = config
    if config.lora.adapter is None:  # all starts have one shape, and an orthogonal one is drawn by NumPy
        alike = dataclasses.replace(config, lora=dataclasses.replace(config.lora, init_lora_weights=True))
    model = shapes_of(lambda: with_adapter(zeros_of(opened, config.model), alike, opened))
    model = with_host_embedding(model) if config.model.offload_embedding else model
    return with_start(with_host_layers(model) if config.model.offload_layers else model, config)


def with_start(model: LanguageModel, config: TrainConfig) -> LanguageModel:
    """A run's model as it begins, which holds its start where that is the reference.

    Args:
        model: with the trained arrays' initial values.
        config: the run.
    """
    return variants.with_start(model, model.trainable) if config.holds_start else model


def with_adapter(model: LanguageModel, config: TrainConfig, opened: OpenModel) -> LanguageModel:
    """A run's base model with its score, the adapter that it begins with, fresh or from a folder, and fake quantisers.

    Args:
        model: the base.
        config: the run.
        opened: its folders.
    """
    model = scored(model, config)
    if opened.adapter is not None:
        return _quantized(attach_opened(model, opened.adapter, config.lora.lora_dropout), config, opened)
    if config.model.full_finetuning:
        return _quantized(model, config, opened)
    return _quantized(with_fresh_adapter(model, config.lora), config, opened)


def scored(model: LanguageModel, config: TrainConfig) -> LanguageModel:
    """A run's base model with a score in the place of logits, where its loss takes one.

    Args:
        model: the base.
        config: the run.
    """
    return with_score_head(model, config.lora.random_state) if config.preferences.scores else model


def _quantized(model: LanguageModel, config: TrainConfig, opened: OpenModel) -> LanguageModel:
    """With the fake quantisers of `training.qat`."""
    qat, weights = config.training.quantization, opened.weights
    if qat is None:
        return model
    if weights is not None and not model.full_finetuning:
        dtypes = {weights.decoded_dtype(path).name for path, spec in weights.specs.items() if spec.kind in QUANTIZED}
        if dtypes != {model.folder_dtype}:  # a merge rounds to what the tensors have
            raise ConfigError(
                f"training.qat: expected a base whose matrices are in {model.folder_dtype}, as config.json says, got "
                f"{' and '.join(sorted(dtypes))}"
            )
    return variants.with_fake_quantization(model, qat.weights, qat.activations, qat.modules_to_not_quantize)


def check_vocabulary(model: LanguageModel, data: RunData) -> None:
    """Refuse data with tokens that the model has no rows for.

    Args:
        model: the run's.
        data: the run's.

    Raises:
        ConfigError: there are such.
    """
    if data.max_token_id >= model.config.vocab_size:
        raise ConfigError(
            f"model.model_name: expected an embedding for every token of the data, got {model.config.vocab_size} "
            f"rows for token {data.max_token_id}; the tokenizer has more tokens than the model: name them in "
            "model.new_tokens"
        )
