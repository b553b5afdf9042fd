"""The format of a weight by config.json alone, of a folder whose weights are elsewhere."""

import os
from collections.abc import Mapping
from typing import Any

from convert.checkpoint import CONFIG
from convert.errors import unexpected
from convert.formats import FORMATS
from convert.formats.format import Format
from convert.model.spec import QUANTIZED, WeightSpec


def quantization_methods() -> list[str]:
    """Values of ``quant_method`` in config.json of folders that are read."""
    return list(dict.fromkeys(method for form in FORMATS.values() for method in form.methods))


def check_quantization(config: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    """Refuse a ``quantization_config`` of another format.

    Args:
        config: Contents of config.json.
        file: Its path, for messages.

    Raises:
        ConvertError: The message names the field.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        raise unexpected(file, "quantization_config", "an object or null", quantization)
    method, known = quantization.get("quant_method"), quantization_methods()
    if method not in known:
        expected = f"{', '.join(map(repr, known))} or no quantization"
        raise unexpected(file, "quantization_config.quant_method", expected, method)
    for form in FORMATS.values():
        if method in form.methods:
            form.check_config(quantization, file)
    if not any(form.declares(quantization) for form in FORMATS.values()):
        raise unexpected(file, "quantization_config", "weights in a format that is read", quantization)


def declared_format(config: Mapping[str, Any], spec: WeightSpec) -> tuple[Format, str]:
    """The format that a folder's config.json declares for a weight, and the dtype that it decodes to.

    Args:
        config: contents of config.json.
        spec: the weight.

    Raises:
        ConvertError: a quantisation that is not supported.
    """
    named = config.get("dtype", config.get("torch_dtype"))
    dtype = named if named in ("float32", "bfloat16", "float16") else "bfloat16"
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return FORMATS[dtype], dtype
    check_quantization(config, CONFIG)
    form = next(form for form in FORMATS.values() if form.declares(quantization))
    skipped = [
        name
        for key in ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")
        for name in quantization.get(key) or ()
    ]
    packed = spec.kind in QUANTIZED and (not form.shared_experts or spec.path.of_experts)
    packed &= not any(f".{spec.name}.".find(f".{name}.") >= 0 for name in skipped)
    return (form if packed else FORMATS[dtype]), dtype
