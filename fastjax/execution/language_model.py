"""A language model as one value: its definition, its trained and its frozen arrays, and its origin.

`model.graphdef`, `model.trainable` and `model.frozen` go into `training.step.make_train_step` or any function of your
own.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from convert.adapters import AdapterConfig
from convert.card import Training
from convert.model.config import ModelConfig
from convert.quantization_aware import QuantizationAware
from convert.trained_over import TrainedOver
from fastjax.errors import ConfigError
from fastjax.execution.execution import Execution
from fastjax.execution.options import LoadOptions
from fastjax.lora.params import LoraParam, SavedParam
from fastjax.models.decoder import Decoder
from fastjax.models.layout import LayerStack
from fastjax.models.precision import DTYPES, Precision
from fastjax.quantization.weight import Weight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A model, or a handle of one (`language_model.handle`), which functions give back as they get it.
Model = TypeVar("Model", bound="LanguageModel")


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel:
    """A model and its origin, immutable; functions of it return new ones.

    Attributes:
        config: the decoder's.
        hf_config: the checkpoint's config.json.
        folder: the checkpoint; None for random weights.
        graphdef: static half of the decoder: `nnx.merge(graphdef, trainable, frozen)` is the module.
        trainable: the trained arrays, a pure dict.
        frozen: the others, a pure dict.
        plan: arrangement of the layers.
        lora: the adapter's settings, or None.
        options: that it was loaded with: dtypes, modules and length as they came out, and 4 bits where some are in NF4.
        precision: dtypes of computation and parameters.
        execution: how it is executed.
        tokenizer: the folder's, with the new tokens, or None.
        new_token_ids: tokens added to the checkpoint's vocabulary.
        source: name and commit of a checkpoint from the hub; None for a folder.
        base: the checkpoint as its matrices were read (`convert.trained_over`), noted beside an adapter; or None.
        quantization_aware: the quantisation that it is trained for (`models.quantized`), or None.
        training: the run that made the trained arrays, for the model card, or None.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    folder: Path | None
    graphdef: nnx.GraphDef
    trainable: Any
    frozen: Any
    plan: tuple[LayerStack, ...]
    lora: AdapterConfig | None
    options: LoadOptions
    precision: Precision
    execution: Execution
    tokenizer: "PreTrainedTokenizerBase | None"
    new_token_ids: tuple[int, ...] = ()
    source: tuple[str, str] | None = None
    base: TrainedOver | None = None
    quantization_aware: QuantizationAware | None = None
    training: Training | None = None

    @property
    def full_finetuning(self) -> bool:
        """Whether every weight is trained."""
        return self.options.full_finetuning

    @property
    def max_seq_length(self) -> int:
        """The most tokens in a row."""
        assert self.options.max_seq_length is not None, "it was settled as the model was loaded"
        return self.options.max_seq_length

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.precision.dtype

    @property
    def trainable_filter(self) -> Any:
        """The nnx filter that separates trainable from frozen variables."""
        return nnx.Param if self.full_finetuning else nnx.Any(LoraParam, SavedParam)

    @property
    def folder_dtype(self) -> str:
        """The dtype of the folder's weights, and of those that are trained whole as they are saved."""
        named = str(self.hf_config.get("dtype", self.hf_config.get("torch_dtype")))
        return named if named in DTYPES else "float32"

    def __repr__(self) -> str:
        return _described(self)

    def module(self) -> Decoder:
        """The decoder itself, for inspection or for code that calls modules."""
        return nnx.merge(self.graphdef, self.trainable, self.frozen)

    def replace(self: Model, **changes: Any) -> Model:
        """Make a model with other fields, for instance `trainable` after training, of which no run is known then."""
        changes = ({"training": None} if "trainable" in changes else {}) | changes
        return dataclasses.replace(self, **changes)

    def with_options(self: Model, **changes: Any) -> Model:
        """Make a model with other options, of those that change nothing that is in memory already."""
        return self.replace(options=dataclasses.replace(self.options, **changes))

    def executed(self: Model, execution: Execution) -> Model:
        """Execute the arrays in another way."""
        module = self.module()
        module.executor = execution
        return self.of_module(module).replace(execution=execution)

    def of_module(self: Model, module: Decoder) -> Model:
        """Put the arrays in the graph of a module that was changed."""
        return self.replace(graphdef=nnx.split(module, self.trainable_filter, ...)[0])

    def num_parameters(self) -> tuple[int, int]:
        """(trained, all) parameters; a 4-bit weight counts its elements, tied embeddings count once."""
        trained = sum(leaf.size for leaf in jax.tree.leaves(self.trainable))
        base = sum(math.prod(spec.shape) for spec in self.config.specs)
        return trained, base if self.full_finetuning else base + trained


def on_device(model: Model, device: Any) -> Model:
    """A model whose arrays lie on one device; those that it has already are not copied.

    Args:
        model: any, its arrays in this process.
        device: one of this process.
    """

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.devices() == {device}:
            return leaf
        here = [shard.data for shard in leaf.addressable_shards if shard.device == device]
        return here[0] if leaf.is_fully_replicated and here else jax.device_put(leaf, device)

    return model.replace(trainable=jax.tree.map(own, model.trainable), frozen=jax.tree.map(own, model.frozen))


def check_logits(model: LanguageModel, what: str) -> None:
    """Refuse a reward model where logits are needed.

    Args:
        model: any.
        what: needs them.

    Raises:
        ConfigError: it has a score in their place.
    """
    if model.config.scored:
        raise ConfigError(f"{what}: expected a model with logits, got a reward model; its scores are model.rewards(…)")


def check_model(model: Any) -> None:
    """Refuse an object that is no model, such as the pair that `FastLanguageModel.from_pretrained` returns.

    Args:
        model: any object.

    Raises:
        ConfigError: it is no `LanguageModel`.
    """
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"model: expected one that FastLanguageModel has loaded, got a {type(model).__name__}; load it by "
            "model, tokenizer = FastLanguageModel.from_pretrained(…)"
        )


def _described(model: LanguageModel) -> str:
    """The model in a line: family, size, what is trained, formats, dtype, rows, device."""
    config, leaves = model.config, jax.tree.leaves(model.frozen, is_leaf=lambda leaf: isinstance(leaf, Weight))
    parts = [f"{config.model_type}, {config.num_hidden_layers} layers of width {config.hidden_size}"]
    trained, every = model.num_parameters() if model.trainable is not None else (0, 0)
    if every:
        kind = "every weight" if model.full_finetuning else "nothing" if model.lora is None else f"r={model.lora.r}"
        parts.append(
            f"{every:,} parameters, trained: {kind}" + (f" ({trained:,}, {trained / every:.2%})" if trained else "")
        )
    formats = sorted({type(leaf).__name__.removesuffix("Weight") for leaf in leaves if isinstance(leaf, Weight)})
    parts.append(" and ".join([*formats, str(model.dtype)]))
    parts.append(f"rows of {model.max_seq_length:,}")
    arrays = jax.tree.leaves((model.trainable, model.frozen))
    devices = {device for array in arrays if isinstance(array, jax.Array) for device in array.devices()}
    if devices:
        first = min(devices, key=lambda device: device.id)
        parts.append(first.device_kind if len(devices) == 1 else f"{len(devices)} × {first.device_kind}")
    return f"LanguageModel({'; '.join(parts)})"
