"""Norms after the rotary turn, and queries that grow with the position, against plain sums in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from convert.families.mapping import read_config
from convert.model.layers import Attention as Settings
from fastjax.models.context import Context
from fastjax.models.mixers.attention import Attention
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.models.rotary import inverse_frequencies, query_scales, rope_tables
from tests.support import families

HEADS, KEY_HEADS, SIZE, WIDTH, LENGTH = 4, 2, 10, 32, 24
ORIGINAL, BETA = 5, 0.3


def configured(**changes):
    config = read_config(families.CONFIGS["qwen3"])
    rope = {"original_max_position_embeddings": ORIGINAL, "query_beta": changes.pop("query_beta", None)}
    return dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, kind="default", attention_factor=1.0, **rope), **changes
    )


def arrays():
    rng = np.random.default_rng(0)
    shapes = {"qkv": ((HEADS + 2 * KEY_HEADS) * SIZE, WIDTH), "o": (WIDTH, HEADS * SIZE)}
    found = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    found |= {name: 1 + 0.5 * rng.standard_normal(SIZE) for name in ("q_norm", "k_norm")}
    return {
        name: array.astype(np.float32)
        for name, array in (found | {"x": rng.standard_normal((1, LENGTH, WIDTH))}).items()
    }


def ours(config):
    w, positions = arrays(), jnp.arange(LENGTH, dtype=jnp.int32)[None]
    sizes = [("q_proj", HEADS * SIZE), ("k_proj", KEY_HEADS * SIZE), ("v_proj", KEY_HEADS * SIZE)]
    norms = Norm(config, jnp.asarray(w["q_norm"])), Norm(config, jnp.asarray(w["k_norm"]))
    qkv, o = Projection(sizes, jnp.asarray(w["qkv"])), Projection([("o_proj", WIDTH)], jnp.asarray(w["o"]))
    module = Attention(config, Settings(), qkv, o, norms)
    rotary = {"rope": rope_tables(config.rope, SIZE, positions)}
    context = Context(rotary, None, None, query_scales=query_scales(config, positions))
    return np.asarray(module(jnp.asarray(w["x"]), context, None))


def theirs(config, *, norm_last, beta):
    w = {name: array.astype(np.float64) for name, array in arrays().items()}
    q, k, v = np.split(w["x"][0] @ w["qkv"].T, [HEADS * SIZE, (HEADS + KEY_HEADS) * SIZE], axis=1)
    angles = np.arange(LENGTH)[:, None] * inverse_frequencies(config.rope, SIZE).astype(np.float64)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def turn(x):
        a, b, (cos, sin) = x[..., : SIZE // 2], x[..., SIZE // 2 :], (np.cos(angles)[:, None], np.sin(angles)[:, None])
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def heads(x, weight):
        x = x.reshape(LENGTH, -1, SIZE)
        return norm(turn(x), weight) if norm_last else turn(norm(x, weight))

    q, k = heads(q, w["q_norm"]), heads(k, w["k_norm"])
    q = q * (1 + beta * np.log(1 + np.floor(np.arange(LENGTH) / ORIGINAL)))[:, None, None]
    k, v = (np.repeat(a.reshape(LENGTH, -1, SIZE), HEADS // KEY_HEADS, axis=1) for a in (k, v))
    scores = np.einsum("shd,thd->hst", q, k) * config.attention_multiplier
    scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hst,thd->shd", weights / weights.sum(-1, keepdims=True), v)
    return (out.reshape(LENGTH, -1) @ w["o"].T)[None]


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("beta", [None, BETA])
def test_attention_equals_plain_sums(norm_last, beta):
    config = configured(qk_norm_after_rope=norm_last, query_beta=beta)
    assert config.qk_norm == "head" and config.head_dim == SIZE
    expected = theirs(config, norm_last=norm_last, beta=beta or 0.0)
    # float32, sums of up to 40 products
    np.testing.assert_allclose(ours(config), expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    for other in ({"norm_last": not norm_last, "beta": beta or 0.0}, {"norm_last": norm_last, "beta": 0.7}):
        assert np.abs(theirs(config, **other) - expected).max() > 1e-2 * np.abs(expected).max()


def test_queries_have_their_scale_in_their_own_dtype():
    config = configured(query_beta=BETA)
    (scale,) = query_scales(config, jnp.asarray([[0, 4, 5, 23]], jnp.int32)).values()
    assert scale.dtype == jnp.float32
    np.testing.assert_allclose(scale[0], 1 + BETA * np.log([1, 1, 2, 5]), rtol=1e-6)
    assert query_scales(configured(), jnp.zeros((1, 2), jnp.int32)) == {}
