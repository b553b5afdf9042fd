"""Models as they were trained: with their adapter, or whole for a quantisation and saved in 16 bits."""

import sys
from pathlib import Path

from convert.quantization_aware import QuantizationAware
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.execution.opening import open_pretrained
from fastjax.execution.options import LoadOptions
from fastjax.language_model.loading import load_pretrained
from fastjax.language_model.variants import with_fake_quantization


def load_as_trained(
    model_name: str | Path, adapter: str | Path | None = None, options: LoadOptions | None = None
) -> LanguageModel:
    """A model to compute with, with or without an adapter, which is refused before the weights are read.

    Args:
        model_name: folder, or name on the hub.
        adapter: PEFT's folder, or its name on the hub; None: there is none.
        options: of loading it; None: the layers' matrices in the format that they have, all else by default.

    Raises:
        ConfigError: options that contradict the model, or an adapter for another model.
        ConvertError: what is wrong with a folder.
    """
    options = options or LoadOptions.for_inference()
    return as_trained(load_pretrained(open_pretrained(model_name, options, adapter=adapter), options))


def as_trained(model: LanguageModel) -> LanguageModel:
    """Give a model the fake quantisers of the folder's quantization_aware.json; without one it stays as it is.

    Where they cannot be had here, a line on standard error says so.

    Args:
        model: from a folder; one with an adapter computes as it was trained already.
    """
    aware = None if model.folder is None else QuantizationAware.read(model.folder)
    if aware is None or model.lora is not None or model.quantization_aware is not None:
        return model
    if model.base is not None and model.base.when_read and aware == QuantizationAware(model.base.format):
        return model
    try:
        quantized = with_fake_quantization(model, *aware)
    except ConfigError as error:
        print(
            f"note: {model.folder} was trained for {aware.weights}, and computes without it here: {error}",
            file=sys.stderr,
        )
        return model
    print(f"note: {model.folder} computes as it was trained, with matrices in {aware.weights}", file=sys.stderr)
    return quantized
