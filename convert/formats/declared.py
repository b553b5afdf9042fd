"""The format of a weight by config.json alone, of a folder whose weights are elsewhere."""

from collections.abc import Mapping
from typing import Any

from convert.checkpoint import CONFIG
from convert.errors import unexpected
from convert.formats import FORMATS
from convert.formats.format import Format
from convert.model.spec import QUANTIZED, WeightSpec


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
    method = quantization.get("quant_method")
    forms = [form for form in FORMATS.values() if method in form.methods]
    if not forms:
        known = sorted({name for form in FORMATS.values() for name in form.methods})
        raise unexpected(CONFIG, "quantization_config.quant_method", f"one of {', '.join(known)}", method)
    nested = bool(quantization.get("bnb_4bit_use_double_quant"))
    form = forms[0] if method != "bitsandbytes" else FORMATS["nf4-nested" if nested else "nf4"]
    skipped = [
        name
        for key in ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")
        for name in quantization.get(key) or ()
    ]
    packed = spec.kind in QUANTIZED and (not form.shared_experts or spec.path.of_experts)
    packed &= not any(f".{spec.name}.".find(f".{name}.") >= 0 for name in skipped)
    return (form if packed else FORMATS[dtype]), dtype
