"""A language model as one value: its definition, its trained and its frozen arrays, and the files it came from.

`FastLanguageModel` has the entry points with Unsloth's argument names. What they return is plain: `model.graphdef`,
`model.trainable` and `model.frozen` go into `training.step.make_train_step` or any function of your own.
"""

import dataclasses
import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from convert.adapters import AdapterConfig, read_adapter, write_adapter
from convert.checkpoint import WEIGHT_FILES, open_checkpoint
from convert.errors import ConvertError
from convert.files import atomic_folder
from convert.weights import save
from fastjax.data.tokenizer import load_tokenizer
from fastjax.errors import ConfigError
from fastjax.lora import LoraParam, SavedParam
from fastjax.models.adapters import adapter_sites, build_adapters, export_adapters, layer_signatures, saved_modules
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import Decoder, part_rows
from fastjax.models.layout import Run, layer_of, plan_layers, rearrange, signature, split_layer
from fastjax.models.load import load_weights, random_weights
from fastjax.models.remat import POLICIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYER_LOOPS = ("scan", "unroll")
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}


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
        dtype: compute dtype.
        remat: what the backward pass finds in memory.
        layer_loop: "scan" or "unroll".
        max_seq_length: rows are at most this long.
        tokenizer: the folder's, or None.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    folder: Path | None
    graphdef: nnx.GraphDef = dataclasses.field(repr=False)
    trainable: Any = dataclasses.field(repr=False)
    frozen: Any = dataclasses.field(repr=False)
    plan: tuple[Run, ...]
    lora: AdapterConfig | None
    full_finetuning: bool
    dtype: jnp.dtype
    remat: str
    layer_loop: str
    max_seq_length: int
    tokenizer: "PreTrainedTokenizerBase | None" = dataclasses.field(repr=False)

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
        rows = part_rows(self.config)
        inner = {
            "self_attn.o": self.config.num_attention_heads * self.config.head_dim,
            "mlp.down": self.config.intermediate_size,
        }
        layer = 2 * self.config.hidden_size
        for group, parts in rows.items():
            biased = self.config.attention_bias if group.startswith("self_attn") else self.config.mlp_bias
            layer += sum(parts) * (inner.get(group, self.config.hidden_size) + int(biased))
        tables = 1 if self.config.tie_word_embeddings else 2
        base = self.config.num_hidden_layers * layer + self.config.hidden_size * (1 + tables * self.config.vocab_size)
        return trained, base if self.full_finetuning else base + trained

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write what was trained: a PEFT adapter folder, or after full fine-tuning a Hugging Face folder.

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
                tied = self.lora.ensure_weight_tying and self.config.tie_word_embeddings and saved_modules(self.lora)
                write_adapter(whole, self.lora, export_adapters(self.trainable, self.plan, bool(tied)))
            else:
                save(whole, self._tensors(), dict(self.hf_config), source=self.folder)
            if self.tokenizer is not None and (self.lora is not None or self.folder is None):
                _save_tokenizer(self.tokenizer, whole)
        return folder

    def _tensors(self) -> Any:
        """The trained weights by path, in the checkpoint's order."""
        tree = self.trainable
        kept = jnp.dtype(DTYPES.get(str(self.hf_config.get("dtype", self.hf_config.get("torch_dtype"))), jnp.float32))
        yield "embed_tokens.weight", np.asarray(tree["embed_tokens"]["weight"].astype(kept))
        runs = [[tree["layers"][r][p] for p in range(run.period)] for r, run in enumerate(self.plan)]
        for index in range(self.config.num_hidden_layers):
            layer = layer_of(runs, self.plan, index)
            for name, array in split_layer(layer, part_rows(self.config)).items():
                yield f"layers.{index}.{name}", np.asarray(array.astype(kept))
        yield "norm.weight", np.asarray(tree["norm"]["weight"].astype(kept))
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", np.asarray(tree["lm_head"]["weight"].astype(kept))


class FastLanguageModel:
    """The entry points, with Unsloth's names."""

    @staticmethod
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int = 2048,
        dtype: str | None = None,
        load_in_4bit: bool = True,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = True,
        random_state: int = 3407,
        layer_loop: Literal["scan", "unroll"] = "scan",
    ) -> "tuple[LanguageModel, PreTrainedTokenizerBase]":
        """Load a Hugging Face folder.

        Args:
            model_name: the folder.
            max_seq_length: longest row that will be trained on or generated.
            dtype: compute dtype; None: bfloat16 on a GPU, float32 on a CPU.
            load_in_4bit: quantise the layers' matrices to NF4 as they are read, or keep them as a 4-bit folder has
                them.
            full_finetuning: train every weight, in float32 (excludes `load_in_4bit`).
            use_gradient_checkpointing: True or "full": keep only the layers' inputs; False or "projections": keep the
                projections' and the attention's results too; "none": keep everything.
            random_state: seed of what starts at random.
            layer_loop: "scan" (short compilation) or "unroll".

        Returns:
            The model, and its tokenizer.

        Raises:
            ConfigError: arguments that contradict each other.
            ConvertError: what is wrong with the folder.
        """
        del random_state  # nothing starts at random here; get_peft_model has its own
        settings = _settings(dtype, load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)
        checkpoint = open_checkpoint(model_name)
        config = ModelConfig.from_hf(checkpoint.config, where=str(Path(model_name) / "config.json"))
        plan, weights = load_weights(
            model_name,
            config,
            dtype=jnp.float32 if full_finetuning else settings["dtype"],
            load_in_4bit=load_in_4bit,
            layer_loop=layer_loop,
        )
        tokenizer = load_tokenizer(model_name)
        model = _build(config, checkpoint.config, Path(model_name), plan, weights, max_seq_length, tokenizer, settings)
        return model, tokenizer

    @staticmethod
    def from_config(
        config: Mapping[str, Any],
        max_seq_length: int = 2048,
        dtype: str | None = None,
        load_in_4bit: bool = False,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = True,
        random_state: int = 3407,
        layer_loop: Literal["scan", "unroll"] = "scan",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
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
        """
        settings = _settings(dtype, load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)
        parsed = ModelConfig.from_hf(config, where="config")
        plan, weights = random_weights(
            parsed,
            jax.random.key(random_state),
            dtype=jnp.float32 if full_finetuning else settings["dtype"],
            load_in_4bit=load_in_4bit,
            layer_loop=layer_loop,
        )
        return _build(parsed, config, None, plan, weights, max_seq_length, tokenizer, settings)

    @staticmethod
    def get_peft_model(
        model: LanguageModel,
        r: int = 16,
        target_modules: Sequence[str] | str = PROJECTIONS,
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
    ) -> LanguageModel:
        """Attach fresh LoRA adapters; everything else is frozen.

        Args:
            model: without adapters.
            r: rank.
            target_modules: names as PEFT matches them: a list of suffixes, a regular expression, or "all-linear".
            lora_alpha: the scale is lora_alpha / r.
            lora_dropout: probability with which an adapter's input is zeroed while training.
            bias: "none".
            layers_to_transform: only these layers.
            use_gradient_checkpointing: None keeps the model's.
            random_state: seed of the adapters.
            use_rslora: the scale is lora_alpha / √r (Kalajdzievski, arXiv 2312.03732).
            use_dora: train the rows' magnitudes too (Liu et al., arXiv 2402.09353).
            modules_to_save: "embed_tokens", "lm_head" or both are trained whole, in float32.
            init_lora_weights: True, False, "gaussian" or "orthogonal", as in PEFT.
            rank_pattern: ranks of some modules by regular expression.
            alpha_pattern: the same for lora_alpha.
            ensure_weight_tying: with tied embeddings, `modules_to_save` trains one array for both uses; without it
                PEFT unties them, and so is it done here.

        Raises:
            ConfigError: a value that is not supported, or settings that match no module.
        """
        if bias != "none":
            raise ConfigError(f"bias: expected 'none', given {bias!r}")
        try:
            adapter = AdapterConfig(
                base_model_name_or_path=None if model.folder is None else str(model.folder),
                r=r,
                lora_alpha=lora_alpha,
                lora_dropout=lora_dropout,
                target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
                layers_to_transform=_listed(layers_to_transform),
                use_rslora=use_rslora,
                use_dora=use_dora,
                modules_to_save=None if modules_to_save is None else list(modules_to_save),
                init_lora_weights=init_lora_weights,
                rank_pattern=dict(rank_pattern or {}),
                alpha_pattern=dict(alpha_pattern or {}),
                ensure_weight_tying=ensure_weight_tying,
            )
        except ConvertError as error:
            raise ConfigError(str(error)) from error
        if use_gradient_checkpointing is not None:
            model = model.replace(remat=_remat(use_gradient_checkpointing))
        return attach_adapter(model, adapter, None, jax.random.key(random_state))

    @staticmethod
    def load_adapter(model: LanguageModel, folder: str | Path) -> LanguageModel:
        """Attach the adapter of a PEFT folder.

        Args:
            model: without adapters.
            folder: adapter_config.json and adapter_model.safetensors.

        Raises:
            ConvertError: what is wrong with the folder.
            ConfigError: it is not for this model (every misfit named).
        """
        adapter, arrays = read_adapter(folder)
        return attach_adapter(model, adapter, arrays, jax.random.key(0))


def attach_adapter(
    model: LanguageModel, adapter: AdapterConfig, arrays: Mapping[str, Any] | None, key: PRNGKeyArray
) -> LanguageModel:
    """A model with an adapter attached, the functional form of `get_peft_model` and `load_adapter`.

    Args:
        model: without adapters, not loaded for full fine-tuning.
        adapter: PEFT's settings.
        arrays: the adapter's arrays as `convert.adapters.read_adapter` gives them; None: fresh ones.
        key: random state of fresh ones.
    """
    if model.lora is not None or model.full_finetuning:
        raise ConfigError("an adapter needs a model without adapters that was not loaded with full_finetuning")
    sites = adapter_sites(adapter, model.config)
    runs = [[model.frozen["layers"][r][p] for p in range(run.period)] for r, run in enumerate(model.plan)]
    own = layer_signatures(sites, model.config.num_hidden_layers)
    shapes = [jax.eval_shape(lambda i=i: layer_of(runs, model.plan, i)) for i in range(model.config.num_hidden_layers)]
    plan = plan_layers([(signature(s), o) for s, o in zip(shapes, own, strict=True)], model.layer_loop)
    weights = {**model.frozen, "layers": rearrange(runs, model.plan, plan)}
    adapters = build_adapters(adapter, model.config, plan, weights, arrays, key)
    decoder = Decoder(model.config, plan, weights, adapters, dtype=model.dtype, remat=model.remat)
    graphdef, trainable, frozen = nnx.split(decoder, nnx.Any(LoraParam, SavedParam), ...)
    return model.replace(
        graphdef=graphdef,
        trainable=nnx.to_pure_dict(trainable),
        frozen=nnx.to_pure_dict(frozen),
        plan=plan,
        lora=adapter,
    )


def _save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # its Rust half knows no better, for a full disk either
        full = "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(folder)) from error


def _build(config, hf_config, folder, plan, weights, max_seq_length, tokenizer, settings) -> LanguageModel:
    decoder = Decoder(config, plan, weights, {}, dtype=settings["dtype"], remat=settings["remat"])
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
        max_seq_length=max_seq_length,
        tokenizer=tokenizer,
        **settings,
    )


def _settings(dtype, load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop) -> dict[str, Any]:
    if full_finetuning and load_in_4bit:
        raise ConfigError(
            "full_finetuning trains every weight and 4-bit weights cannot be trained: set load_in_4bit=False"
        )
    if layer_loop not in LAYER_LOOPS:
        raise ConfigError(f"layer_loop: expected one of {list(LAYER_LOOPS)}, given {layer_loop!r}")
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {list(DTYPES)}, given {dtype!r}")
    return {
        "dtype": jnp.dtype(DTYPES[dtype]),
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
            f"given {use_gradient_checkpointing!r}"
        )
    return use_gradient_checkpointing


def _listed(layers: int | Sequence[int] | None) -> list[int] | None:
    return None if layers is None else [layers] if isinstance(layers, int) else list(layers)
