"""The passes for a few tokens of a mixture, interpreted and on the card, against sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.few_experts import Adapter, api, routing, triton
from pallas_kernels.moe_routing import RouterSettings, route

# Largest error over largest value: roundings of rank products, of s·B and of the result to bfloat16.
TOLERANCE = 2**-7
CLAMP = (7.0, 1.702)


def wide(array):
    return np.asarray(array, np.float64)


def close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(wide(actual) - expected).max() <= TOLERANCE * np.abs(expected).max()


class Case:
    """Random tokens and experts, of which one has many pairs and one has none."""

    def __init__(self, tokens, chosen, num_experts, width=128, features=256, rank=16, biased=False):
        self.rng = rng = np.random.default_rng(tokens)
        routed = np.stack([2 + rng.permutation(num_experts - 2)[:chosen] for _ in range(tokens)])
        routed[: 3 * tokens // 4, 0] = 1
        self.experts = routed.astype(np.int32)
        self.flat, self.num_experts = self.experts.reshape(-1), num_experts
        self.weights = jnp.asarray(rng.random((tokens, chosen)), jnp.float32)
        self.x = self.normal(tokens, width).astype(jnp.bfloat16)
        pairs, (inner, outer) = self.flat.size, ((rank, rank) if isinstance(rank, int) else rank)
        self.inner, self.outer = self.adapter(inner, width, 2 * features), self.adapter(outer, features, width)
        self.bias = [3 * self.normal(num_experts, size) if biased else None for size in (2 * features, width)]
        self.base = self.normal(pairs, 2 * features).astype(jnp.bfloat16)
        self.y = self.normal(pairs, width).astype(jnp.bfloat16)

    def normal(self, *shape):
        return jnp.asarray(self.rng.standard_normal(shape), jnp.float32)

    def adapter(self, rank, columns, rows):
        """Its addends are about as large as what they are added to."""
        if not rank:
            return None
        lora_A = self.normal(self.num_experts, rank, columns) / columns**0.5
        return Adapter(lora_A, self.normal(self.num_experts, rows, rank), 0.5)

    def run(self, interpret, clamp=None):
        """Items, and the results of the passes."""
        slots = min(len(self.experts), api.SLOTS)
        most = min(self.flat.size, self.num_experts + self.flat.size // slots)
        options = {"most": most, "slots": slots, "num_experts": self.num_experts, "interpret": interpret}
        items = routing.items(jnp.asarray(self.experts), **options)
        products = None
        if self.inner is not None:
            products = triton.rank_products(self.x, self.inner, *items, pairs=self.flat.size, interpret=interpret)
        options = {"activation": "silu", "clamp": clamp, "interpret": interpret}
        h, shares = triton.gate(self.base, products, self.inner, self.bias[0], self.outer, *items, **options)
        out = triton.combine(
            self.y, shares, self.outer, self.bias[1], self.weights, jnp.asarray(self.experts), interpret=interpret
        )
        return items, products, h, shares, out

    def update(self, products, adapter, bias):
        """The addends of each pair behind its large product."""
        total = 0.0 if bias is None else wide(bias)[self.flat]
        if adapter is None:
            return total
        return total + adapter.scaling * self.by_expert(
            wide(products).sum(0)[:, : adapter.lora_A.shape[1]], adapter.lora_B
        )

    def by_expert(self, pairs, matrices):
        """Each pair's row times its expert's matrix, transposed."""
        result = np.zeros((len(pairs), matrices.shape[1]))
        for expert in np.unique(self.flat):
            result[self.flat == expert] = pairs[self.flat == expert] @ wide(matrices[expert]).T
        return result

    def check(self, found, clamp):
        """What `run` has made."""
        (table, count), products, h, shares, out = found
        items = expected_items(self.experts, self.num_experts)
        assert int(count[0]) == len(items) <= len(table)
        np.testing.assert_array_equal(np.asarray(table)[: len(items)], items)
        if products is not None:
            rank = self.inner.lora_A.shape[1]
            tokens = wide(self.x)[np.arange(self.flat.size) // self.experts.shape[1]]
            inner, inside = np.split(wide(products).sum(0), [rank], axis=1)
            close(inner, self.by_expert(tokens, self.inner.lora_A))
            assert not inside.any()
        gate, up = np.split(wide(self.base) + self.update(products, self.inner, self.bias[0]), 2, axis=1)
        if clamp:
            gate, up = np.minimum(gate, clamp[0]), 1 + np.clip(up, -clamp[0], clamp[0])
        close(h, gate * (1 + np.tanh(gate * (clamp[1] if clamp else 1.0) / 2)) / 2 * up)
        if shares is not None:
            outer = wide(shares).sum(0)[:, : self.outer.lora_A.shape[1]]
            close(outer, self.by_expert(wide(h), self.outer.lora_A))
        y = wide(self.y) + self.update(shares, self.outer, self.bias[1])
        close(out, np.einsum("nk,nke->ne", wide(self.weights), y.reshape(*self.experts.shape, -1)))


def expected_items(experts, num_experts):
    slots, rows = min(len(experts), 8), []
    for expert in range(num_experts):
        pairs = np.nonzero(np.asarray(experts).reshape(-1) == expert)[0]
        for start in range(0, pairs.size, slots):
            own = pairs[start : start + slots]
            rows.append([expert, *own, *[-1] * (slots - own.size)])
    return np.array(rows)


@pytest.mark.exhaustive("rank 5, biases", "down alone, clamped")
@pytest.mark.parametrize(
    "sizes, clamp",
    [
        pytest.param({"tokens": 1, "chosen": 3, "num_experts": 8}, None, id="one token"),
        pytest.param(
            {"tokens": 5, "chosen": 3, "num_experts": 8, "rank": 5, "biased": True}, None, id="rank 5, biases"
        ),
        pytest.param({"tokens": 30, "chosen": 2, "num_experts": 6, "rank": (0, 20)}, CLAMP, id="down alone, clamped"),
        pytest.param({"tokens": 3, "chosen": 2, "num_experts": 6, "rank": (16, 0)}, None, id="gate and up alone"),
    ],
)
def test_passes(sizes, clamp):
    case = Case(**sizes)
    case.check(case.run(True, clamp), clamp)


ROUTERS = [
    RouterSettings(8, normalize=True),
    RouterSettings(3, "sigmoid", normalize=True, scale=2.5),
    RouterSettings(4, score_after=True),
]


def check_route(tokens, num_experts, settings, interpret):
    """The kernel's weights, experts and items beside those of XLA; equal logits, and a bias for sigmoids."""
    rng = np.random.default_rng(tokens)
    logits = jnp.asarray(rng.standard_normal((tokens, num_experts)), jnp.float32)
    logits = logits.at[:, 5].set(logits[:, 2])
    bias = jnp.asarray(rng.standard_normal(num_experts), jnp.float32) if settings.score == "sigmoid" else None
    sizes = api._sizes(tokens, num_experts, settings.experts_per_token)
    weights, experts, table, count = routing.route(logits, bias, settings=settings, **sizes, interpret=interpret)
    expected = route(logits, settings, bias)
    np.testing.assert_array_equal(experts, expected.experts)
    np.testing.assert_allclose(weights, expected.weights, rtol=1e-5)
    items = expected_items(expected.experts, num_experts)
    assert int(count[0]) == len(items) <= len(table)
    np.testing.assert_array_equal(np.asarray(table)[: len(items)], items)


@pytest.mark.exhaustive("20-60-settings1")
@pytest.mark.parametrize("settings", ROUTERS)
@pytest.mark.parametrize("tokens, num_experts", [(1, 32), (20, 60)])
def test_route(tokens, num_experts, settings):
    check_route(tokens, num_experts, settings, True)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", ROUTERS)
@pytest.mark.parametrize("tokens, num_experts", [(1, 128), (3, 60), (8, 512), (32, 128), (64, 128)])
def test_route_on_the_card(tokens, num_experts, settings):
    check_route(tokens, num_experts, settings, False)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 64])
@pytest.mark.parametrize("rank, biased", [(16, False), (5, True), (128, False)])
def test_on_the_card(tokens, rank, biased):
    """Of Qwen3-30B-A3B, one expert of it chosen often."""
    case, clamp = Case(tokens, 8, 128, 2048, 768, rank, biased), CLAMP if biased else None
    jax.block_until_ready(jnp.full((64, 1024, 1024), jnp.nan))
    case.check(case.run(False, clamp), clamp)
