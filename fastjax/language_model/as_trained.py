"""Models as they were trained: with their adapter, or whole for a quantisation and saved in 16 bits."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.formats import FORMATS
from convert.quantization_aware import QuantizationAware
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.language_model.adapters import check_fits
from fastjax.language_model.loading import FastLanguageModel
from fastjax.language_model.variants import with_fake_quantization


def load_as_trained(
    model_name: str | Path,
    adapter: str | Path | None = None,
    *,
    load_in_4bit: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    allow_nonfinite: bool = False,
    **options: Any,
) -> LanguageModel:
    """A model to compute with, with or without an adapter, which is refused before the weights are read.

    Args:
        model_name: folder, or name on the hub.
        adapter: PEFT's folder, or its name on the hub; None: there is none.
        load_in_4bit: as for `FastLanguageModel.from_pretrained`.
        rope_scaling: as for `FastLanguageModel.from_pretrained`.
        allow_nonfinite: let NaN and infinity through, in the adapter too.
        options: further arguments of `FastLanguageModel.from_pretrained`.

    Raises:
        ConfigError: arguments that contradict each other, or an adapter for another model.
        ConvertError: what is wrong with a folder.
    """
    if adapter is not None:
        check_fits(model_name, adapter, rope_scaling)
    options |= {"load_in_4bit": load_in_4bit, "rope_scaling": rope_scaling, "allow_nonfinite": allow_nonfinite}
    model, _ = FastLanguageModel.from_pretrained(model_name, **options)
    if adapter is None:
        return as_trained(model, load_in_4bit=load_in_4bit)
    return FastLanguageModel.load_adapter(model, adapter, allow_nonfinite=allow_nonfinite)


def as_trained(model: LanguageModel, *, load_in_4bit: bool = False) -> LanguageModel:
    """The same arrays with the fake quantisers of the folder's quantization_aware.json; without one, the model itself.

    Where they cannot be had here, a line on standard error says so.

    Args:
        model: of `from_pretrained`, without an adapter.
        load_in_4bit: whether its layers' matrices were quantised as they were read.
    """
    aware = None if model.folder is None else QuantizationAware.read(model.folder)
    if aware is None or model.lora is not None or model.quantization_aware is not None:
        return model
    if load_in_4bit and aware == QuantizationAware(FORMATS["nf4"].target):
        return model
    try:
        found = with_fake_quantization(model, *aware)
    except ConfigError as error:
        print(
            f"note: {model.folder} was trained for {aware.weights}, and computes without it here: {error}",
            file=sys.stderr,
        )
        return model
    print(f"note: {model.folder} computes as it was trained, with matrices in {aware.weights}", file=sys.stderr)
    return found
