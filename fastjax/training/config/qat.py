"""The setting `training.qat`: the quantisation that a model is trained for."""

import dataclasses
from typing import Annotated, Literal

from annotated_types import Interval

from fastjax.options import checked

#: The keys of `quantization.fake.WEIGHTS` and of `ACTIVATIONS`, which need JAX.
QATWeights = Literal[
    "int4-32",
    "int4-128",
    "int4-32-zeros",
    "int4-128-zeros",
    "int8",
    "fp8-row",
    "fp8-tensor",
    "fp8-block",
    "nf4",
    "mxfp4",
    "nvfp4",
    "q4_0",
    "q8_0",
]
QATActivations = Literal["int8", "fp8", "fp8-128", "nvfp4"]
QATScheme = Literal["int4_weight_only", "int8_dynamic_int4", "float8", "nvfp4", "nf4", "mxfp4", "q4_0", "q8_0"]


@checked("training.qat")
class QATSettings:
    """The quantisation that a model is trained for."""

    weights: QATWeights
    """format of the layers' matrices."""
    activations: QATActivations | None = None
    """format of their inputs; null: these stay."""
    start_step: Annotated[int, Interval(ge=0)] = 0
    """steps before it comes into force."""
    modules_to_not_quantize: list[str] = dataclasses.field(default_factory=list)
    """names of modules, or ends of names, that are left out."""


#: The schemes that have a name.
NAMED: dict[str, QATSettings] = {
    "int4_weight_only": QATSettings("int4-32"),
    "int8_dynamic_int4": QATSettings("int4-32", "int8"),
    "float8": QATSettings("fp8-row", "fp8"),
    "nvfp4": QATSettings("nvfp4", "nvfp4"),
    "nf4": QATSettings("nf4"),
    "mxfp4": QATSettings("mxfp4"),
    "q4_0": QATSettings("q4_0"),
    "q8_0": QATSettings("q8_0"),
}
