"""A model that was trained whole for a quantisation, and is saved in 16 bits, as it was trained."""

import sys

from convert.formats import FORMATS
from convert.quantization_aware import QuantizationAware
from fastjax.errors import ConfigError
from fastjax.language_model.model import LanguageModel


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
        found = model.with_fake_quantization(*aware)
    except ConfigError as error:
        print(
            f"note: {model.folder} was trained for {aware.weights}, and computes without it here: {error}",
            file=sys.stderr,
        )
        return model
    print(f"note: {model.folder} computes as it was trained, with matrices in {aware.weights}", file=sys.stderr)
    return found
