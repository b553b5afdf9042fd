"""Rows of logits in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `chunks`.

A program owns a row. It goes over it once for its numbers, with a running maximum (online softmax, arXiv 1805.02867),
and, for the gradient, once more right behind, when the row is still in the L2 cache: it writes the gradient in the
place of the logits. Memory sees one read and one write. A row without a target is not read. The block of the target is
the only one whose words are told apart: for the others their largest logit says whether the target is the prediction.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from pallas_kernels.cross_entropy.config import COLUMNS, NUM_WARPS
from pallas_kernels.cross_entropy.reference import IGNORE_INDEX
from pallas_kernels.cross_entropy.rows import Options, RowStatistics

#: Below every logit, and finite: a block of logits that are all −∞ gives no NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(
    logits: Float[Array, "B C V"],
    targets: Int[Array, "B C"],
    options: Options,
    columns: int = COLUMNS,
    interpret: bool = False,
) -> RowStatistics:
    """The numbers of the rows; `columns` are those of a block, a power of two."""
    return _call(logits, targets, options, columns, False, interpret)[0]


def backward(
    logits: Float[Array, "B C V"],
    targets: Int[Array, "B C"],
    options: Options,
    columns: int = COLUMNS,
    interpret: bool = False,
) -> tuple[RowStatistics, Float[Array, "B C V"]]:
    """The numbers of the rows, and the gradient of the loss in the logits."""
    return _call(logits, targets, options, columns, True, interpret)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _call(
    logits: Array, targets: Array, options: Options, columns: int, differentiated: bool, interpret: bool
) -> tuple[RowStatistics, Any]:
    count, vocab = targets.size, logits.shape[-1]
    numbers = jax.ShapeDtypeStruct((count,), jnp.float32)
    gradient, logsumexp, target, mean, correct = pl.pallas_call(
        functools.partial(_kernel, options=options, columns=columns),
        out_shape=(
            jax.ShapeDtypeStruct((count, vocab), logits.dtype) if differentiated else None,
            numbers,
            numbers,
            numbers if options.label_smoothing else None,
            jax.ShapeDtypeStruct((count,), jnp.int32),
        ),
        grid=(count,),
        input_output_aliases={0: 0} if differentiated else {},
        compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="cross_entropy_rows",
    )(logits.reshape(count, vocab), targets.reshape(count))
    rows = RowStatistics(logsumexp, target, mean, correct == 1)
    rows = jax.tree.map(lambda values: values.reshape(targets.shape), rows)
    return rows, None if gradient is None else gradient.reshape(logits.shape)


def _kernel(
    logits_ref, targets_ref, gradient_ref, logsumexp_ref, target_ref, mean_ref, correct_ref, *, options, columns: int
):
    row, vocab = pl.program_id(0), logits_ref.shape[1]
    word = targets_ref[row]
    counted = word != IGNORE_INDEX
    column = jnp.clip(word, 0, vocab - 1)
    blocks, own, offsets = pl.cdiv(vocab, columns), column // columns, lax.iota(jnp.int32, columns)

    def load(block) -> Array:
        """The products of a block; −∞ behind the last word, and in a row without a target, which is not read."""
        seen = (block * columns + offsets < vocab) & counted
        cell = logits_ref.at[row, pl.ds(block * columns, columns)]
        return pltriton.load(cell, mask=seen, other=jnp.asarray(-jnp.inf, logits_ref.dtype))

    def binary(products) -> Array:
        """The logits of products over log 2: one multiplication, and powers of two in place of exponentials."""
        if options.soft_cap is None:
            return products.astype(jnp.float32) * (options.scale / math.log(2.0))
        return options.logits(products.astype(jnp.float32)) * (1.0 / math.log(2.0))

    target = binary(logits_ref[row, column])

    def add(block, carry):
        ready, highest, total, before, behind, *plain = carry
        following = load(block + 1)  # under way while this block is computed
        words, logits = block * columns + offsets, binary(ready)
        if options.soft_cap is not None and vocab % columns:
            logits = jnp.where(words < vocab, logits, -jnp.inf)  # the cap would lift it
        top = jnp.max(logits)
        new = jnp.maximum(highest, top)
        total = total * jnp.exp2(highest - new) + jnp.exp2(logits - new)
        before = jnp.where(block < own, new, before)
        behind = jnp.where(block > own, jnp.maximum(behind, top), behind)
        plain = [sums + jnp.where(words < vocab, logits, 0.0) for sums in plain]
        return following, new, total, before, behind, *plain

    lowest, zeros = jnp.float32(_LOWEST), jnp.zeros((columns,), jnp.float32)
    start = load(0), lowest, zeros, lowest, lowest, *[zeros] * bool(options.label_smoothing)
    _, highest, total, before, behind, *plain = lax.fori_loop(
        jnp.int32(0), jnp.where(counted, jnp.int32(blocks), 0), add, start
    )
    logsumexp = jnp.where(counted, highest + jnp.log2(jnp.sum(total)), 0.0)
    natural = logsumexp * math.log(2.0)
    words, logits = own * columns + offsets, binary(load(own))
    ahead = (words < vocab) & ((logits > target) | ((logits == target) & (words < column)))
    first = (jnp.sum(ahead.astype(jnp.int32)) == 0) & (before < target) & (behind <= target)
    logsumexp_ref[row], target_ref[row], correct_ref[row] = natural, target * math.log(2.0), first.astype(jnp.int32)
    if mean_ref is not None:
        mean_ref[row] = jnp.sum(plain[0]) * math.log(2.0) / vocab
    if gradient_ref is None:
        return

    def differentiate(block, ready, here: bool = False):
        following = load(block + 1)
        words, logits = block * columns + offsets, binary(ready)
        gradient = jnp.exp2(logits - logsumexp)
        if options.z_loss:
            gradient = gradient * (1.0 + 2.0 * options.z_loss * natural)
        if here:
            gradient = gradient - jnp.where(words == word, 1.0 - options.label_smoothing, 0.0)
        if options.label_smoothing:
            gradient = gradient - options.label_smoothing / vocab
        gradient = options.through(gradient, logits * math.log(2.0))
        if options.label_smoothing or options.soft_cap is not None:  # else it is zero in a row that was not read
            gradient = jnp.where(counted, gradient, 0.0)
        cell = gradient_ref.at[row, pl.ds(block * columns, columns)]
        pltriton.store(cell, gradient.astype(gradient_ref.dtype), mask=words < vocab)
        return following

    ready = differentiate(own, lax.fori_loop(jnp.int32(0), own, differentiate, load(0)), here=True)
    lax.fori_loop(own + 1, jnp.int32(blocks), differentiate, ready)
