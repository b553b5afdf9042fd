"""The passes for a few rows, interpreted and on the card, against sums in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.few_rows import Adapters, triton
from pallas_kernels.tiles import padded_rank

# Largest error over largest value: roundings of rank products, of s·B and of the result to bfloat16.
TOLERANCE = 2**-7


def arrays(seed):
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)


def adapters(make, columns, parts, ranks):
    """Adapters of the parts, whose addends are about as large as what they are added to; rank 0: none."""
    scalings = tuple(0.5 + number for number in range(len(parts)))
    lora_A = tuple(make(rank, columns) / columns**0.5 if rank else None for rank in ranks)
    lora_B = tuple(make(rows, rank) if rank else None for rows, rank in zip(parts, ranks, strict=True))
    return Adapters(lora_A, lora_B, parts, scalings)


def wide(array):
    return np.asarray(array, np.float64)


def of_parts(own, products):
    """Products of all parts, as many columns each, times s·B side by side."""
    matrices = [np.zeros((rows, 1)) if b is None else wide(b) for rows, b in zip(own.parts, own.lora_B, strict=True)]
    slots = np.split(products, len(matrices), axis=1)
    return np.concatenate(
        [slot[:, : b.shape[1]] @ b.T * scaling for slot, b, scaling in zip(slots, matrices, own.scalings, strict=True)],
        axis=1,
    )


def normalised(x, weight, eps):
    return wide(x) / np.sqrt(np.mean(wide(x) ** 2, axis=1, keepdims=True) + eps) * weight


def turned(whole, angles, counts):
    """Queries, keys and values of sums of all parts, the first two turned."""
    heads = whole.reshape(len(whole), counts[0] + 2 * counts[1], -1)
    first, second = np.split(heads, 2, axis=2)
    cos, sin = (wide(function(angles))[:, None] for function in (jnp.cos, jnp.sin))
    pairs = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
    parts = pairs[:, : counts[0]], pairs[:, counts[0] : sum(counts)], heads[:, sum(counts) :]
    return [part.reshape(len(whole), -1) for part in parts]


def gated_unit(whole):
    gate, up = np.split(whole, 2, axis=1)
    return gate * (1 + np.tanh(gate / 2)) / 2 * up


def close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(wide(actual) - expected).max() <= TOLERANCE * np.abs(expected).max()


def some_products(make, rows, own):
    """Addends of rank products, 0 where a part's rank ends, and their sum."""
    columns = np.concatenate([np.arange(16) < (0 if a is None else a.shape[0]) for a in own.lora_A])
    addends = jnp.where(columns[None, None], make(3, rows, columns.size), 0.0)
    return addends, wide(addends).sum(0)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_norm_and_rank_products(rows):
    make = arrays(rows)
    x, weight = make(rows, 512).astype(jnp.bfloat16), make(512)
    own = adapters(make, 512, (64, 64, 64), (16, 0, 8))
    normed, addends = triton.normed_products(x, weight, own, eps=1e-5, offset=1.0, interpret=True)
    close(normed, normalised(x, wide(weight) + 1.0, 1e-5))
    found = np.split(wide(addends).sum(0), [16, 32, 40], axis=1)
    close(found[0], wide(normed) @ wide(own.lora_A[0]).T)
    close(found[2], wide(normed) @ wide(own.lora_A[2]).T)
    assert not np.any(found[1]) and not np.any(found[3])
    close(
        triton.normed_products(x, None, own, eps=0.0, offset=0.0, interpret=True)[1].sum(0)[:, :16],
        wide(x) @ wide(own.lora_A[0]).T,
    )


@pytest.mark.parametrize("rows, count, parts", [(2, 1, (128, 64, 64)), (17, 4, (128, 64, 64)), (17, 4, (64, 32, 32))])
def test_add(rows, count, parts):
    make = arrays(rows)
    own = adapters(make, 64, parts, (8, 0, 16))
    base, residual = make(count, rows, sum(parts)), make(rows, sum(parts)).astype(jnp.bfloat16)
    addends, products = some_products(make, rows, own)
    total = triton.add(base, addends, own, residual, dtype=jnp.bfloat16, interpret=True)
    close(total, wide(base).sum(0) + of_parts(own, products) + wide(residual))


@pytest.mark.parametrize("parts", [(256, 128, 128), (512,)])
def test_heads(parts):
    make, rows, counts = arrays(1), 5, (4, 2)
    own = adapters(make, 64, parts, (16,) * len(parts))
    base, angles = make(2, rows, 512), make(rows, 32)
    addends, products = some_products(make, rows, own)
    found = triton.heads(
        base, addends, own, jnp.cos(angles), jnp.sin(angles), counts=counts, dtype=jnp.bfloat16, interpret=True
    )
    whole = wide(base).sum(0) + of_parts(own, products)
    for part, expected in zip(found, turned(whole, angles, counts), strict=True):
        close(part, expected)


@pytest.mark.parametrize("rows, parts, ranks", [(1, (256, 256), (16, 8)), (16, (512,), (16,)), (4, (256, 256), (0, 0))])
def test_gate(rows, parts, ranks):
    make = arrays(rows)
    own, down = adapters(make, 64, parts, ranks), adapters(make, 256, (64,), (8,))
    base = make(2, rows, 512)
    addends, products = some_products(make, rows, own) if any(ranks) else (None, np.zeros((rows, 32)))
    h, shares = triton.gate(base, addends, own, down, activation="silu", dtype=jnp.bfloat16, interpret=True)
    close(h, gated_unit(wide(base).sum(0) + of_parts(own, products)))
    close(shares.sum(0)[:, :8], wide(h) @ wide(down.lora_A[0]).T)


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [0, 8])
@pytest.mark.parametrize("rows", [1, 3, 7, 16, 33, 64])
def test_on_the_card(rows, joined):
    """Every pass of the layer of Llama 3 8B, and of eight adapters."""
    make = arrays(None)
    x, weight, residual = make(rows, 4096).astype(jnp.bfloat16), make(4096), make(rows, 4096).astype(jnp.bfloat16)
    qkv, o = adapters(make, 4096, (4096, 1024, 1024), (16,) * 3), adapters(make, 4096, (4096,), (16,))
    gated, down = adapters(make, 4096, (14336, 14336), (16, 8)), adapters(make, 14336, (4096,), (16,))
    if joined:
        qkv, o, gated, down = (chosen_of(own, rows, (16,) * joined, make)[0] for own in (qkv, o, gated, down))
    angles, options = make(rows, 64), {"dtype": jnp.bfloat16, "interpret": False}
    narrow, broad, base = make(2, rows, 6144), make(1, rows, 28672).astype(jnp.bfloat16), make(4, rows, 4096)
    poison()

    def whole(base, own, products):
        return wide(base).sum(0) + of_parts(own, wide(own.unfolded(products.sum(0))))

    def products_of(x, own, found):
        """Checked, and rounded as they were found."""
        each = np.ones((rows, own.slot)) if own.chosen is None else wide(own.chosen)
        ranks = [np.pad(wide(a), ((0, own.slot - len(a)), (0, 0))) for a in own.lora_A]
        close(own.unfolded(found.sum(0)), np.concatenate([wide(x) @ a.T * each for a in ranks], axis=1))
        return found

    normed, products = triton.normed_products(x, weight, qkv, eps=1e-5, offset=0.0, interpret=False)
    close(normed, normalised(x, wide(weight), 1e-5))
    poison()
    found = triton.heads(narrow, products, qkv, jnp.cos(angles), jnp.sin(angles), counts=(32, 8), **options)
    expected = turned(whole(narrow, qkv, products_of(normed, qkv, products)), angles, (32, 8))
    for part, sums in zip(found, expected, strict=True):
        close(part, sums)
    _, products = triton.normed_products(x, None, o, eps=0.0, offset=0.0, interpret=False)
    poison()
    sums = whole(base, o, products_of(x, o, products)) + wide(residual)
    close(triton.add(base, products, o, residual, **options), sums)
    _, products = triton.normed_products(x, None, gated, eps=0.0, offset=0.0, interpret=False)
    poison()
    h, shares = triton.gate(broad, products, gated, down, activation="silu", **options)
    close(h, gated_unit(whole(broad, gated, products_of(x, gated, products))))
    sums = whole(base, down, products_of(h, down, shares)) + wide(residual)
    close(triton.add(base, shares, down, residual, **options), sums)


def poison():
    """Memory that results are given afterwards holds NaN."""
    jnp.full((64, 1024, 1024), jnp.nan).block_until_ready()


def chosen_of(own, rows, ranks, make):
    """Joined adapters in the place of one, of which each row has a random one, or none; and the columns of each."""
    places = np.split(np.arange(sum(ranks)), np.cumsum(ranks)[:-1])
    numbers = np.random.default_rng(rows).integers(-1, len(ranks), rows)
    chosen = np.zeros((rows, padded_rank(sum(ranks))), np.int8)
    for row, number in enumerate(numbers):
        if number >= 0:
            chosen[row, places[number]] = 1
    wide_own = adapters(make, own.lora_A[0].shape[1], own.parts, (sum(ranks),) * len(own.parts))
    return dataclasses.replace(wide_own, chosen=jnp.asarray(chosen), largest=max(ranks)), chosen


@pytest.mark.parametrize("rows, ranks", [(3, (8, 5, 16)), (20, (16, 16, 16)), (20, (16, 5, 24, 19))])
def test_a_row_keeps_the_rank_products_of_its_own_adapter(rows, ranks):
    """Through every pass as the adapter alone, in float64; another one's products are not even made."""
    make = arrays(rows)
    options = {"dtype": jnp.bfloat16, "interpret": True}
    x, base = make(rows, 256).astype(jnp.bfloat16), make(2, rows, 512)
    own, chosen = chosen_of(adapters(make, 256, (256, 128, 128), (16,) * 3), rows, ranks, make)
    assert own.kept == padded_rank(max(ranks)) < own.slot
    _, addends = triton.normed_products(x, None, own, eps=0.0, offset=0.0, interpret=True)
    assert addends.shape[2] == 3 * own.kept
    mask = chosen[:, : sum(ranks)]
    deltas = [
        ((wide(x) @ wide(a).T) * mask) @ wide(b).T * scaling
        for a, b, scaling in zip(own.lora_A, own.lora_B, own.scalings, strict=True)
    ]
    close(triton.add(base, addends, own, None, **options), wide(base).sum(0) + np.concatenate(deltas, axis=1))
    unfolded = own.unfolded(addends.sum(0)).reshape(rows, 3, -1)
    for part in range(3):
        close(
            unfolded[:, part], np.pad((wide(x) @ wide(own.lora_A[part]).T) * mask, ((0, 0), (0, own.slot - sum(ranks))))
        )
    down, _ = chosen_of(adapters(make, 256, (64,), (16,)), rows, ranks, make)
    h, products = triton.gate(base, None, adapters(make, 64, (256, 256), (0, 0)), down, activation="silu", **options)
    close(down.unfolded(products.sum(0))[:, : sum(ranks)], (wide(h) @ wide(down.lora_A[0]).T) * mask)


@pytest.mark.exhaustive("20")
@pytest.mark.parametrize("rows", [3, 20])
def test_rows_have_the_rank_products_that_are_chosen(rows):
    """As if the others were zeros, NaN among them too."""
    make = arrays(rows)
    own = adapters(make, 64, (256, 128, 128), (16, 0, 8))
    gated = adapters(make, 64, (256, 256), (8, 16))
    chosen = jnp.asarray(np.random.default_rng(rows).integers(0, 2, (rows, 16)), jnp.int8)
    base, angles = make(2, rows, 512), make(rows, 32)
    options = {"dtype": jnp.bfloat16, "interpret": True}
    calls = [
        (own, lambda products, own: triton.add(base, products, own, None, **options)),
        (own, lambda products, own: triton.heads(base, products, own, angles, angles, counts=(4, 2), **options)),
        (gated, lambda products, own: triton.gate(base, products, own, own, activation="silu", **options)),
    ]
    for own, call in calls:
        addends, _ = some_products(make, rows, own)
        every = np.tile(chosen, len(own.parts))[None] != 0
        found = call(jnp.where(every, addends, jnp.nan), dataclasses.replace(own, chosen=chosen))
        for part, expected in zip(
            jax.tree.leaves(found), jax.tree.leaves(call(jnp.where(every, addends, 0.0), own)), strict=True
        ):
            np.testing.assert_array_equal(wide(part), wide(expected))
