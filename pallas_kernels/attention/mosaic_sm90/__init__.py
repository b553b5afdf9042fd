"""Attention for Hopper (sm_90a) in Mosaic GPU: wgmma, TMA, warp specialisation.

Three kernels: `forward`, and for the gradients `backward_dq` and `backward_dkv`, each of which computes the weights
again. Every tile skips the keys (queries) outside the ranges that its documents, causality and window leave.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.call import Call, Cotangents, Operands, Options
from pallas_kernels.attention.mosaic_sm90.backward_dkv import backward_dkv
from pallas_kernels.attention.mosaic_sm90.backward_dq import backward_dq
from pallas_kernels.attention.mosaic_sm90.common import LOG2E, SWIZZLED_ROWS
from pallas_kernels.attention.mosaic_sm90.config import (
    CallFacts,
    DkvConfig,
    DqConfig,
    ForwardConfig,
    dkv_config,
    dq_config,
    forward_config,
)
from pallas_kernels.attention.mosaic_sm90.forward import forward as _forward
from pallas_kernels.attention.ranges import TILE
from pallas_kernels.dispatch import Target, num_cores

SIZES = (64, 80, 96, 112, 128, 192, 256)
"""Head sizes, of keys and of values."""


def why_not(_: Target, call: Call) -> str | None:
    """Why the kernels cannot serve a call of 16-bit operands, in one clause, or None when they can."""
    q, v = call.q, call.v
    if q.shape[3] not in SIZES or v.shape[3] not in SIZES:
        return f"the head size must be one of {SIZES}, not {q.shape[3]} for keys and {v.shape[3]} for values"
    if call.options.scale <= 0:
        return f"the scale must be positive, not {call.options.scale}"
    return None


def forward(
    operands: Operands,
    options: Options,
    *,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Output and log-sum-exp; arguments and results as `implementations` says.

    Args:
        operands: of the call, bfloat16 or float16.
        options: of the call.
        config: block sizes; by default those of such a call.
        interpret: parameters of Mosaic's interpreter; None compiles.
    """
    q, k, v, mask, sinks, seed = operands
    config = config or forward_config(_facts(operands, options))
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    arrays = (*(_copyable(array) for array in (q, k, v)), mask, sinks, seed)
    common: Any = {"keys": k.shape[1], "ctas": num_cores(), "interpret": interpret}
    out, lse = _forward(*arrays, options=options, config=config, **common)
    return out[:, : q.shape[1]], lse[:, :, : q.shape[1]]


def backward(
    operands: Operands,
    cotangents: Cotangents,
    options: Options,
    *,
    dq: DqConfig | None = None,
    dkv: DkvConfig | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv; arguments as `implementations` says.

    Args:
        operands: of the forward pass.
        cotangents: of its results.
        options: of the call.
        dq: block sizes of the kernel for dq; by default those of such a call.
        dkv: block sizes of the kernel for dk and dv.
        interpret: parameters of Mosaic's interpreter; None compiles.
    """
    q, k, v, mask, _, seed = operands
    lse, delta, dout, _ = cotangents
    padding = ((0, 0), (0, 0), (0, -q.shape[1] % TILE))
    # Negative, in the products' own units: accumulators start from them instead of from 0.
    units = 1 / options.scale if options.logits_soft_cap is None else LOG2E
    statistics = (jnp.pad(-units * lse, padding), jnp.pad(-delta, padding))
    arrays = (*(_copyable(array) for array in (q, k, v, dout.astype(q.dtype))), *statistics, mask, seed)
    common: Any = {"options": options, "ctas": num_cores(), "interpret": interpret}
    call = _facts(operands, options)
    dq, dkv = dq or dq_config(call), dkv or dkv_config(call)
    gradients = backward_dq(*arrays, config=dq, keys=k.shape[1], **common), *backward_dkv(*arrays, config=dkv, **common)
    found_q, found_k, found_v = (g[:, : of.shape[1]] for g, of in zip(gradients, (q, k, v), strict=True))
    return found_q, found_k, found_v


def _copyable(array: Array) -> Array:
    """Rows [B, S, H, D] with zeros behind the last one, to a multiple of 8.

    The copy engine takes an array of swizzled tiles, which are 8 rows high. A length that is a multiple of 8 costs
    nothing, another one a copy.
    """
    missing = -array.shape[1] % SWIZZLED_ROWS
    return jnp.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else array


def _facts(operands: Operands, options: Options) -> CallFacts:
    q, k, v, mask, *_ = operands
    grouped = q.shape[2] // k.shape[2] % 2 == 0  # tiles of two query heads that share their keys are possible
    return CallFacts(q.dtype, q.shape[3], v.shape[3], options, mask.ranges is not None, grouped)
