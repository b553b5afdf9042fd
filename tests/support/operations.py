"""Calls of every public operation of pallas_kernels, tiny, for tests of them all."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    attention,
    cross_entropy,
    float8,
    gated_delta,
    glu,
    grouped_matmul,
    low_rank,
    moe_routing,
    nf4,
    rms_norm,
    rope,
    short_conv,
    split_rope,
)
from pallas_kernels.glu import lora as glu_lora
from pallas_kernels.rms_norm import lora as norm_lora
from pallas_kernels.split_rope import lora as rope_lora

ROWS = 4
"""Leading axis of the operands that are split."""


class Case(NamedTuple):
    """A call of an operation.

    Attributes:
        function: of the operands.
        split: the numbers of the operands whose leading axis is that of the rows; the devices share the others.
        differentiated: the numbers of those with a gradient.
        operands: arrays and trees of them.
        of_rows: whether a device's results are those of its rows alone: not where a group or a sum goes over all rows.
    """

    function: Any
    split: tuple[int, ...]
    differentiated: tuple[int, ...]
    operands: tuple[Any, ...]
    of_rows: bool = True


def cases() -> dict[str, Case]:
    """The operations by their modules and names."""
    rng = np.random.default_rng(0)

    def f(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def u8(*shape):
        return jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)

    def f8(*shape):
        return f(*shape).astype(jnp.float8_e4m3fn)

    def project(trainable, frozen, hidden):
        return hidden @ trainable.T

    def head(operation):
        call = lambda trainable, hidden, targets: operation(project, trainable, None, hidden, targets, chunk_size=2)  # noqa: E731
        return call, (1, 2), (0, 1), (f(8, 4), f(ROWS, 3, 4), targets)

    tables = f(ROWS, 4, 2), f(ROWS, 4, 2)
    targets = jnp.asarray([[1, 2, -100]] * ROWS, jnp.int32)
    ids = jnp.asarray([[1, 1, 2, 0]] * ROWS, jnp.int32)
    ranges = attention.segment_ranges(ids)
    sizes = jnp.asarray([1, 3], jnp.int32)
    places = jnp.asarray([0, 0, 1, 1], jnp.int32)
    experts = jnp.asarray([[0, 1], [1, 2], [3, 0], [1, 3]], jnp.int32)
    settings = moe_routing.RouterSettings(2)
    packed = u8(64, 32), jnp.abs(f(64, 1))
    inner = f(2, 4, 2)

    def attend(q, k, v, ranges, sinks):
        return attention.attention(q, k, v, segment_ranges=ranges, sinks=sinks)

    def grouped(x, w, z, b, sizes, rows):
        return grouped_matmul.grouped_matmul(x, w, sizes, rows=rows, low_rank=(z, b))

    def combined(y, weights, experts):
        return moe_routing.combine(y, weights, moe_routing.sort_by_expert(experts, 4))

    def load(logits):
        return moe_routing.measure_load(moe_routing.route(logits, settings))

    def unit_backward(gate_up, products, lora_B, dh, down_A, dproducts):
        given = gate_up, glu_lora.Inner(products, lora_B), dh, (down_A, dproducts)
        return glu_lora.glu_lora_backward(*given, activation="silu")

    def norm_backward(x, weight, rstd, products, lora_A, *gradients):
        return norm_lora.rms_norm_lora_backward(
            norm_lora.Normed(x, weight, rstd, products), lora_A, norm_lora.Gradients(*gradients)
        )

    matrix: dict[str, Any] = {"shape": (64, 64)}
    x, wide, thin = f(ROWS, 4), f(ROWS, 64), f(ROWS, 2)
    heads = {"heads": (2, 1)}
    return {
        "attention.attention": Case(
            attend, (0, 1, 2, 3), (0, 1, 2, 4), (f(ROWS, 4, 2, 4), f(ROWS, 4, 1, 4), f(ROWS, 4, 1, 4), ranges, f(2))
        ),
        "attention.segment_ranges": Case(attention.segment_ranges, (0,), (), (ids,)),
        "cross_entropy.chunked_cross_entropy": Case(*head(cross_entropy.chunked_cross_entropy), of_rows=False),
        "cross_entropy.token_log_probs": Case(*head(cross_entropy.token_log_probs)),
        "nf4.quantize": Case(nf4.quantize, (0,), (), (wide,)),
        "nf4.dequantize": Case(partial(nf4.dequantize, dtype=jnp.float32, **matrix), (), (), packed),
        "nf4.matmul": Case(partial(nf4.matmul, **matrix), (0,), (0,), (wide, *packed)),
        "nf4.dequantize_float8": Case(partial(nf4.dequantize_float8, **matrix), (), (), packed),
        "nf4.quantize_absmax": Case(nf4.quantize_absmax, (0,), (), (jnp.abs(f(ROWS)),), of_rows=False),
        "nf4.dequantize_absmax": Case(nf4.dequantize_absmax, (), (), (u8(8), f(1), f(256), f())),
        "nf4.reorder": Case(partial(nf4.reorder, source="split", to="bitsandbytes"), (0,), (), (u8(ROWS, 32),)),
        "float8.matmul": Case(
            float8.matmul,
            (0, 1),
            (),
            (f8(ROWS, 64), jnp.exp2(jnp.round(f(ROWS))), f8(16, 64), jnp.exp2(jnp.round(f(16)))),
        ),
        "float8.quantize_rows": Case(float8.quantize_rows, (0,), (), (wide,)),
        "float8.quantize_columns": Case(float8.quantize_columns, (0,), (), (wide,), of_rows=False),
        "rms_norm.rms_norm": Case(
            lambda x, weight, eps: rms_norm.rms_norm(x, weight, eps=eps), (0,), (0, 1), (x, f(4), f() ** 2)
        ),
        "rms_norm.rms_norm_in_stream": Case(
            lambda x, weight, eps: rms_norm.rms_norm_in_stream(x, weight, eps=eps), (0,), (0, 1), (x, f(4), f() ** 2)
        ),
        "rope.rope": Case(rope.rope, (0, 1, 2), (0,), (f(ROWS, 4, 2, 4), *tables)),
        "gated_delta.gated_delta": Case(
            lambda q, k, v, decay, beta, ids: gated_delta.gated_delta(
                q, k, v, -(decay**2), beta, scale=0.5, segment_ids=ids
            ),
            (0, 1, 2, 3, 4, 5),
            (0, 1, 2, 3, 4),
            (f(ROWS, 4, 1, 4), f(ROWS, 4, 1, 4), f(ROWS, 4, 2, 8), f(ROWS, 4, 2), f(ROWS, 4, 2), ids),
        ),
        "short_conv.short_conv": Case(
            lambda x, weight, ids: short_conv.short_conv(x, weight, segment_ids=ids),
            (0, 2),
            (0, 1),
            (f(ROWS, 4, 4), f(4, 3), ids),
        ),
        "split_rope.split_rope": Case(
            partial(split_rope.split_rope, heads=2, key_heads=1), (0, 1, 2), (0,), (f(ROWS, 4, 16), *tables)
        ),
        "glu.glu": Case(partial(glu.glu, activation="silu"), (0, 1), (0, 1), (x, x)),
        "glu.clamped_swiglu": Case(partial(glu.clamped_swiglu, limit=1.0, alpha=1.7), (0, 1), (0, 1), (x, x)),
        "low_rank.low_rank_add": Case(
            partial(low_rank.low_rank_add, parts=(4,)), (0, 1), (0, 1, 2), (x, thin, f(4, 2))
        ),
        "low_rank.low_rank_output_gradients": Case(
            partial(low_rank.low_rank_output_gradients, parts=(4,)), (0, 1), (), (x, thin, f(4, 2)), of_rows=False
        ),
        "low_rank.low_rank_input_gradients": Case(
            low_rank.low_rank_input_gradients, (0, 1, 2), (), (x, x, thin, f(2, 4)), of_rows=False
        ),
        "low_rank.low_rank_round_rows": Case(
            partial(low_rank.low_rank_round_rows, parts=(4,)), (0, 1), (), (x, jnp.abs(f(ROWS)), f(4, 2))
        ),
        "glu.lora.glu_lora_forward": Case(
            lambda gate_up, products, lora_B, down_A: glu_lora.glu_lora_forward(
                gate_up, glu_lora.Inner(products, lora_B), down_A, activation="silu"
            ),
            *((0, 1), (), (f(ROWS, 8), x, inner, f(2, 4))),
        ),
        "glu.lora.glu_lora_backward": Case(
            unit_backward, (0, 1, 3, 5), (), (f(ROWS, 8), x, inner, x, f(2, 4), thin), of_rows=False
        ),
        "rms_norm.lora.rms_norm_lora_round": Case(
            lambda x, weight, lora_A, eps: norm_lora.rms_norm_lora_round(x, weight, lora_A, eps=eps),
            *((0,), (), (x, f(4), f(2, 4), f() ** 2)),
        ),
        "rms_norm.lora.rms_norm_lora_backward": Case(
            norm_backward, (0, 2, 3, 5, 6, 7), (), (x, f(4), f(ROWS), thin, f(2, 4), x, x, thin), of_rows=False
        ),
        "split_rope.lora.split_rope_lora_forward": Case(
            partial(rope_lora.split_rope_lora_forward, **heads),
            *((0, 1, 3, 4), (), (f(ROWS, 16), f(ROWS, 6), f(16, 2), thin, thin)),
        ),
        "split_rope.lora.split_rope_lora_backward": Case(
            lambda q, k, v, *others: rope_lora.split_rope_lora_backward((q, k, v), *others, **heads),
            *((0, 1, 2, 3, 5, 6), (), (f(ROWS, 8), x, x, f(ROWS, 6), f(16, 2), thin, thin), False),
        ),
        "grouped_matmul.grouped_matmul": Case(
            grouped, (0, 2, 5), (0, 1, 2, 3), (x, f(2, 3, 4), thin, f(2, 3, 2), sizes, places), of_rows=False
        ),
        "grouped_matmul.grouped_matmul_dx": Case(
            grouped_matmul.grouped_matmul_dx, (0,), (), (x, f(2, 4, 3), sizes), of_rows=False
        ),
        "grouped_matmul.grouped_matmul_dw": Case(
            grouped_matmul.grouped_matmul_dw, (0, 1), (), (x, thin, sizes), of_rows=False
        ),
        "grouped_matmul.grouped_nf4_matmul": Case(
            partial(grouped_matmul.grouped_nf4_matmul, **matrix),
            *((0,), (), (wide, u8(2, 64, 32), jnp.abs(f(2, 64, 1)), sizes), False),
        ),
        "moe_routing.route": Case(
            lambda logits, bias: moe_routing.route(logits, settings, bias), (0,), (0,), (f(ROWS, 4), f(4))
        ),
        "moe_routing.sort_by_expert": Case(
            partial(moe_routing.sort_by_expert, num_experts=4), (0,), (), (experts,), of_rows=False
        ),
        "moe_routing.combine": Case(combined, (0, 1, 2), (0, 1), (f(2 * ROWS, 4), thin, experts), of_rows=False),
        "moe_routing.measure_load": Case(load, (0,), (0,), (f(ROWS, 4),), of_rows=False),
        "moe_routing.load_balancing_loss": Case(
            lambda logits: moe_routing.load_balancing_loss(load(logits)), (0,), (0,), (f(ROWS, 4),), of_rows=False
        ),
        "moe_routing.z_loss": Case(
            lambda logits: moe_routing.z_loss(load(logits)), (0,), (0,), (f(ROWS, 4),), of_rows=False
        ),
    }
