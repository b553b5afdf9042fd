"""The contenders: this project's implementations and the attention kernels of JAX and tokamax.

A contender turns a problem into a function of its arrays, or raises the reason why it cannot. Work that a kernel leaves
to its user (repeated key heads, the scale) is timed with it.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fastjax.bench.attention.cases import Problem
from pallas_kernels import compat
from pallas_kernels.attention import attention

Attend = Callable[[dict[str, Any]], Array]


def ours(implementation: str, problem: Problem) -> Attend:
    """The attention of this project by one of its implementations, of the problem's arrays."""

    def attend(arrays: dict[str, Any]) -> Array:
        return attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            segment_ranges=arrays.get("ranges"),
            sinks=arrays.get("sinks"),
            implementation=implementation,
            **problem.options,
        )

    return attend


def _refuse(problem: Problem, whose: str, *, documents: bool) -> None:
    """Raise where JAX's kernels lack a feature of the problem."""
    asked = {
        "no sliding window": problem.window is not None,
        "no soft cap": problem.cap is not None,
        "no sinks": problem.sinks,
        "no documents": documents and problem.documents is not None,
    }
    for what, wanted in asked.items():
        if wanted:
            raise NotImplementedError(f"{whose} has {what}")


def _jax_triton(problem: Problem) -> Attend:
    """jax.experimental.pallas.ops.gpu.attention; it takes as many key heads as query heads."""
    _refuse(problem, "JAX's Triton kernel", documents=False)
    compat.silence_triton_deprecation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.11 points to tokamax
        from jax.experimental.pallas.ops.gpu import attention as kernels

    block = 64 if problem.size > 128 else 128
    blocks = kernels.BlockSizes(block, block, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32)

    def attend(arrays: dict[str, Any]) -> Array:
        k, v = (jnp.repeat(arrays[name], problem.heads // problem.kv_heads, axis=2) for name in ("k", "v"))
        return kernels.mha(
            arrays["q"], k, v, arrays.get("ids"), sm_scale=problem.size**-0.5, causal=True, block_sizes=blocks
        )

    return attend


def _jax_mosaic(problem: Problem) -> Attend:
    """jax.experimental.pallas.ops.gpu.attention_mgpu; it does not scale the logits."""
    kernels = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    _refuse(problem, "JAX's Mosaic kernel", documents=True)
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = kernels.TuningConfig(
        block_q=64, block_kv=64 if problem.size > 128 else 128, max_concurrent_steps=2, causal=True, **blocks
    )

    def attend(arrays: dict[str, Any]) -> Array:
        if arrays["q"].dtype != jnp.float16:
            raise NotImplementedError(f"JAX's Mosaic kernel takes float16 alone, not {arrays['q'].dtype}")
        q = arrays["q"] * jnp.asarray(problem.size**-0.5, arrays["q"].dtype)
        return kernels.attention(q, arrays["k"], arrays["v"], config)

    return attend


def _tokamax(problem: Problem) -> Attend:
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed")
    tokamax = importlib.import_module("tokamax")
    if problem.sinks:
        raise NotImplementedError("tokamax's attention has no sinks")

    def attend(arrays: dict[str, Any]) -> Array:
        ids = arrays.get("ids")
        mask = None if ids is None else ((ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, :, None])[:, None]
        return tokamax.dot_product_attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            mask=mask,
            is_causal=True,
            local_window_size=None if problem.window is None else (problem.window - 1, 0),
            logits_soft_cap=problem.cap,
        )

    return attend


CONTENDERS: dict[str, Callable[[Problem], Attend]] = {
    "mosaic": partial(ours, "mosaic"),
    "cudnn": partial(ours, "cudnn"),
    "triton": partial(ours, "triton"),
    "jax_mosaic": _jax_mosaic,
    "jax_triton": _jax_triton,
    "tokamax": _tokamax,
    "xla": partial(ours, "xla"),
}


def default_contenders() -> list[str]:
    """All but XLA's on a GPU, where it would take most of the time; XLA's alone elsewhere."""
    return [name for name in CONTENDERS if (name == "xla") != (jax.default_backend() == "gpu")]


def both(attend: Attend) -> Callable[[dict[str, Any]], tuple[Array, ...]]:
    """The output and the gradients of q, k and v, for the cotangent among the arrays.

    Args:
        attend: a contender's function.
    """

    def run(arrays: dict[str, Any]) -> tuple[Array, ...]:
        def of(q, k, v):
            return attend(arrays | {"q": q, "k": k, "v": v})

        out, vjp = jax.vjp(of, arrays["q"], arrays["k"], arrays["v"])
        return out, *vjp(arrays["dout"])

    return run
