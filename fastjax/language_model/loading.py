"""`FastLanguageModel`: models from folders, from the hub and from a config, with Unsloth's argument names."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh

from convert.errors import shown
from convert.families.mapping import read_config
from convert.formats import FORMATS
from convert.hub import Source, fetch
from convert.model.spec import QUANTIZED
from convert.trained_over import held_as
from fastjax.errors import ConfigError
from fastjax.execution.chunks import Chunk, check_chunk
from fastjax.execution.execution import Execution
from fastjax.execution.language_model import LanguageModel, Model
from fastjax.execution.load import load_weights, random_weights
from fastjax.execution.policies import check_policy
from fastjax.execution.zeros import zero_weights
from fastjax.language_model.adapters import add_adapter, base_and_adapter, check_bare, with_fresh_adapter
from fastjax.language_model.handle import ModelHandle, value_of
from fastjax.language_model.host import check_host_layers, with_host_embedding
from fastjax.language_model.variants import with_checkpointing
from fastjax.lora.fit import open_fitting
from fastjax.lora.settings import tables_note
from fastjax.models.decoder import Decoder
from fastjax.models.new_rows import grown
from fastjax.models.outline import Outline, read_outline, row_length
from fastjax.models.precision import make_precision
from fastjax.models.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

LAYER_LOOPS = ("scan", "unroll")


class FastLanguageModel:
    """The entry points, with Unsloth's names; the models that they give are handles (`handle.ModelHandle`)."""

    @staticmethod
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int | None = None,
        dtype: str | None = None,
        load_in_4bit: bool = True,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = "auto",
        random_state: int = 3407,
        layer_loop: Literal["scan", "unroll"] = "scan",
        param_dtype: str = "float32",
        float32_modules: Sequence[str] | None = None,
        new_tokens: "Sequence[str | AddedToken] | None" = None,
        rope_scaling: Mapping[str, Any] | None = None,
        revision: str | None = None,
        allow_nonfinite: bool = False,
        offload_embedding: bool = False,
        offload_layers: bool = False,
        mlp_chunk: Chunk = "auto",
        base_compute: Literal["float8"] | None = None,
    ) -> "tuple[ModelHandle, PreTrainedTokenizerBase]":
        """Load a Hugging Face folder, or that of an adapter with the model that it was trained over.

        Args:
            model_name: the folder, or a name on the hub: org/model, org/model@revision (`convert.hub`). Of an adapter
                the other arguments are those of its base, which its settings name.
            max_seq_length: longest row in training and generation; None: 2048, or the model's maximum if that is less.
            dtype: compute dtype; None: bfloat16 on a GPU, float32 on a CPU.
            load_in_4bit: quantise the layers' matrices to NF4 as they are read, or keep them as a 4-bit folder has
                them. Without it those of an FP8 folder keep their 8 bits.
            full_finetuning: train every weight (excludes `load_in_4bit`).
            use_gradient_checkpointing: True or "full": keep only the layers' inputs; "unsloth" or "offload": keep these
                in the host's memory; False or "projections": keep the projections' and the attention's results too; or
                another name of `execution.policies.POLICIES`, or "NAME:k" for the first k layers. "auto":
                "full" until it is trained; a trainer, as `fastjax train`, takes the fastest that the device has memory
                for.
            random_state: unused; `get_peft_model` has the seed of the adapters.
            layer_loop: "scan" (short compilation) or "unroll".
            param_dtype: dtype of the trained arrays; frozen weights are held in the compute dtype.
            float32_modules: names of modules, or ends of names ("norm", "lm_head", "layers.0.mlp"), that are held and
                computed in float32 whatever the dtype, and not quantised.
            new_tokens: tokens to add to the tokenizer and to the tables (`models.vocabulary`).
            rope_scaling: replaces the scaling of the rotary positions: {"rope_type": "yarn", "factor": 4.0}; types
                default, linear, dynamic, yarn, longrope and llama3, with transformers' names and defaults.
            revision: branch, tag or commit on the hub; its commit goes into an adapter's settings.
            allow_nonfinite: let NaN and infinity in the weights through, but not into quantised matrices.
            offload_embedding: hold the table of embeddings in the host's pinned memory, where it is frozen and not the
                head's too; also after `get_peft_model` and `load_adapter`.
            offload_layers: hold the matrices of scanned layers there, from the start; the device has those of two
                layers while it computes (`execution.streamed`).
            mlp_chunk: tokens that an MLP computes at a time (`execution.chunks`); "auto": 2,048 of them where a device
                has 16,384 or more and the backward pass computes the MLP again anyway; None: all.
            base_compute: "float8": compute the products of the layers' frozen matrices in float8_e4m3fn, forward and to
                their inputs; None: in the compute dtype.

        Returns:
            The model, and its tokenizer.

        Raises:
            ConfigError: arguments that contradict each other or the model.
            ConvertError: what is wrong with the folder; NaN or infinity in it.
        """
        del random_state
        _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)  # before a download
        source, adapter = base_and_adapter(fetch(model_name, revision))
        outline = read_outline(
            source.folder,
            max_seq_length=max_seq_length,
            float32_modules=float32_modules,
            new_tokens=new_tokens,
            rope_scaling=rope_scaling,
        )
        fitting = None  # before the weights are read
        if adapter is not None:
            fitting = open_fitting(adapter, outline.config, outline.new_token_ids)
        model = load_opened(
            source,
            outline,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
            full_finetuning=full_finetuning,
            use_gradient_checkpointing=use_gradient_checkpointing,
            layer_loop=layer_loop,
            param_dtype=param_dtype,
            float32_modules=float32_modules,
            base_compute=base_compute,
            allow_nonfinite=allow_nonfinite,
            offload_layers=offload_layers,
            mlp_chunk=mlp_chunk,
        )
        model = with_host_embedding(model) if offload_embedding else model
        model = model if fitting is None else add_adapter(model, *fitting)
        assert model.tokenizer is not None, "a folder without one was refused"
        return ModelHandle(model), model.tokenizer

    @staticmethod
    def from_config(
        config: Mapping[str, Any],
        max_seq_length: int | None = None,
        dtype: str | None = None,
        load_in_4bit: bool = False,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = "auto",
        random_state: int = 3407,
        layer_loop: Literal["scan", "unroll"] = "scan",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        param_dtype: str = "float32",
        float32_modules: Sequence[str] | None = None,
        mlp_chunk: Chunk = "auto",
        mesh: Mesh | None = None,
        base_compute: Literal["float8"] | None = None,
    ) -> ModelHandle:
        """A model with random weights, for training from scratch and for benchmarks.

        Args:
            config: as in a config.json.
            max_seq_length: as for `from_pretrained`, like the arguments not listed here.
            dtype: compute dtype.
            load_in_4bit: quantise the layers' matrices; where the config's quantization_config says "mxfp4", experts
                are drawn in MXFP4 and the other matrices are not quantised, as in such a folder.
            full_finetuning: train every weight.
            use_gradient_checkpointing: rematerialisation policy.
            random_state: seed of the weights.
            layer_loop: "scan" or "unroll".
            tokenizer: saved with the model.
            param_dtype: dtype of the trained arrays.
            float32_modules: modules that stay in float32.
            mlp_chunk: as for `from_pretrained`.
            mesh: of the devices that get parts of the weights (`parallel.make_mesh`); None: one has all.
            base_compute: as for `from_pretrained`.
        """
        settings = _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)
        parsed = read_config(config, where="config")
        execution = Execution(settings.pop("remat"), layer_loop, check_chunk(mlp_chunk, parsed))
        settings["max_seq_length"] = row_length(max_seq_length, parsed)
        precision = make_precision(
            dtype, param_dtype, float32_modules, parsed, base_compute=base_compute, trained=full_finetuning
        )
        if tokenizer is not None:
            check_vocabulary(tokenizer, parsed, "from_config")
        plan, weights = random_weights(
            parsed,
            jax.random.key(random_state),
            precision=precision,
            trained=full_finetuning,
            load_in_4bit=load_in_4bit,
            execution=execution,
            mxfp4=(config.get("quantization_config") or {}).get("quant_method") in FORMATS["mxfp4"].methods,
            mesh=mesh,
        )
        return ModelHandle(_build(parsed, config, None, plan, weights, precision, execution, tokenizer, settings))

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
        target_parameters: Sequence[str] | None = None,
        loftq_config: None = None,
    ) -> ModelHandle:
        """Attach fresh LoRA adapters; everything else is frozen.

        What a trainer makes of the result becomes the model that it was made from, too.

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
                they are untied, as in PEFT.
            trainable_token_indices: tokens whose rows of the embedding are trained, and no others (with tied embeddings
                the head's too); or ids for "embed_tokens" and for "lm_head". The rows of the model's new tokens are
                always among them, unless `modules_to_save` trains the whole table.
            target_parameters: matrices of a mixture's experts, "mlp.experts.gate_up_proj" and "mlp.experts.down_proj",
                that get an adapter for each expert; and the router's, such as "mlp.gate.weight".
            loftq_config: None: an adapter starts as `init_lora_weights` says.

        Raises:
            ConfigError: a value that is not supported, or settings that match no module.
        """
        if loftq_config:
            raise ConfigError(f"loftq_config: expected None, got {shown(loftq_config)}; see init_lora_weights")
        origin, model = model if isinstance(model, ModelHandle) else None, value_of(model)
        if use_gradient_checkpointing is not None:
            auto = use_gradient_checkpointing == "auto"
            policy = _remat(use_gradient_checkpointing)
            model = with_checkpointing(model, policy).replace(remat_auto=auto)
        model = with_fresh_adapter(
            model,
            random_state=random_state,
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
            target_parameters=target_parameters,
        )
        assert model.lora is not None, "it has been attached"
        if (note := tables_note(model.lora, model.config)) is not None:
            print(f"note: {note}", file=sys.stderr)
        return ModelHandle(model, origin)

    @staticmethod
    def for_inference(model: Model) -> Model:
        """The model itself: it is a value that trains and generates as it is.

        Args:
            model: any.
        """
        return model

    @staticmethod
    def for_training(model: Model) -> Model:
        """Likewise.

        Args:
            model: any.
        """
        return model

    @staticmethod
    def load_adapter(
        model: LanguageModel,
        folder: str | Path,
        lora_dropout: float | None = None,
        allow_nonfinite: bool = False,
        fake_quantization: bool = True,
    ) -> ModelHandle:
        """Attach the adapter of a PEFT folder, to generate with it or to train it on.

        A tokenizer in the folder, with its chat template, becomes the model's, unless it knows fewer tokens. Where the
        adapter was trained with new tokens, the model's tables grow by their rows.

        Args:
            model: without adapters.
            folder: adapter_config.json and adapter_model.safetensors; or a name on the hub, as of a model.
            lora_dropout: in place of the adapter's own.
            allow_nonfinite: let NaN and infinity in its arrays through.
            fake_quantization: of an adapter from quantisation-aware training, compute as it was trained.

        Raises:
            ConvertError: what is wrong with the folder.
            ConfigError: it is not for this model (every misfit named).
        """
        place, origin = fetch(folder).folder, model if isinstance(model, ModelHandle) else None
        model = value_of(model)
        check_bare(model)
        fitting = open_fitting(place, model.config, model.new_token_ids, allow_nonfinite=allow_nonfinite)
        return ModelHandle(add_adapter(model, *fitting, lora_dropout, fake_quantization=fake_quantization), origin)


def load_opened(
    source: Source,
    outline: Outline,
    *,
    dtype: str | None = None,
    load_in_4bit: bool = True,
    full_finetuning: bool = False,
    use_gradient_checkpointing: bool | str = "auto",
    layer_loop: str = "scan",
    param_dtype: str = "float32",
    float32_modules: Sequence[str] | None = None,
    base_compute: str | None = None,
    allow_nonfinite: bool = False,
    offload_layers: bool = False,
    mlp_chunk: Chunk = "auto",
    zeros: bool = False,
    mesh: Mesh | None = None,
) -> LanguageModel:
    """Load the weights of a folder that is open; the other arguments are those of `FastLanguageModel.from_pretrained`.

    Args:
        source: the folder's origin.
        outline: `read_outline`'s, with the open weights.
        dtype: compute dtype.
        load_in_4bit: quantise the layers' matrices to NF4.
        full_finetuning: train every weight.
        use_gradient_checkpointing: rematerialisation policy.
        layer_loop: "scan" or "unroll".
        param_dtype: dtype of the trained arrays.
        float32_modules: modules that stay in float32.
        base_compute: "float8", or None for `dtype`: of the products of the layers' frozen matrices.
        allow_nonfinite: let NaN and infinity in the weights through.
        offload_layers: hold the matrices of scanned layers in the host's memory; shapes get their places later.
        mlp_chunk: tokens that an MLP computes at a time.
        zeros: zeros in the place of the weights, which are not read: for shapes (`shapes_of`).
        mesh: of the devices that get parts of the weights; None: one has all.

    Raises:
        ConfigError: arguments that contradict each other.
        ConvertError: NaN or infinity in the weights, or a file that was cut short.
    """
    settings = _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop)
    config, new_ids = outline.config, outline.new_token_ids
    execution = Execution(settings.pop("remat"), layer_loop, check_chunk(mlp_chunk, config))
    precision = make_precision(
        dtype, param_dtype, float32_modules, config, base_compute=base_compute, trained=full_finetuning
    )
    how: dict[str, Any] = {
        "precision": precision,
        "trained": full_finetuning,
        "load_in_4bit": load_in_4bit,
        "execution": execution,
    }
    if zeros:
        plan, weights = zero_weights(outline.weights, outline.hf_config, config, **how)
    else:
        assert outline.weights is not None, "an outline without weights describes a model that is not downloaded"
        options = {"allow_nonfinite": allow_nonfinite, "offload_layers": offload_layers, "mesh": mesh}
        plan, weights = load_weights(outline.weights, config, **options, **how)
        if new_ids:
            weights = grown(weights, config.vocab_size, outline.known_tokens, new_ids)
    settings["max_seq_length"] = outline.max_seq_length
    where = outline.hf_config, source.folder
    model = _build(config, *where, plan, weights, precision, execution, outline.tokenizer, settings)
    if offload_layers:
        check_host_layers(model.plan, full_finetuning)
    name = None if source.name is None or source.revision is None else (source.name, source.revision)
    base, place = outline.weights, source.name or str(source.folder)
    if base is not None:
        kept = [spec.path.module for spec in base.specs.values() if spec.kind in QUANTIZED]
        apart = [module for module in kept if module in precision.float32_modules]
        base = held_as(base, load_in_4bit, name=place, revision=source.revision, skipped=apart)
    return model.replace(new_token_ids=new_ids, source=name, base=base)


def shapes_of(make: Callable[[], LanguageModel]) -> LanguageModel:
    """A model whose arrays are shapes (`jax.ShapeDtypeStruct`): nothing is computed.

    Args:
        make: makes the model, of zeros where weights would be read.
    """
    made: list[LanguageModel] = []

    def arrays() -> tuple[Any, Any]:
        made.append(make())
        return made[0].trainable, made[0].frozen

    trainable, frozen = jax.eval_shape(arrays)
    return made[0].replace(trainable=trainable, frozen=frozen)


def _build(config, hf_config, folder, plan, weights, precision, execution, tokenizer, settings) -> LanguageModel:
    decoder = Decoder(config, plan, weights, precision=precision, executor=execution)
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
        execution=execution,
        tokenizer=tokenizer,
        **settings,
    )


def _settings(load_in_4bit, full_finetuning, use_gradient_checkpointing, layer_loop) -> dict[str, Any]:
    if full_finetuning and load_in_4bit:
        raise ConfigError(
            "full_finetuning trains every weight and 4-bit weights cannot be trained: set load_in_4bit=False"
        )
    if layer_loop not in LAYER_LOOPS:
        raise ConfigError(f"layer_loop: expected one of {list(LAYER_LOOPS)}, got {shown(layer_loop)}")
    return {
        "remat": _remat(use_gradient_checkpointing),
        "remat_auto": use_gradient_checkpointing == "auto",
        "full_finetuning": full_finetuning,
    }


def _remat(use_gradient_checkpointing: bool | str) -> str:
    if isinstance(use_gradient_checkpointing, bool):
        return "full" if use_gradient_checkpointing else "projections"
    if use_gradient_checkpointing == "auto":  # a run chooses
        return "full"
    if use_gradient_checkpointing == "unsloth":
        return "offload"
    return check_policy(use_gradient_checkpointing)
