"""A language model as one value: its definition, its trained and its frozen arrays, and its origin.

`model.graphdef`, `model.trainable` and `model.frozen` go into `training.step.make_train_step` or any function of your
own.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from convert.adapters import AdapterConfig
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING
from convert.trained_over import TrainedOver
from fastjax.errors import ConfigError
from fastjax.execution.execution import Execution
from fastjax.execution.streamed import is_streamed
from fastjax.host_memory import in_host_memory, to_device_memory, to_host_memory
from fastjax.language_model import saving
from fastjax.language_model.rewards import rewards_of, with_score
from fastjax.language_model.use import described, logits_of
from fastjax.lora.params import LoraParam, SavedParam
from fastjax.lora.sites import adapter_sites
from fastjax.models.decoder import Decoder
from fastjax.models.layout import LayerStack
from fastjax.models.leaves import START
from fastjax.models.precision import DTYPES, Precision
from fastjax.models.quantized import QuantizationAware, quantize_layers
from fastjax.models.start import hold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_host_embedding(config: ModelConfig, adapter: AdapterConfig | None) -> None:
    """Check that the table of embeddings may lie in the host's memory.

    Args:
        config: the model's.
        adapter: its adapter, or None.

    Raises:
        ConfigError: it may not.
    """
    if config.tie_word_embeddings:
        raise ConfigError("offload_embedding: expected false with tied embeddings, got true; the head needs the table")
    if adapter is not None and any(site.path.part == EMBEDDING for site in adapter_sites(adapter, config)):
        raise ConfigError("offload_embedding: expected false with an adapter on the embedding, got true")


def check_host_layers(plan: Sequence[LayerStack], full_finetuning: bool) -> None:
    """Check that the layers' matrices may lie in the host's memory.

    Args:
        plan: arrangement of the layers.
        full_finetuning: whether every weight is trained.

    Raises:
        ConfigError: they may not.
    """
    if full_finetuning:
        raise ConfigError("offload_layers: expected false where every weight is trained, got true")
    if all(stack.count == 1 for stack in plan):
        raise ConfigError(
            "offload_layers: expected false where no layers are scanned, got true; set layer_loop: scan, on a model "
            "with layers of one kind"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel:
    """A model and its origin; immutable, its methods return new ones.

    Attributes:
        config: the decoder's.
        hf_config: the checkpoint's config.json.
        folder: the checkpoint; None for random weights.
        graphdef: static half of the decoder: `nnx.merge(graphdef, trainable, frozen)` is the module.
        trainable: the trained arrays, a pure dict.
        frozen: the others, a pure dict.
        plan: arrangement of the layers.
        lora: the adapter's settings, or None.
        full_finetuning: whether every weight is trained.
        precision: dtypes of computation and parameters.
        execution: how it is executed.
        max_seq_length: most tokens in a row.
        tokenizer: the folder's, with the new tokens, or None.
        new_token_ids: tokens added to the checkpoint's vocabulary.
        source: name and commit of a checkpoint from the hub; None for a folder.
        base: the checkpoint as its matrices were read (`convert.trained_over`), noted beside an adapter; or None.
        quantization_aware: the quantisation that it is trained for (`models.quantized`), or None.
        remat_auto: whether a trainer chooses another policy, by the device's memory.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    folder: Path | None
    graphdef: nnx.GraphDef
    trainable: Any
    frozen: Any
    plan: tuple[LayerStack, ...]
    lora: AdapterConfig | None
    full_finetuning: bool
    precision: Precision
    execution: Execution
    max_seq_length: int
    tokenizer: "PreTrainedTokenizerBase | None"
    new_token_ids: tuple[int, ...] = ()
    source: tuple[str, str] | None = None
    base: TrainedOver | None = None
    quantization_aware: QuantizationAware | None = None
    remat_auto: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.precision.dtype

    @property
    def trainable_filter(self) -> Any:
        """The nnx filter that separates trainable from frozen variables."""
        return nnx.Param if self.full_finetuning else nnx.Any(LoraParam, SavedParam)

    def __repr__(self) -> str:
        return described(self)

    def logits(
        self,
        tokens: Int[Array, "B S"] | Any,
        *,
        segment_ids: Int[Array, "B S"] | Any = None,
        positions: Int[Array, "B S"] | Any = None,
        adapters: bool = True,
    ) -> Float[Array, "B S V"]:
        """The logits of each place's next token, without dropout; compiled once a shape.

        Args:
            tokens: ids, [B, S], in any form that NumPy takes.
            segment_ids: document of each token, 0 for padding; None: every row is one document.
            positions: of each token in its document; needed with `segment_ids`.
            adapters: False: the base model's.

        Returns:
            float32.

        Raises:
            ConfigError: shapes or ids that do not fit.
        """
        return logits_of(self, tokens, segment_ids, positions, adapters)

    def with_score_head(self, random_state: int = 3407) -> "LanguageModel":
        """The same model with one score a text in the place of logits: a reward model, as transformers'
        `AutoModelForSequenceClassification` with one label. A model that has a score keeps it.

        Args:
            random_state: seed of the score's start, normal with the config's initializer_range.

        Raises:
            ConfigError: a model with an adapter (make the adapter after it), or of a family without such a class.
        """
        return with_score(self, random_state)

    def rewards(self, examples: Sequence[Any], *, batch_size: int = 8) -> Float32[np.ndarray, " N"]:
        """The scores of texts, each read at its last token, of a reward model.

        Args:
            examples: conversations as lists of messages, texts, or rows as of a data set ({"prompt": …,
                "completion": …}); each is encoded as in training, with the end of the turn or text.
            batch_size: rows of several examples that go through the model together.

        Raises:
            ConfigError: a model without score or tokenizer.
            DataError: an example that cannot be read, ends with no answer, or is longer than max_seq_length.
        """
        return rewards_of(self, examples, batch_size)

    def generate(self, prompts: Sequence[Any], **options: Any) -> list[str]:
        """Answers to prompts; arguments and errors are those of `generation.text.answer`.

        Args:
            prompts: user messages, or conversations as lists of messages; with `chat=False` beginnings of texts.
            options: chat, max_new_tokens, temperature, top_k, top_p, seed, batch_size, special_tokens.
        """
        from fastjax.generation.text import answer  # which imports this module

        return answer(self, prompts, **options)

    def module(self) -> Decoder:
        """The decoder itself, for inspection or for code that calls modules."""
        return nnx.merge(self.graphdef, self.trainable, self.frozen)

    def replace(self, **changes: Any) -> "LanguageModel":
        """The same model with other fields, for instance `trainable` after training."""
        return dataclasses.replace(self, **changes)

    def with_checkpointing(self, remat: str) -> "LanguageModel":
        """The same arrays with another rematerialisation policy, one of `execution.policies.POLICIES`."""
        if remat == self.execution.remat:
            return self.replace(remat_auto=False)
        return self._executed(self.module(), dataclasses.replace(self.execution, remat=remat)).replace(remat_auto=False)

    def _executed(self, module: Decoder, execution: Execution) -> "LanguageModel":
        """The same arrays in another module's graph, executed in another way."""
        module.executor = execution
        return self.replace(graphdef=nnx.split(module, self.trainable_filter, ...)[0], execution=execution)

    def with_start(self, arrays: Any) -> "LanguageModel":
        """The same model that holds arrays as those it begins with: the reference of a loss of preferences.

        Args:
            arrays: of the tree of `trainable`; None: it holds none any more.
        """
        if arrays is None and START not in self.frozen:
            return self
        module = self.module()
        hold(module, arrays)
        graphdef, _, frozen = nnx.split(module, self.trainable_filter, ...)
        return self.replace(graphdef=graphdef, frozen=nnx.to_pure_dict(frozen))

    @property
    def folder_dtype(self) -> str:
        """The dtype of the folder's weights, and of those that are trained whole as they are saved."""
        named = str(self.hf_config.get("dtype", self.hf_config.get("torch_dtype")))
        return named if named in DTYPES else "float32"

    def with_fake_quantization(
        self, weights: str, activations: str | None = None, modules_to_not_quantize: Sequence[str] = ()
    ) -> "LanguageModel":
        """The same arrays, with layers' projections that compute what they will after quantisation.

        An adapter is merged into the weight for each product, as `save_pretrained_merged` will.

        Args:
            weights: format of the layers' matrices, a key of `quantization.fake.WEIGHTS`.
            activations: of their inputs, a key of `ACTIVATIONS`; None: these stay.
            modules_to_not_quantize: names of modules, or ends of names, that are left out.

        Raises:
            ConfigError: a format, a module or an adapter that is not served.
        """
        aware, own = QuantizationAware(weights, activations, tuple(modules_to_not_quantize)), self.folder_dtype
        if not self.full_finetuning and str(self.dtype) not in (own, "float32"):
            raise ConfigError(f"dtype: expected {own}, the folder's, or float32 with qat, got {self.dtype}")
        module = self.module()
        packed = "quantization_config" in self.hf_config
        quantize_layers(module, aware, dtype=own, trained=self.full_finetuning, packed=packed)
        execution = self.execution.without_chunks("qat")
        return self._executed(module, execution).replace(quantization_aware=aware)

    def with_host_embedding(self) -> "LanguageModel":
        """The same model with the table of embeddings in the host's pinned memory (`models.host_table`).

        Raises:
            ConfigError: the table is also the head's, or something is trained on it beside rows of single tokens.
        """
        table = self.frozen.get(EMBEDDING, {}).get("weight")
        check_host_embedding(self.config, self.lora)
        if table is None or self.full_finetuning:
            raise ConfigError("offload_embedding: expected false where the embedding is trained whole, got true")
        embedding = {**self.frozen[EMBEDDING], "weight": to_host_memory(table)}
        return self.replace(frozen={**self.frozen, EMBEDDING: embedding})

    @property
    def has_host_embedding(self) -> bool:
        """Whether the table of embeddings lies in the host's memory."""
        return in_host_memory(self.frozen.get(EMBEDDING, {}).get("weight"))

    def with_device_embedding(self) -> "LanguageModel":
        """The same model with the table of embeddings in the device's memory."""
        if not self.has_host_embedding:
            return self
        embedding = {**self.frozen[EMBEDDING], "weight": to_device_memory(self.frozen[EMBEDDING]["weight"])}
        return self.replace(frozen={**self.frozen, EMBEDDING: embedding})

    def with_host_layers(self) -> "LanguageModel":
        """The same model with the matrices of its scanned layers in the host's pinned memory (`models.streamed`).

        Raises:
            ConfigError: they are trained, or no layers are scanned.
        """
        check_host_layers(self.plan, self.full_finetuning)
        if self.quantization_aware is not None:
            raise ConfigError("offload_layers: expected false with qat, got true")

        def placed(leaf: Any, count: int) -> Any:
            return to_host_memory(leaf) if is_streamed(leaf, count) and not in_host_memory(leaf) else leaf

        layers = {
            number: jax.tree.map(functools.partial(placed, count=self.plan[number].count), stack)
            for number, stack in self.frozen["layers"].items()
        }
        return self.replace(frozen={**self.frozen, "layers": layers})

    @property
    def has_host_layers(self) -> bool:
        """Whether matrices of layers lie in the host's memory."""
        return any(map(in_host_memory, jax.tree.leaves(self.frozen.get("layers", {}))))

    def num_parameters(self) -> tuple[int, int]:
        """(trained, all) parameters; a 4-bit weight counts its elements, tied embeddings count once."""
        trained = sum(leaf.size for leaf in jax.tree.leaves(self.trainable))
        base = sum(math.prod(spec.shape) for spec in self.config.specs)
        return trained, base if self.full_finetuning else base + trained

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trained, as PEFT does."""
        trained, every = self.num_parameters()
        print(f"trainable params: {trained:,} || all params: {every:,} || trainable%: {trained / every:.4%}"[:-1])

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> Path:
        """Write the trained weights: a PEFT adapter folder, or after full fine-tuning a Hugging Face folder.

        An adapter with new tokens has their rows and the tokenizer that knows them. PEFT's
        `AutoPeftModelForCausalLM.from_pretrained(folder)` then grows the base by itself; before
        `PeftModel.from_pretrained(base, folder)` call `base.resize_token_embeddings(…)` with the rows of this model.

        Args:
            folder: created; appears under its name only when whole.
            tokenizer: saved in place of the model's own; None: that.

        Raises:
            ConfigError: nothing is trained, or there is no checkpoint to take config and tokenizer from.
            OSError: the disk is full, …; nothing is left behind.
        """
        return saving.save_trained(self if tokenizer is None else self.replace(tokenizer=tokenizer), Path(folder))

    def save_pretrained_merged(
        self,
        folder: str | Path,
        tokenizer: Any = None,
        save_method: str | None = None,
        *,
        dtype: str | None = None,
        base_in_nf4: bool = False,
        skip: Sequence[str] = (),
        activations: str | None = None,
        force: bool = False,
        allow_nonfinite: bool = False,
    ) -> Path:
        """Write a plain Hugging Face folder with the adapter merged into its base, as `convert.merge` does.

        Args:
            folder: created; appears under its name only when whole.
            tokenizer: saved in place of the model's own; None: that.
            save_method: in place of dtype, Unsloth's name: "merged_16bit", "merged_4bit", or "lora", which is
                `save_pretrained`.
            dtype: of the result: "bfloat16", "float16", "float32", or a scheme for the layers' matrices, such as "nf4"
                or "int4-128" (`convert.formats.WRITERS`); None: that of the base's files.
            base_in_nf4: add to the 4-bit weights that a 16-bit folder became with load_in_4bit, not to the folder's.
            skip: with a scheme as dtype, or base_in_nf4, modules or ends of their names ("layers.0.mlp.down_proj",
                "o_proj") that are not quantised.
            activations: with a scheme, how the layers' inputs are read, as of `convert.quantize.quantize`; None: as
                the adapter was trained for.
            force: replace an existing model folder.
            allow_nonfinite: write NaN and infinity instead of refusing.

        Raises:
            ConfigError: there is no adapter, or no base folder.
            ConvertError: the folder is taken, or something is wrong with the base.
            OSError: the disk is full, …; nothing is left behind.
        """
        model = self if tokenizer is None else self.replace(tokenizer=tokenizer)
        if save_method == "lora":
            return saving.save_trained(model, Path(folder))
        dtype = saving.merged_dtype(model, save_method, dtype)
        options = {"base_in_nf4": base_in_nf4, "skip": skip, "activations": activations}
        return saving.save_merged(
            model, Path(folder), dtype=dtype, force=force, allow_nonfinite=allow_nonfinite, **options
        )

    def save_pretrained_gguf(
        self,
        folder: str | Path,
        tokenizer: Any = None,
        quantization_method: str = "q8_0",
        *,
        base_in_nf4: bool = False,
        skip: Sequence[str] = (),
        pre_tokenizer: str | None = None,
        force: bool = False,
    ) -> Path:
        """Write a GGUF file for llama.cpp, the adapter merged first, as `convert.gguf.export_gguf` does.

        Args:
            folder: of the file; created.
            tokenizer: in place of the model's own; None: that.
            quantization_method: type of the matrices, one of `convert.gguf.TYPES`.
            base_in_nf4: as of `save_pretrained_merged`.
            skip: modules, or ends of their names, whose matrices keep their dtype.
            pre_tokenizer: llama.cpp's name of the pre-tokenizer, where it is unknown here.
            force: replace an existing file.

        Returns:
            The file, named by the folder and the type.

        Raises:
            ConfigError: as of `save_pretrained_merged`.
            ConvertError: as of `export_gguf`.
            OSError: the disk is full, …; nothing half-written is left.
        """
        model = self if tokenizer is None else self.replace(tokenizer=tokenizer)
        options = {"skip": skip, "pre_tokenizer": pre_tokenizer, "force": force}
        return saving.save_gguf(model, Path(folder), quantization_method, base_in_nf4, **options)

    def push_to_hub(
        self, repo_id: str, tokenizer: Any = None, *, token: str | None = None, private: bool = False
    ) -> str:
        """Upload what `save_pretrained` writes.

        Args:
            repo_id: organisation/name; created where it is missing.
            tokenizer: in place of the model's own; None: that.
            token: of the hub; None: HF_TOKEN, or that of the login.
            private: whether a new repository is.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: nothing is trained.
            OSError: the hub's errors.
        """
        model = self if tokenizer is None else self.replace(tokenizer=tokenizer)
        return saving.push(model, repo_id, token=token, private=private)
