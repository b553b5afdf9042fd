"""Block sizes of the attention kernels that were measured: `tuned.json`, by card, kernel and case.

A kernel's own guess serves the others. The table says when and with which JAX its entries were measured.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.attention.options import Options

TUNED = Path(__file__).parent / "tuned.json"

Config = TypeVar("Config")


def measured(kernel: str, case: str, guess: Config) -> Config:
    """The measured block sizes of a kernel on `dispatch.target()`, or its guess.

    Args:
        kernel: "mosaic.forward", for example.
        case: of `facts`.
        guess: the kernel's own, a dataclass.
    """
    fields = entries().get(f"{dispatch.target().device_kind} | attention.{kernel} | {case}")
    return guess if fields is None else type(guess)(**fields)


@functools.cache
def entries() -> Mapping[str, Mapping[str, Any]]:
    """The table: card, kernel and case → the fields of the config."""
    return json.loads(TUNED.read_text(encoding="utf-8"))["entries"]


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
