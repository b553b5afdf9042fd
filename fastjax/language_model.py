"""A language model as one value: its definition, its trained and its frozen arrays, and the files it came from.

`FastLanguageModel` has the entry points with Unsloth's argument names. What they return is plain: `model.graphdef`,
`model.trainable` and `model.frozen` go into `training.step.make_train_step` or any function of your own.
"""

import dataclasses
import errno
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.adapters import AdapterConfig, write_adapter
from convert.checkpoint import WEIGHT_FILES
from convert.errors import shown
from convert.families import family_for
from convert.files import atomic_folder
from convert.hub import fetch
from convert.merge import merge
from convert.model.config import ModelConfig
from convert.weights import save
from fastjax.data.tokenizer import load_tokenizer
from fastjax.errors import ConfigError
from fastjax.lora.export import export_adapters
from fastjax.lora.params import LoraParam, SavedParam
from fastjax.lora.settings import fresh_adapter
from fastjax.lora.tables import shares_whole_table
from fastjax.models.decoder import Decoder
from fastjax.models.layout import LayerStack, layer_of, split_layer
from fastjax.models.load import load_weights, random_weights
from fastjax.models.new_rows import grown
from fastjax.models.outline import read_outline, row_length
from fastjax.models.precision import DTYPES, Precision, make_precision
from fastjax.models.remat import POLICIES
from fastjax.models.vocabulary import check_vocabulary
from fastjax.peft import attach_adapter, load_adapter

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

LAYER_LOOPS = ("scan", "unroll")


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model and where it came from; immutable, its methods return new ones.

    Attributes:
        config: what the decoder is built from.
        hf_config: the checkpoint's config.json.
        folder: the checkpoint; None for random weights.
        graphdef: static half of the decoder: `nnx.merge(graphdef, trainable, frozen)` is the module.
        trainable: arrays that training changes, a pure dict.
        frozen: the others, a pure dict.
        plan: arrangement of the layers.
        lora: the adapter's settings, or None.
        full_finetuning: whether every weight is trained.
        precision: dtypes of computation and parameters.
        remat: what the backward pass finds in memory.
        layer_loop: "scan" or "unroll".
        max_seq_length: rows are at most this long.
        tokenizer: the folder's, with the new tokens, or None.
        new_token_ids: tokens that were added to the checkpoint's vocabulary.
        source: name and commit of a checkpoint from the hub; None for a folder.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    folder: Path | None
    graphdef: nnx.GraphDef = dataclasses.field(repr=False)
    trainable: Any = dataclasses.field(repr=False)
    frozen: Any = dataclasses.field(repr=False)
    plan: tuple[LayerStack, ...]
    lora: AdapterConfig | None
    full_finetuning: bool
    precision: Precision
    remat: str
    layer_loop: str
    max_seq_length: int
    tokenizer: "PreTrainedTokenizerBase | None" = dataclasses.field(repr=False)
    new_token_ids: tuple[int, ...] = ()
    source: tuple[str, str] | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.precision.dtype

    @property
    def trainable_filter(self) -> Any:
        """The nnx filter that separates trainable from frozen variables."""
        return nnx.Param if self.full_finetuning else nnx.Any(LoraParam, SavedParam)

    def module(self) -> Decoder:
        """The decoder itself, for a look or for code that calls modules."""
        return nnx.merge(self.graphdef, self.trainable, self.frozen)

    def replace(self, **changes: Any) -> "LanguageModel":
        """The same model with other fields, for instance `trainable` after training."""
        return dataclasses.replace(self, **changes)

    def num_parameters(self) -> tuple[int, int]:
        """(trained, all) parameters; a 4-bit weight counts its elements, tied embeddings count once."""
        trained = sum(leaf.size for leaf in jax.tree.leaves(self.trainable))
        layer = sum(math.prod(spec.shape) for spec in self.config.layer_specs)
        tables = 1 if self.config.tie_word_embeddings else 2
        base = self.config.num_hidden_layers * layer + self.config.hidden_size * (1 + tables * self.config.vocab_size)
        return trained, base if self.full_finetuning else base + trained

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write what was trained: a PEFT adapter folder, or after full fine-tuning a Hugging Face folder.

        An adapter with new tokens has their rows and the tokenizer that knows them. PEFT's
        `AutoPeftModelForCausalLM.from_pretrained(folder)` then grows the base by itself; before
        `PeftModel.from_pretrained(base, folder)` call `base.resize_token_embeddings(…)` with the rows of this model.

        Args:
            folder: created; appears under its name only when whole.

        Raises:
            ConfigError: there is nothing trained, or no checkpoint to take config and tokenizer from.
            OSError: the disk is full, …; nothing is left behind.
        """
        folder = Path(folder)
        if self.lora is None and not self.full_finetuning:
            raise ConfigError(
                "save_pretrained: nothing is trained here; call get_peft_model, or load with full_finetuning"
            )
        with atomic_folder(folder, replaces=("adapter_model.*",) if self.lora is not None else WEIGHT_FILES) as whole:
            if self.lora is not None:
                tied = shares_whole_table(self.lora, self.config)
                arrays = export_adapters(self.trainable, self.plan, tied)
                write_adapter(whole, self.lora, arrays, family=family_for(self.hf_config))
            else:
                save(whole, self._tensors(), dict(self.hf_config), source=self.folder)
            if self.tokenizer is not None and (self.lora is not None or self._has_own_tokenizer()):
                _save_tokenizer(self.tokenizer, whole)
        return folder

    def save_pretrained_merged(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        base_in_nf4: bool = False,
        force: bool = False,
        allow_nonfinite: bool = False,
    ) -> Path:
        """Write a plain Hugging Face folder with the adapter merged into its base, as `convert.merge` does.

        Args:
            folder: created; appears under its name only when whole.
            dtype: of the result: "bfloat16", "float16", "float32", or "nf4" for the layers' matrices; None: as the
                base's files have it.
            base_in_nf4: add to the 4-bit weights that a 16-bit folder became with load_in_4bit, not to the folder's.
            force: replace a model folder that is there.
            allow_nonfinite: write NaN and infinity instead of refusing.

        Raises:
            ConfigError: there is no adapter, or no folder that it was trained on.
            ConvertError: the folder is taken, or something is wrong with the base.
            OSError: the disk is full, …; nothing is left behind.
        """
        if self.lora is None or self.folder is None:
            raise ConfigError(
                "save_pretrained_merged: expected an adapter on a model from a folder; save_pretrained writes a model "
                "that was trained whole"
            )
        folder = Path(folder)
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".adapter-", dir=folder.absolute().parent) as adapter:
            self.save_pretrained(adapter)
            merge(
                self.folder,
                adapter,
                folder,
                dtype=dtype,
                base_in_nf4=base_in_nf4,
                config=self.hf_config,
                force=force,
                allow_nonfinite=allow_nonfinite,
            )
        return folder

    def _has_own_tokenizer(self) -> bool:
        """Whether the tokenizer is another than the checkpoint's, whose files are copied as they are."""
        if self.folder is None or self.new_token_ids:
            return True
        return getattr(self.tokenizer, "chat_template", None) != load_tokenizer(self.folder).chat_template

    def _tensors(self) -> Any:
        """The trained weights by path, in the checkpoint's order."""
        tree = self.trainable
        kept = jnp.dtype(DTYPES.get(str(self.hf_config.get("dtype", self.hf_config.get("torch_dtype"))), jnp.float32))
        yield "embed_tokens.weight", np.asarray(tree["embed_tokens"]["weight"].astype(kept))
        runs = [[tree["layers"][r][p] for p in range(run.period)] for r, run in enumerate(self.plan)]
        for index in range(self.config.num_hidden_layers):
            layer = layer_of(runs, self.plan, index)
            for path, array in split_layer(layer, self.config).items():
                yield path.in_layer(index), np.asarray(array.astype(kept))
        yield "norm.weight", np.asarray(tree["norm"]["weight"].astype(kept))
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", np.asarray(tree["lm_head"]["weight"].astype(kept))


class FastLanguageModel:
    """The entry points, with Unsloth's names."""

    @staticmethod
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int | None = None,
        dtype: str | None = None,
        load_in_4bit: bool = True,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = True,
        random_state: int = 3407,
        layer_loop: Literal["scan", "unroll"] = "scan",
        param_dtype: str = "float32",
        float32_modules: Sequence[str] | None = None,
        new_tokens: "Sequence[str | AddedToken] | None" = None,
        rope_scaling: Mapping[str, Any] | None = None,
        revision: str | None = None,
        allow_nonfinite: bool = False,
    ) -> "tuple[LanguageModel, PreTrainedTokenizerBase]":
        """Load a Hugging Face folder.

        Args:
            model_name: the folder, or a name on the hub: org/model, org/model@revision (`convert.hub`).
            max_seq_length: longest row that will be trained on or generated; None: 2048, or what the model can do
                where that is less.
            dtype: compute dtype; None: bfloat16 on a GPU, float32 on a CPU.
            load_in_4bit: quantise the layers' matrices to NF4 as they are read, or keep them as a 4-bit folder has
                them. Without it those of an FP8 folder keep their 8 bits.
            full_finetuning: train every weight (excludes `load_in_4bit`).
            use_gradient_checkpointing: True or "full": keep only the layers' inputs; False or "projections": keep the
                projections' and the attention's results too; "none": keep everything.
            random_state: seed of what starts at random.
            layer_loop: "scan" (short compilation) or "unroll".
            param_dtype: dtype of what is trained; frozen weights are held in the compute dtype.
            float32_modules: names of modules, or ends of names ("norm", "lm_head", "layers.0.mlp"), that are held and
                computed in float32 whatever the dtype, and not quantised.
            new_tokens: tokens to add to the tokenizer and to the tables (`models.vocabulary`).
            rope_scaling: replaces the scaling of the rotary positions: {"rope_type": "yarn", "factor": 4.0}; types
                default, linear, dynamic, yarn, longrope and llama3, with transformers' names and defaults.
            revision: branch, tag or commit on the hub; its commit goes into an adapter's settings.
            allow_nonfinite: let NaN and infinity in the weights through, but not into what is quantised.

        Returns:
            The model, and its tokenizer.

        Raises:
            ConfigError: arguments that contradict each other or the model.
            ConvertError: what is wrong with the folder; NaN or infinity in it.
        """
        del random_state  # nothing starts at random here; get_peft_model has its own
        settings = _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)
        found = fetch(model_name, revision)
        outline = read_outline(
            found.folder,
            max_seq_length=max_seq_length,
            float32_modules=float32_modules,
            new_tokens=new_tokens,
            rope_scaling=rope_scaling,
        )
        config, new_ids = outline.config, outline.new_token_ids
        settings["max_seq_length"] = outline.max_seq_length
        precision = make_precision(dtype, param_dtype, float32_modules, config)
        plan, weights = load_weights(
            found.folder,
            config,
            precision=precision,
            trained=full_finetuning,
            load_in_4bit=load_in_4bit,
            layer_loop=layer_loop,
            allow_nonfinite=allow_nonfinite,
        )
        if new_ids:
            weights = grown(weights, config.vocab_size, outline.known_tokens, new_ids)
        tokenizer = outline.tokenizer
        model = _build(config, outline.hf_config, found.folder, plan, weights, precision, tokenizer, settings)
        source = None if found.name is None or found.revision is None else (found.name, found.revision)
        return model.replace(new_token_ids=new_ids, source=source), tokenizer

    @staticmethod
    def from_config(
        config: Mapping[str, Any],
        max_seq_length: int | None = None,
        dtype: str | None = None,
        load_in_4bit: bool = False,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = True,
        random_state: int = 3407,
        layer_loop: Literal["scan", "unroll"] = "scan",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        param_dtype: str = "float32",
        float32_modules: Sequence[str] | None = None,
    ) -> LanguageModel:
        """A model with random weights, for training from scratch and for benchmarks.

        Args:
            config: as in a config.json.
            max_seq_length: as for `from_pretrained`, like the arguments not listed here.
            dtype: compute dtype.
            load_in_4bit: quantise the layers' matrices.
            full_finetuning: train every weight.
            use_gradient_checkpointing: what the backward pass finds in memory.
            random_state: seed of the weights.
            layer_loop: "scan" or "unroll".
            tokenizer: saved with the model.
            param_dtype: dtype of what is trained.
            float32_modules: modules that stay in float32.
        """
        settings = _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)
        parsed = ModelConfig.from_hf(config, where="config")
        settings["max_seq_length"] = row_length(max_seq_length, parsed)
        precision = make_precision(dtype, param_dtype, float32_modules, parsed)
        if tokenizer is not None:
            check_vocabulary(tokenizer, parsed, "from_config")
        plan, weights = random_weights(
            parsed,
            jax.random.key(random_state),
            precision=precision,
            trained=full_finetuning,
            load_in_4bit=load_in_4bit,
            layer_loop=layer_loop,
        )
        return _build(parsed, config, None, plan, weights, precision, tokenizer, settings)

    @staticmethod
    def get_peft_model(
        model: LanguageModel,
        r: int = 16,
        target_modules: Sequence[str] | str | None = None,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        layers_to_transform: int | Sequence[int] | None = None,
        use_gradient_checkpointing: bool | str | None = None,
        random_state: int = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        ensure_weight_tying: bool = False,
        trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> LanguageModel:
        """Attach fresh LoRA adapters; everything else is frozen.

        Args:
            model: without adapters.
            r: rank.
            target_modules: names as PEFT matches them: a list of suffixes, a regular expression, or "all-linear";
                None: every projection, by name.
            lora_alpha: the scale is lora_alpha / r.
            lora_dropout: probability with which an adapter's input is zeroed while training.
            bias: "none".
            layers_to_transform: only these layers.
            use_gradient_checkpointing: None keeps the model's.
            random_state: seed of the adapters.
            use_rslora: the scale is lora_alpha / √r (Kalajdzievski, arXiv 2312.03732).
            use_dora: train the rows' magnitudes too (Liu et al., arXiv 2402.09353).
            modules_to_save: "embed_tokens", "lm_head" or both are trained whole.
            init_lora_weights: True, False, "gaussian" or "orthogonal", as in PEFT.
            rank_pattern: ranks of some modules by regular expression.
            alpha_pattern: the same for lora_alpha.
            ensure_weight_tying: with tied embeddings, `modules_to_save` trains one array for both uses; without it
                PEFT unties them, and so is it done here.
            trainable_token_indices: tokens whose rows of the embedding are trained, and no others (with tied embeddings
                the head's too); or ids for "embed_tokens" and for "lm_head". The rows of the model's new tokens are
                always among them, unless `modules_to_save` trains the whole table.

        Raises:
            ConfigError: a value that is not supported, or settings that match no module.
        """
        name, revision = model.source or (None if model.folder is None else str(model.folder), None)
        if use_gradient_checkpointing is not None:
            model = model.replace(remat=_remat(use_gradient_checkpointing))
        adapter = fresh_adapter(
            model.config,
            model.new_token_ids,
            base_model_name_or_path=name,
            revision=revision,
            r=r,
            target_modules=target_modules,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            bias=bias,
            layers_to_transform=layers_to_transform,
            use_rslora=use_rslora,
            use_dora=use_dora,
            modules_to_save=modules_to_save,
            init_lora_weights=init_lora_weights,
            rank_pattern=rank_pattern,
            alpha_pattern=alpha_pattern,
            ensure_weight_tying=ensure_weight_tying,
            trainable_token_indices=trainable_token_indices,
        )
        return attach_adapter(model, adapter, None, jax.random.key(random_state))

    @staticmethod
    def load_adapter(
        model: LanguageModel, folder: str | Path, lora_dropout: float | None = None, allow_nonfinite: bool = False
    ) -> LanguageModel:
        """Attach the adapter of a PEFT folder, to generate with it or to train it on.

        A tokenizer in the folder, with its chat template, becomes the model's, unless it knows fewer tokens. Where the
        adapter was trained with new tokens, the model's tables grow by their rows.

        Args:
            model: without adapters.
            folder: adapter_config.json and adapter_model.safetensors; or a name on the hub, as of a model.
            lora_dropout: in place of the adapter's own.
            allow_nonfinite: let NaN and infinity in its arrays through.

        Raises:
            ConvertError: what is wrong with the folder.
            ConfigError: it is not for this model (every misfit named).
        """
        return load_adapter(model, fetch(folder).folder, lora_dropout, allow_nonfinite)


def _save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # its Rust half knows no better, for a full disk either
        full = "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(folder)) from error


def _build(config, hf_config, folder, plan, weights, precision, tokenizer, settings) -> LanguageModel:
    decoder = Decoder(config, plan, weights, precision=precision, remat=settings["remat"])
    full = settings["full_finetuning"]
    graphdef, trainable, frozen = nnx.split(decoder, nnx.Param if full else nnx.Nothing(), ...)
    return LanguageModel(
        config=config,
        hf_config=dict(hf_config),
        folder=folder,
        graphdef=graphdef,
        trainable=nnx.to_pure_dict(trainable),
        frozen=nnx.to_pure_dict(frozen),
        plan=tuple(plan),
        lora=None,
        precision=precision,
        tokenizer=tokenizer,
        **settings,
    )


def _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop) -> dict[str, Any]:
    if full_finetuning and load_in_4bit:
        raise ConfigError(
            "full_finetuning trains every weight and 4-bit weights cannot be trained: set load_in_4bit=False"
        )
    if layer_loop not in LAYER_LOOPS:
        raise ConfigError(f"layer_loop: expected one of {list(LAYER_LOOPS)}, given {shown(layer_loop)}")
    return {
        "remat": _remat(use_gradient_checkpointing),
        "full_finetuning": full_finetuning,
        "layer_loop": layer_loop,
    }


def _remat(use_gradient_checkpointing: bool | str) -> str:
    if isinstance(use_gradient_checkpointing, bool):
        return "full" if use_gradient_checkpointing else "projections"
    if use_gradient_checkpointing not in POLICIES:
        raise ConfigError(
            f"use_gradient_checkpointing: expected True, False or one of {list(POLICIES)}, "
            f"given {shown(use_gradient_checkpointing)}"
        )
    return use_gradient_checkpointing
