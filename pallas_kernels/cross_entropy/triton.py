"""Rows of logits in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `implementations`.

A program owns a row. It goes over it once for its numbers, with a running maximum (online softmax, arXiv 1805.02867),
and, for the gradient, once more right behind, when the row is still in the L2 cache: it writes the gradient in the
place of the logits. Memory sees one read and one write. A row without a target is not read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from pallas_kernels.cross_entropy.config import Tiles
from pallas_kernels.cross_entropy.reference import IGNORE_INDEX
from pallas_kernels.cross_entropy.rows import Options, Rows

#: Below every logit, and finite: a block of logits that are all −∞ gives no NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], options: Options, tiles: Tiles, interpret: bool = False
) -> Rows:
    """The numbers of the rows."""
    return _call(logits, targets, options, tiles, False, interpret)[0]


def backward(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], options: Options, tiles: Tiles, interpret: bool = False
) -> tuple[Rows, Float[Array, "B C V"]]:
    """The numbers of the rows, and the gradient of the loss in the logits."""
    return _call(logits, targets, options, tiles, True, interpret)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _call(
    logits: Array, targets: Array, options: Options, tiles: Tiles, differentiated: bool, interpret: bool
) -> tuple[Rows, Any]:
    count, vocab = targets.size, logits.shape[-1]
    numbers = jax.ShapeDtypeStruct((count,), jnp.float32)
    gradient, logsumexp, target, mean, correct = pl.pallas_call(
        functools.partial(_kernel, options=options, columns=tiles.columns),
        out_shape=(
            jax.ShapeDtypeStruct((count, vocab), logits.dtype) if differentiated else None,
            numbers,
            numbers,
            numbers if options.label_smoothing else None,
            jax.ShapeDtypeStruct((count,), jnp.int32),
        ),
        grid=(count,),
        input_output_aliases={0: 0} if differentiated else {},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="cross_entropy_rows",
    )(logits.reshape(count, vocab), targets.reshape(count))
    rows = Rows(logsumexp, target, mean, correct == 1)
    rows = jax.tree.map(lambda values: values.reshape(targets.shape), rows)
    return rows, None if gradient is None else gradient.reshape(logits.shape)


def _kernel(
    logits_ref, targets_ref, gradient_ref, logsumexp_ref, target_ref, mean_ref, correct_ref, *, options, columns: int
):
    row, vocab = pl.program_id(0), logits_ref.shape[1]
    word = targets_ref[row]
    counted = word != IGNORE_INDEX
    target = options.logits(logits_ref[row, jnp.clip(word, 0, vocab - 1)].astype(jnp.float32))
    blocks, offsets = pl.cdiv(vocab, columns), lax.iota(jnp.int32, columns)

    def load(block) -> Array:
        """The logits of a block; −∞ behind the last word, and in a row without a target, which is not read."""
        seen = (block * columns + offsets < vocab) & counted
        cell = logits_ref.at[row, pl.ds(block * columns, columns)]
        return pltriton.load(cell, mask=seen, other=jnp.asarray(-jnp.inf, logits_ref.dtype))

    def add(block, carry):
        ready, highest, total, ahead, *plain = carry
        following = load(block + 1)  # under way while this block is computed
        words, logits = block * columns + offsets, options.logits(ready.astype(jnp.float32))
        if options.soft_cap is not None and vocab % columns:
            logits = jnp.where(words < vocab, logits, -jnp.inf)  # the cap would lift it
        new = jnp.maximum(highest, jnp.max(logits))
        total = total * jnp.exp(highest - new) + jnp.exp(logits - new)
        ahead = ahead + ((logits > target) | ((logits == target) & (words < word))).astype(jnp.int32)
        plain = [sums + jnp.where(words < vocab, logits, 0.0) for sums in plain]
        return following, new, total, ahead, *plain

    zeros = jnp.zeros((columns,), jnp.float32)
    sums = zeros, jnp.zeros((columns,), jnp.int32), *[zeros] * bool(options.label_smoothing)
    start = load(0), jnp.float32(_LOWEST), *sums
    _, highest, total, ahead, *plain = lax.fori_loop(jnp.int32(0), jnp.where(counted, jnp.int32(blocks), 0), add, start)
    logsumexp = jnp.where(counted, highest + jnp.log(jnp.sum(total)), 0.0)
    logsumexp_ref[row], target_ref[row] = logsumexp, target
    correct_ref[row] = (jnp.sum(ahead) == 0).astype(jnp.int32)
    if mean_ref is not None:
        mean_ref[row] = jnp.sum(plain[0]) / vocab
    if gradient_ref is None:
        return

    def differentiate(block, ready):
        following = load(block + 1)
        words, logits = block * columns + offsets, options.logits(ready.astype(jnp.float32))
        gradient = jnp.exp(logits - logsumexp)
        if options.z_loss:
            gradient = gradient * (1.0 + 2.0 * options.z_loss * logsumexp)
        gradient = gradient - jnp.where(words == word, 1.0 - options.label_smoothing, 0.0)
        if options.label_smoothing:
            gradient = gradient - options.label_smoothing / vocab
        gradient = jnp.where(counted, options.through(gradient, logits), 0.0).astype(gradient_ref.dtype)
        pltriton.store(gradient_ref.at[row, pl.ds(block * columns, columns)], gradient, mask=words < vocab)
        return following

    lax.fori_loop(0, blocks, differentiate, load(0))
