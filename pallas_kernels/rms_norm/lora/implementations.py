"""The implementations of the backward pass by name, in order of preference.

    forward(x, scale, rstd, mean, lora_A, dresidual, dnormed, dproducts) -> (gradient of x, of lora_A)

`scale` is the weight with its offset, `mean` that of g·x·rstd.
"""

from jax import Array

from pallas_kernels import compat, dispatch
from pallas_kernels.dispatch import Implementation, Registry
from pallas_kernels.low_rank import INPUT, Case
from pallas_kernels.rms_norm.lora import config, triton, xla


def _triton(*arguments) -> tuple[Array, Array]:
    compat.silence_triton_deprecation()
    capability, lora_A = dispatch.target().compute_capability, arguments[4]
    assert capability is not None
    return triton.backward(*arguments, config.backward_config(capability, lora_A.shape[0]))


REGISTRY: Registry[Case] = Registry(
    "rms_norm.lora",
    {
        "triton": Implementation(INPUT["triton"].why_not, _triton),
        "xla": Implementation(lambda case: None, xla.backward),
    },
    lambda case: ("triton", "xla"),
)
