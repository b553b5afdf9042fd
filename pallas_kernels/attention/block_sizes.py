"""The kernels of attention whose block sizes are measured, and the cases that these depend on.

`tuned.json` is the shipped table: written by `fastjax bench attention --autotune --shipped tuned.json` on the card that
it names, with the date and the command in it.
"""

from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention.options import Options
from pallas_kernels.autotune import Kernel

_HERE = Path(__file__).parent
SHIPPED = _HERE / "tuned.json"


def kernel(name: str, folder: str) -> Kernel:
    """A kernel of attention.

    Args:
        name: of the kernel, after "attention.".
        folder: of the implementation.
    """
    return Kernel(f"attention.{name}", (_HERE / folder, _HERE / "dropout.py", _HERE / "ranges.py"), SHIPPED)


def facts(dtype: DTypeLike, size: int, value_size: int, options: Options, *, documents: bool, grouped: bool) -> str:
    """The case of block sizes: "bfloat16 D=128 Dv=128 causal documents grouped".

    Args:
        dtype: of q, k and v.
        size: D.
        value_size: Dv.
        options: of the call; only whether there is a window, a cap or dropout counts.
        documents: whether there are documents.
        grouped: whether each key head has an even number of query heads.
    """
    flags = {
        "causal": options.causal,
        "documents": documents,
        "grouped": grouped,
        "window": options.sliding_window is not None,
        "cap": options.logits_soft_cap is not None,
        "dropout": options.dropout_rate > 0.0,
    }
    return " ".join(
        [jnp.dtype(dtype).name, f"D={size}", f"Dv={value_size}", *(name for name, is_set in flags.items() if is_set)]
    )
