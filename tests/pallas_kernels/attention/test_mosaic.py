"""The Hopper kernels, interpreted, against the float64 oracle: every feature, head size and odd length."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, mosaic_sm90, segment_ranges
from pallas_kernels.attention.api import REGISTRY, on_ranges
from pallas_kernels.attention.mosaic_sm90.config import DkvConfig, DqConfig, ForwardConfig
from tests.support.attention import QUICK, expected
from tests.support.interpreter import mosaic_interpreter

pytestmark = pytest.mark.newer_jax(
    "the interpreter of jax 0.10 misplaces rows behind the end of an array and takes minutes or never returns"
)

#: Blocks of 64, so that short rows have several.
SMALL = {
    "forward": ForwardConfig(block_kv=64),
    "backward": {"dq": DqConfig(block_kv=64), "dkv": DkvConfig(block_q=64, stages=2)},
}


@pytest.fixture
def interpreted(monkeypatch):
    """`attention(implementation="mosaic")` in the interpreter, with small block sizes by default."""

    def run(arguments, cotangents, options, configs=SMALL):
        with mosaic_interpreter(2) as params:
            module = types.SimpleNamespace(
                why_not=mosaic_sm90.why_not,
                forward=functools.partial(mosaic_sm90.forward, config=configs["forward"], interpret=params),
                backward=functools.partial(mosaic_sm90.backward, **configs["backward"], interpret=params),
            )
            monkeypatch.setitem(REGISTRY.implementations, "mosaic", on_ranges(module))
            monkeypatch.setattr(mosaic_sm90, "num_cores", lambda: 3)  # so that a thread block has several tiles

            def both(arguments, cotangents):
                results, vjp = jax.vjp(
                    lambda a: attention(**a, **options, return_lse=True, implementation="mosaic"), arguments
                )
                return results, vjp(cotangents)[0]

            (out, lse), found = jax.jit(both, compiler_options=QUICK)(arguments, cotangents)
            return {"out": out, "lse": lse} | {f"d{name}": leaf for name, leaf in found.items()}

    return run


def documents(*lengths, length):
    """Segment ids of a row: documents of these lengths, the rest padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, length - ids.size)).astype(np.int32)


def problem(seed=0, batch=1, length=200, keys=None, heads=2, kv_heads=1, size=64, value_size=None, sinks=None):
    rng = np.random.default_rng(seed)
    keys, value_size = keys or length, value_size or size

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    arguments = {"q": normal(batch, length, heads, size), "k": normal(batch, keys, kv_heads, size)}
    arguments["v"] = normal(batch, keys, kv_heads, value_size)
    if sinks is not None:
        arguments["sinks"] = jnp.asarray(sinks, jnp.float32)
    dlse = jnp.asarray(rng.standard_normal((batch, heads, length)), jnp.float32)
    return arguments, (normal(batch, length, heads, value_size), dlse)


def assert_close(ours, theirs, tolerance=1.2e-2):
    """Relative Frobenius error; bfloat16 has 2⁻⁹ = 2e-3 in each rounding."""
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        wanted, actual = np.asarray(wanted, np.float64), np.asarray(ours[name], np.float64)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(actual[~finite], wanted[~finite], err_msg=name)
        error = np.linalg.norm(actual[finite] - wanted[finite]) / max(np.linalg.norm(wanted[finite]), 1e-9)
        assert error < tolerance, f"{name}: {error}"


PACKED = np.stack([documents(70, 1, 90, length=200), documents(length=200)])
CASES = {
    "causal": {},
    "not causal": {"causal": False},
    "packed": {"batch": 2, "segment_ids": PACKED},
    "window, packed": {"segment_ids": PACKED[:1], "sliding_window": 40},
    "window on both sides": {"sliding_window": 30, "causal": False},
    "cap, sinks": {"logits_soft_cap": 1.5, "sinks": [0.3, -2.0]},
    "more keys": {"length": 70, "keys": 210},
    "an offset a row": {"batch": 2, "length": 70, "keys": 150, "query_offset": np.array([0, 60], np.int32)},
}


def check(name, interpreted, configs, shape):
    """A case with block sizes; `shape` goes over the shape of `problem`."""
    case = CASES[name]
    shapes = ("batch", "length", "keys", "sinks")
    shape = {n: case[n] for n in shapes if n in case} | shape
    if "sinks" in shape:
        shape["sinks"] = np.resize(shape["sinks"], shape.get("heads", 2))
    arguments, cotangents = problem(list(CASES).index(name), **shape)
    length = arguments["q"].shape[1]
    options = {n: jnp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in case.items() if n not in shapes}
    if "segment_ids" in options:
        copies = -(-length // PACKED.shape[1])
        ids = np.concatenate([case["segment_ids"] + 3 * copy * (case["segment_ids"] > 0) for copy in range(copies)], 1)
        options["segment_ids"] = jnp.asarray(ids[:, :length])
    wanted = expected(arguments, cotangents, options)
    if "segment_ids" in options:
        options["segment_ranges"] = segment_ranges(options.pop("segment_ids"))
    assert_close(interpreted(arguments, cotangents, options, configs), wanted)


# Causal rows, documents and windows over them are those of the tiles in turn, caps and sinks of dropout, below.
@pytest.mark.exhaustive("window on both sides", "an offset a row")
@pytest.mark.parametrize("name", CASES)
def test_every_feature_matches_float64(name, interpreted):
    check(name, interpreted, SMALL, {})


@pytest.mark.exhaustive("192-128")
@pytest.mark.parametrize(("size", "value_size"), [(80, 80), (128, 96), (192, 128), (256, 256)])
def test_head_sizes(size, value_size, interpreted):
    arguments, cotangents = problem(size, length=150, size=size, value_size=value_size)
    small = {
        "forward": ForwardConfig(block_kv=64, own_output=size <= 192),
        "backward": {
            "dq": DqConfig(block_kv=32 if size == 256 else 64),
            "dkv": DkvConfig(block_q=32 if size == 256 else 64, stages=2, split=size + value_size > 256),
        },
    }
    assert_close(interpreted(arguments, cotangents, {}, small), expected(arguments, cotangents, {}))


#: Two tiles in shared memory, and no turns: each warpgroup takes its own blocks only.
OWN_BLOCKS = {
    "forward": ForwardConfig(block_kv=64, buffers=2, pingpong=False),
    "backward": {"dq": DqConfig(block_kv=64, buffers=2), "dkv": DkvConfig(block_q=64, stages=2, buffers=2)},
}


#: Likewise, and tiles of two heads.
TWO_HEADS = {
    "forward": ForwardConfig(block_kv=64, buffers=2, heads=2, own_output=False),
    "backward": {"dq": DqConfig(block_kv=64, buffers=2, heads=2), "dkv": DkvConfig(block_q=32, stages=4, buffers=2)},
}


@pytest.mark.exhaustive("own blocks, window, packed", "two heads, packed")
@pytest.mark.parametrize(
    ("name", "configs"),
    [
        pytest.param("window, packed", OWN_BLOCKS, id="own blocks, window, packed"),
        pytest.param("an offset a row", OWN_BLOCKS, id="own blocks, an offset a row"),
        pytest.param("packed", TWO_HEADS, id="two heads, packed"),
        pytest.param("more keys", TWO_HEADS, id="two heads, more keys"),
    ],
)
def test_tiles_in_turn(name, configs, interpreted):
    """Thread blocks that take several tiles, of whose blocks one of the two warpgroups may not need all."""
    check(name, interpreted, configs, {} if "length" in CASES[name] else {"length": 450})


@pytest.mark.exhaustive("64-1.5-True")
@pytest.mark.parametrize(("size", "cap", "packed"), [(64, None, False), (64, 1.5, True), (192, None, False)])
def test_dropout(size, cap, packed, interpreted):
    arguments, cotangents = problem(2, size=size, sinks=[0.3, -2.0] if packed else None)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(5), "logits_soft_cap": cap}
    ids = {"segment_ids": jnp.asarray(PACKED[:1])} if packed else {}
    ranges = {"segment_ranges": segment_ranges(ids["segment_ids"])} if packed else {}
    ours = interpreted(arguments, cotangents, options | ranges)
    assert_close(ours, expected(arguments, cotangents, options | ids))
