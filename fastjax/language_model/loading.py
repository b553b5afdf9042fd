"""`FastLanguageModel`: models from folders, from the hub and from a config, with Unsloth's argument names."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax.sharding import Mesh

from convert.errors import shown
from convert.families.mapping import read_config
from convert.formats import FORMATS
from fastjax.errors import ConfigError
from fastjax.execution.execution import Execution
from fastjax.execution.language_model import LanguageModel, Model, check_model
from fastjax.execution.load import load_weights, random_weights
from fastjax.execution.opening import OpenModel, open_pretrained, row_length
from fastjax.execution.options import LoadOptions
from fastjax.execution.precision import dtype_name, make_precision
from fastjax.execution.unfrozen import freeze
from fastjax.execution.zeros import zero_weights
from fastjax.language_model.adapters import add_adapter, has_adapter, load_adapter, with_fresh_adapter
from fastjax.language_model.handle import ModelHandle, value_of
from fastjax.language_model.host import check_host_layers, with_host_embedding
from fastjax.language_model.other_names import ADAPTER, LOADING, qat_scheme_of
from fastjax.language_model.variants import with_checkpointing, with_fake_quantization
from fastjax.lora.settings import LoraSettings, tables_note
from fastjax.lora.usual_names import with_usual_names
from fastjax.models.decoder import Decoder
from fastjax.models.module_names import frozen_arrays
from fastjax.models.new_rows import grown
from fastjax.models.vocabulary import check_vocabulary
from fastjax.options.keywords import keywords
from fastjax.quantization import NF4Weight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _load_options(given: Mapping[str, Any]) -> LoadOptions:
    """Options from what Unsloth's users give: dtypes of libraries, "unsloth" for activations in the host's memory."""
    given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    given |= {name: dtype_name(given[name]) for name in ("dtype", "param_dtype") if name in given}
    if given.get("full_finetuning") is True:
        given.setdefault("load_in_4bit", False)
    if given.get("use_gradient_checkpointing") == "unsloth":
        given["use_gradient_checkpointing"] = "offload"
    return LoadOptions(**given)


class FastLanguageModel:
    """The entry points, with Unsloth's names; the models that they give are handles (`handle.ModelHandle`)."""

    @staticmethod
    @keywords(LoadOptions, _load_options, positional=("max_seq_length", "dtype", "load_in_4bit"), beside=LOADING)
    def from_pretrained(
        model_name: str | os.PathLike[str],
        *,
        options: LoadOptions,
        revision: str | None = None,
        random_state: int = 3407,
        qat_scheme: str | None = None,
    ) -> "tuple[ModelHandle, PreTrainedTokenizerBase]":
        """Load a Hugging Face folder, or that of an adapter with the model that it was trained over.

        Args:
            model_name: the folder, or a name on the hub: org/model, org/model@revision (`convert.hub`). Of an adapter
                the other arguments are those of its base, which its settings name.
            options: the fields.
            revision: branch, tag or commit on the hub; its commit goes into an adapter's settings.
            random_state: unused; `get_peft_model` has the seed of the adapters.
            qat_scheme: with full_finetuning, as of `get_peft_model`.

        Further keywords of Unsloth's and transformers' are taken at the values that ask for nothing else than is done
        here (`other_names.LOADING`).

        Returns:
            The model, and its tokenizer.

        Raises:
            ConfigError: arguments that contradict each other or the model.
            ConvertError: what is wrong with the folder; NaN or infinity in it.
        """
        del random_state
        if qat_scheme and not options.full_finetuning:
            raise ConfigError(
                f"from_pretrained: qat_scheme: expected none without full_finetuning, got {shown(qat_scheme, 60)}; "
                "get_peft_model has it for an adapter"
            )
        opened = open_pretrained(model_name, options, revision=revision)
        if options.offload_embedding and opened.config.tie_word_embeddings:
            print("note: offload_embedding: the head reads the table too, which stays where it is", file=sys.stderr)
            options = dataclasses.replace(options, offload_embedding=False)
        model = load_pretrained(opened, options)
        model = with_fake_quantization(model, *qat_scheme_of(qat_scheme)) if qat_scheme else model
        assert model.tokenizer is not None, "a folder without one was refused"
        return ModelHandle(model), model.tokenizer

    @staticmethod
    @keywords(
        LoadOptions,
        _load_options,
        positional=("max_seq_length", "dtype", "load_in_4bit"),
        without=("new_tokens", "special_tokens_map", "rope_scaling", "allow_nonfinite"),
        defaults={"load_in_4bit": False},
    )
    def from_config(
        config: Mapping[str, Any],
        *,
        options: LoadOptions,
        random_state: int = 3407,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        mesh: Mesh | None = None,
    ) -> ModelHandle:
        """A model with random weights, for training from scratch and for benchmarks.

        Where the config's quantization_config says "mxfp4", in 4 bits experts are drawn in MXFP4 and the other matrices
        are not quantised, as in such a folder.

        Args:
            config: as in a config.json.
            options: the fields.
            random_state: seed of the weights.
            tokenizer: saved with the model.
            mesh: of the devices that get parts of the weights (`parallel.make_mesh`); None: one has all.
        """
        return ModelHandle(random_model(config, options, random_state, tokenizer, mesh))

    @staticmethod
    @keywords(
        LoraSettings,
        lambda given: LoraSettings(**given),
        positional=("r", "target_modules", "lora_alpha", "lora_dropout", "bias", "layers_to_transform"),
        defaults={"lora_dropout": 0.0},
        beside=ADAPTER,
    )
    def get_peft_model(
        model: LanguageModel,
        *,
        options: LoraSettings,
        use_gradient_checkpointing: bool | str | None = None,
        qat_scheme: str | None = None,
    ) -> ModelHandle:
        """Attach fresh LoRA adapters, with PEFT's argument names; everything else is frozen.

        The result of a trainer becomes the model that it was made from, too. A model that has such an adapter already,
        as where a notebook's cell runs again, keeps it, and a note says so.

        Args:
            model: without adapters.
            options: the fields.
            use_gradient_checkpointing: as of `from_pretrained`; None keeps the model's.
            qat_scheme: the quantisation that the merged weights are trained for, one of `other_names.QAT_SCHEMES`, over
                a base in its own 16 bits or in float32; None: none.

        Further keywords of Unsloth's and PEFT's are taken at the values that ask for nothing else than is done here
        (`other_names.ADAPTER`).

        Raises:
            ConfigError: a value that is not supported, or settings that match no module.
        """
        origin, model = model if isinstance(model, ModelHandle) else None, value_of(model)
        check_model(model)
        if use_gradient_checkpointing is not None:
            asked = _load_options({"use_gradient_checkpointing": use_gradient_checkpointing}).settled()
            model = with_checkpointing(model, asked.remat)
            model = model.with_options(use_gradient_checkpointing=asked.use_gradient_checkpointing)
        options, renamed = with_usual_names(options, model.config)
        kept = origin is not None and origin.is_adapted and has_adapter(model, options)  # a base is to be loaded again
        if kept and bool(qat_scheme) == (model.quantization_aware is not None):
            print("note: get_peft_model: the model has such an adapter already, and keeps it", file=sys.stderr)
            return ModelHandle(model, origin)
        model = with_fresh_adapter(model, options)
        assert model.lora is not None, "it has been attached"
        for note in filter(None, (renamed, tables_note(model.lora, model.config))):
            print(f"note: {note}", file=sys.stderr)
        model = with_fake_quantization(model, *qat_scheme_of(qat_scheme)) if qat_scheme else model
        return ModelHandle(model, origin)

    @staticmethod
    def for_inference(model: Model, **others: Any) -> Model:
        """The model itself: it is a value that trains and generates as it is.

        Args:
            model: any.
            others: Unsloth's keywords, which change nothing here.
        """
        del others
        return model

    for_training = for_inference

    @staticmethod
    def load_adapter(model: LanguageModel, folder: str | Path, **settings: Any) -> ModelHandle:
        """Attach the adapter of a PEFT folder to a model, which stays as it is; see `adapters.load_adapter`.

        The result of a trainer becomes the model that it was made from, too.

        Args:
            model: without adapters.
            folder: as there.
            settings: as there.

        Raises:
            ConvertError: what is wrong with the folder.
            ConfigError: it is not for this model (every misfit named).
        """
        origin = model if isinstance(model, ModelHandle) else None
        return ModelHandle(load_adapter(value_of(model), folder, **settings), origin)


def load_pretrained(opened: OpenModel, options: LoadOptions, *, fake_quantization: bool = True) -> LanguageModel:
    """Load the weights of a model that is open, with its adapter if it has one.

    Args:
        opened: the model.
        options: that it was opened with.
        fake_quantization: of an adapter from quantisation-aware training, compute as it was trained.

    Raises:
        ConfigError: options that contradict the model.
        ConvertError: NaN or infinity in the weights, or a file that was cut short.
    """
    model = load_opened(opened, options)
    model = with_host_embedding(model) if options.offload_embedding else model
    return model if opened.adapter is None else add_adapter(model, opened.adapter, fake_quantization=fake_quantization)


def load_opened(opened: OpenModel, options: LoadOptions, mesh: Mesh | None = None) -> LanguageModel:
    """Load the weights of a model that is open, without its adapter.

    Args:
        opened: the model.
        options: that it was opened with; the table of embeddings is on the device until it has its adapter.
        mesh: of the devices that get parts of the weights; None: one has all.

    Raises:
        ConfigError: options that contradict the model.
        ConvertError: NaN or infinity in the weights, or a file that was cut short.
    """
    config = opened.config
    assert opened.weights is not None, "without weights it describes a model that is not downloaded"
    execution, precision = Execution.of(options, config), make_precision(options, config)
    plan, weights = load_weights(opened.weights, config, options, precision, execution, mesh)
    if opened.new_token_ids:
        weights = grown(weights, config.vocab_size, opened.known_tokens, opened.new_token_ids)
    decoder = Decoder(config, plan, weights, precision=precision, executor=execution)
    return _of_folder(decoder, opened, options)


def random_model(
    config: Mapping[str, Any],
    options: LoadOptions,
    random_state: int = 3407,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    mesh: Mesh | None = None,
) -> LanguageModel:
    """A model with random weights, as `FastLanguageModel.from_config` has it, which has the arguments."""
    parsed = read_config(config, where="config")
    execution, precision = Execution.of(options, parsed), make_precision(options, parsed)
    options = dataclasses.replace(options, max_seq_length=row_length(options, parsed))
    if tokenizer is not None:
        check_vocabulary(tokenizer, parsed, "from_config")
    mxfp4 = (config.get("quantization_config") or {}).get("quant_method") in FORMATS["mxfp4"].methods
    key = jax.random.key(random_state)
    decoder = Decoder(
        parsed,
        *random_weights(parsed, key, options, precision, execution, mxfp4=mxfp4, mesh=mesh),
        precision=precision,
        executor=execution,
    )
    model = _of_decoder(decoder, config, options).replace(tokenizer=tokenizer)
    return with_host_embedding(model) if options.offload_embedding else model


def zeros_of(opened: OpenModel, options: LoadOptions) -> LanguageModel:
    """The model that `load_opened` gives, with zeros in the place of the weights, which are not read: for shapes.

    Args:
        opened: the model; its weights need not be there.
        options: that it was opened with; the layers' matrices are on the device.

    Raises:
        ConfigError: options that contradict the model.
    """
    config = opened.config
    execution, precision = Execution.of(options, config), make_precision(options, config)
    weights = zero_weights(opened, options, precision, execution)
    return _of_folder(Decoder(config, *weights, precision=precision, executor=execution), opened, options)


def shapes_of(make: Callable[[], LanguageModel]) -> LanguageModel:
    """A model whose arrays are shapes (`jax.ShapeDtypeStruct`): nothing is computed.

    Args:
        make: makes the model, of zeros where weights would be read.
    """
    models: list[LanguageModel] = []

    def arrays() -> tuple[Any, Any]:
        models.append(make())
        return models[0].trainable, models[0].frozen

    trainable, frozen = jax.eval_shape(arrays)
    return models[0].replace(trainable=trainable, frozen=frozen)


def _of_folder(decoder: Decoder, opened: OpenModel, options: LoadOptions) -> LanguageModel:
    """The model of a decoder with the weights, or zeros, of a folder."""
    source = opened.source
    options = dataclasses.replace(options, max_seq_length=opened.max_seq_length)
    return _of_decoder(decoder, opened.hf_config, options).replace(
        folder=source.folder,
        tokenizer=opened.base_tokenizer,
        new_token_ids=opened.new_token_ids,
        source=None if source.name is None or source.revision is None else (source.name, source.revision),
        base=opened.held_as(options, decoder.precision.float32_modules),
    )


def _of_decoder(decoder: Decoder, hf_config: Mapping[str, Any], options: LoadOptions) -> LanguageModel:
    """A model without folder and tokenizer; its options are as they came out."""
    precision, execution = decoder.precision, decoder.executor
    assert isinstance(execution, Execution)
    if options.offload_layers:
        check_host_layers(decoder.plan, options.full_finetuning)
    freeze(decoder, frozen_arrays(decoder.config, options.unfrozen_parameters))
    graphdef, trainable, frozen = nnx.split(decoder, nnx.Param if options.full_finetuning else nnx.Nothing(), ...)
    frozen = nnx.to_pure_dict(frozen)
    leaves = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, NF4Weight))
    options = options.settled(
        dtype=str(precision.dtype),
        float32_modules=sorted(map(str, precision.float32_modules)) or None,
        load_in_4bit=any(isinstance(leaf, NF4Weight) for leaf in leaves),
    )
    return LanguageModel(
        config=decoder.config,
        hf_config=dict(hf_config),
        folder=None,
        graphdef=graphdef,
        trainable=nnx.to_pure_dict(trainable),
        frozen=frozen,
        plan=tuple(decoder.plan),
        lora=None,
        options=options,
        precision=precision,
        execution=execution,
        tokenizer=None,
    )
