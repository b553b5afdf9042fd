"""Writing a model: its adapter for PEFT, its trained weights as a Hugging Face folder, or base and adapter merged."""

import collections
import errno
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from convert.adapters import write_adapter
from convert.card import CARD, is_foreign, write_card
from convert.checkpoint import WEIGHT_FILES
from convert.families import family_for
from convert.files import atomic_folder, scratch_folder
from convert.generation_config import GENERATION_CONFIG, add_ends, missing_ends
from convert.gguf import TYPES, export_gguf, require_gguf
from convert.merge import merge
from convert.saving import save
from fastjax.data.encoding import Encoder
from fastjax.data.modelfile import write_modelfile
from fastjax.data.tokenizer import load_tokenizer
from fastjax.errors import ConfigError, DataError
from fastjax.execution.language_model import LanguageModel, check_logits
from fastjax.execution.stacks import layer_of
from fastjax.language_model.card import gguf_card, model_card
from fastjax.lora.export import export_adapters
from fastjax.lora.tables import shares_whole_table
from fastjax.models.layout import array_at, split_layer
from fastjax.parallel.placing import fetched, spans_processes
from fastjax.parallel.processes import is_primary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_pretrained(model: LanguageModel, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write the trained weights: a PEFT adapter folder, or after full fine-tuning a Hugging Face folder.

    An adapter with new tokens has their rows and the tokenizer that knows them. PEFT's
    `AutoPeftModelForCausalLM.from_pretrained(folder)` then grows the base by itself; before
    `PeftModel.from_pretrained(base, folder)` call `base.resize_token_embeddings(…)` with the rows of this model.

    Tensors that several processes hold are gathered by all of them, one by one; the first process alone writes.

    Args:
        model: one of which something is trained.
        folder: created; appears under its name only when whole.
        tokenizer: saved in place of the model's own; None: that.

    Raises:
        ConfigError: nothing is trained, or there is no checkpoint to take config and tokenizer from.
        OSError: the disk is full, …; nothing is left behind.
    """
    model, folder = _with_tokenizer(model, tokenizer), Path(folder)
    if model.lora is None and not model.full_finetuning:
        raise ConfigError("save_pretrained: nothing is trained here; call get_peft_model, or load with full_finetuning")
    if spans_processes(model.trainable) and not is_primary():
        if model.lora is not None:
            _adapter(model, keep=False)
        else:
            collections.deque(trained_tensors(model, keep=False), maxlen=0)
        return folder
    with atomic_folder(folder, replaces=("adapter_model.*",) if model.lora is not None else WEIGHT_FILES) as whole:
        if model.lora is not None:
            write_adapter(whole, model.lora, _adapter(model), family=family_for(model.hf_config), over=model.base)
        else:
            save(whole, trained_tensors(model), dict(model.hf_config), source=model.folder)
        write_card(whole, model_card(model, folder.name), folder)
        if model.quantization_aware is not None:
            model.quantization_aware.write(whole)
        if model.tokenizer is not None and (model.lora is not None or _has_own_tokenizer(model)):
            _save_tokenizer(model.tokenizer, whole)
        ends = _new_ends(model)
        if ends:
            add_ends(whole, ends, model.folder)  # pyright: ignore[reportArgumentType]
            tokens = ", ".join(model.tokenizer.convert_ids_to_tokens(ends))  # pyright: ignore[reportOptionalMemberAccess]
            print(
                f"note: {GENERATION_CONFIG} names {tokens} beside the base's ends of an answer; without it "
                "transformers and vLLM (--generation-config) do not stop where the chat template ends a turn",
                file=sys.stderr,
            )
    return folder


def save_pretrained_merged(
    model: LanguageModel,
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
        model: with an adapter on a model from a folder; or trained whole, in its folder's own dtype.
        folder: created; appears under its name only when whole.
        tokenizer: saved in place of the model's own; None: that.
        save_method: in place of dtype, Unsloth's name: "merged_16bit", "merged_4bit", "mxfp4", or "lora", which is
            `save_pretrained`.
        dtype: of the result: "bfloat16", "float16", "float32", or a scheme for the layers' matrices, such as "nf4"
            or "int4-128" (`convert.formats.WRITERS`); None: that of the base's files.
        base_in_nf4: add to the 4-bit weights that a 16-bit folder became as it was read, not to the folder's.
        skip: with a scheme as dtype, or base_in_nf4, modules or ends of their names ("layers.0.mlp.down_proj",
            "o_proj") that are not quantised.
        activations: with a scheme, how the layers' inputs are read, as of `convert.quantize.quantize`; None: as
            the adapter was trained for.
        force: replace an existing model folder, as is done anyway with one that an earlier call has written.
        allow_nonfinite: write NaN and infinity instead of refusing.

    Raises:
        ConfigError: there is no adapter, or no base folder.
        ConvertError: the folder is taken, or something is wrong with the base.
        OSError: the disk is full, …; nothing is left behind.
    """
    model, folder = _with_tokenizer(model, tokenizer), Path(folder)
    if save_method == "lora":
        return save_pretrained(model, folder)
    dtype = _merged_dtype(model, save_method, dtype)
    if model.full_finetuning and dtype in (None, model.folder_dtype):
        return save_pretrained(model, folder)
    if model.lora is None or model.folder is None:
        raise ConfigError(
            "save_pretrained_merged: expected an adapter on a model from a folder; save_pretrained writes a model "
            "that was trained whole"
        )
    with scratch_folder(folder) as adapter:
        save_pretrained(model, adapter)
        merge(
            model.folder,
            adapter,
            folder,
            config=model.hf_config,
            dtype=dtype,
            base_in_nf4=base_in_nf4,
            skip=skip,
            activations=activations,
            force=force or _is_written_here(model, folder),
            allow_nonfinite=allow_nonfinite,
        )
    return folder


def save_pretrained_gguf(
    model: LanguageModel,
    folder: str | Path,
    tokenizer: Any = None,
    quantization_method: str | Sequence[str] | None = None,
    *,
    base_in_nf4: bool = False,
    skip: Sequence[str] = (),
    pre_tokenizer: str | None = None,
    force: bool = False,
) -> Any:
    """Write GGUF files for llama.cpp, the adapter merged first, as `convert.gguf.export_gguf` does.

    Beside each stands a Modelfile for Ollama (`fastjax.data.modelfile`), and beside all a model card.

    Args:
        model: with an adapter, or trained whole.
        folder: of the files; created.
        tokenizer: in place of the model's own; None: that.
        quantization_method: type of the matrices, one of `convert.gguf.TYPES` in letters of either case, or a list of
            them, of each of which a file is written; None: q8_0.
        base_in_nf4: as of `save_pretrained_merged`.
        skip: modules, or ends of their names, whose matrices keep their dtype.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer, where it is unknown here.
        force: replace existing files, as is done anyway with those of an earlier call.

    Returns:
        The file, named by the folder and the type; of a list of types the list of files.

    Raises:
        ConfigError: as of `save_pretrained_merged`.
        ConvertError: as of `export_gguf`.
        OSError: the disk is full, …; nothing half-written is left.
    """
    model, folder = _with_tokenizer(model, tokenizer), Path(folder)
    kinds = _gguf_types(quantization_method)
    check_logits(model, "save_pretrained_gguf")
    require_gguf()  # before anything is merged
    files = [folder / f"{folder.name}-{kind}.gguf" for kind in kinds]
    force = force or _is_written_here(model, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(files[0]) as scratch:
        whole = scratch / "model"
        if model.full_finetuning:
            save_pretrained(model, whole)
        else:
            save_pretrained_merged(model, whole, save_method="merged_16bit", base_in_nf4=base_in_nf4)
        for kind, file in zip(kinds, files, strict=True):
            export_gguf(whole, file, type=kind, skip=skip, pre_tokenizer=pre_tokenizer, force=force)
            write_modelfile(file, whole, force=force)
    write_card(folder, gguf_card(model, files))
    return files if isinstance(quantization_method, list | tuple) else files[0]


def trained_tensors(model: LanguageModel, *, keep: bool = True) -> Iterator[tuple[str, Any]]:
    """The trained weights by path, in the checkpoint's order, each on the host when it is asked for.

    Args:
        model: trained whole.
        keep: whether they are wanted here; otherwise this process helps the others to them, and gets None for each.
    """
    tree, config = _together(model.trainable, model.frozen), model.config
    dtype = jnp.dtype(model.folder_dtype)

    def host(array: Any) -> np.ndarray | None:
        return fetched(array.astype(dtype), keep)

    first, *last = (spec.path for spec in config.specs if spec.path.layer is None)
    yield first, host(array_at(tree, first))
    runs = [[tree["layers"][r][p] for p in range(run.period)] for r, run in enumerate(model.plan)]
    for index in range(config.num_hidden_layers):
        for path, array in split_layer(layer_of(runs, model.plan, index), config, index).items():
            yield path.in_layer(index), fetched(array, keep) if path.leaf == "choice_bias" else host(array)
    for path in last:
        yield path, host(array_at(tree, path))


def _with_tokenizer(model: LanguageModel, tokenizer: Any) -> LanguageModel:
    return model if tokenizer is None else model.replace(tokenizer=tokenizer)


def _is_written_here(model: LanguageModel, folder: Path) -> bool:
    """Whether a folder holds what an earlier call has written, and is not the model's own base."""
    if model.folder is not None and Path(model.folder).resolve() == folder.resolve():
        return False
    return (folder / CARD).is_file() and not is_foreign(folder / CARD)


def _gguf_types(method: str | Sequence[str] | None) -> list[str]:
    """The types of GGUF files, by names of Unsloth's too."""
    methods = method if isinstance(method, list | tuple) else [method]
    named = {None: "q8_0", "fast_quantized": "q8_0", "not_quantized": "bf16"}
    kinds = [named.get(one, str(one).lower()) for one in methods]
    if not kinds or (unknown := [kind for kind in kinds if kind not in TYPES]):
        raise ConfigError(
            f"quantization_method: expected one of {', '.join(TYPES)}, or a list of them, got "
            f"{', '.join(unknown) if kinds else 'none'}; for K-quants write f16 or bf16 and use llama.cpp's "
            "llama-quantize"
        )
    return list(dict.fromkeys(kinds))


def _merged_dtype(model: LanguageModel, save_method: str | None, dtype: str | None) -> str | None:
    """The dtype that Unsloth's name of a way to save stands for."""
    if save_method is None:
        return dtype
    if dtype is not None:
        raise ConfigError(f"save_method: expected none beside dtype, got {save_method}")
    dtype = model.folder_dtype
    known = {"merged_16bit": dtype if dtype in ("bfloat16", "float16") else "bfloat16", "mxfp4": "mxfp4"}
    known |= dict.fromkeys(("merged_4bit", "merged_4bit_forced"), "nf4")
    if save_method not in known:
        raise ConfigError(f"save_method: expected one of {', '.join([*known, 'lora'])}, got {save_method}")
    return known[save_method]


def _adapter(model: LanguageModel, *, keep: bool = True) -> dict[str, np.ndarray]:
    assert model.lora is not None
    return export_adapters(model.trainable, model.plan, shares_whole_table(model.lora, model.config), keep=keep)


def _together(trained: Mapping[Any, Any], constant: Mapping[Any, Any]) -> dict[Any, Any]:
    """One tree of trained arrays and those that are never trained."""
    both = {key: _together(trained[key], constant[key]) for key in trained.keys() & constant.keys()}
    return {**trained, **constant, **both}


def _has_own_tokenizer(model: LanguageModel) -> bool:
    """Whether the tokenizer differs from the checkpoint's, whose files are copied byte for byte."""
    if model.folder is None or model.new_token_ids:
        return True
    own, base = model.tokenizer, load_tokenizer(model.folder)
    return any(getattr(own, name, None) != getattr(base, name) for name in ("chat_template", "special_tokens_map"))


def _new_ends(model: LanguageModel) -> list[int]:
    """The ends of the chat template's turns that the base does not name."""
    tokenizer = model.tokenizer
    if model.folder is None or not getattr(tokenizer, "chat_template", None) or model.config.scored:
        return []
    try:
        ends = Encoder(tokenizer).stop_tokens()  # pyright: ignore[reportArgumentType]
    except (ConfigError, DataError):  # no EOS, or no template for conversations of two messages
        return []
    return list(missing_ends(model.folder, ends))


def _save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # its Rust half raises plain exceptions, for a full disk too
        full = "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(folder)) from error
