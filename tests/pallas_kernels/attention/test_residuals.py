"""Attention's residuals under checkpoint policies, and the choice of implementations, traced for absent cards."""

import contextlib
import functools
import re
import unittest.mock
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch
from pallas_kernels.attention import SAVEABLE_NAMES, attention, attention_implementation
from tests.support.aot import AOT, needs_cuda_plugin

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
Q = jax.ShapeDtypeStruct((2, 64, 8, 32), jnp.bfloat16)
K = jax.ShapeDtypeStruct((2, 64, 2, 32), jnp.bfloat16)
POLICIES = {
    "saved": jax.checkpoint_policies.save_only_these_names(*SAVEABLE_NAMES),
    "output alone": jax.checkpoint_policies.save_only_these_names(SAVEABLE_NAMES[0]),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def card(kind):
    """Tracing for an NVIDIA card, or for this machine."""
    if kind is None:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=kind, num_cores=100, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def primitives(jaxpr) -> Counter:
    """How often each primitive occurs, at any depth."""
    counts = Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: isinstance(p, core.Jaxpr)):
            if isinstance(parameter, core.ClosedJaxpr):
                counts += primitives(parameter.jaxpr)
            elif isinstance(parameter, core.Jaxpr):
                counts += primitives(parameter)
    return counts


def gradient_primitives(policy, segments, implementation):
    def layer(q, k, v):
        options = {"segment_ids": jnp.ones(q.shape[:2], jnp.int32) if segments else None}
        out = attention(jnp.sin(q), jnp.sin(k), jnp.sin(v), implementation=implementation, **options)
        return jnp.sum(out.astype(jnp.float32))

    gradient = jax.grad(jax.checkpoint(layer, policy=POLICIES[policy]), argnums=(0, 1, 2))
    return primitives(jax.make_jaxpr(gradient)(Q, K, K).jaxpr)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("policy, forwards", [("saved", 1), ("output alone", 2), ("nothing", 2)])
def test_cudnn_forward_runs_once_when_its_residuals_are_saved(policy, forwards, segments):
    with card("NVIDIA H200"):
        counts = gradient_primitives(policy, segments, "cudnn")
    assert (counts[FORWARD], counts[BACKWARD]) == (forwards, 1)


@pytest.mark.parametrize("policy, products", [("saved", 2 + 5), ("nothing", 2 + 2 + 5)])
def test_xla_forward_runs_once_when_its_residuals_are_saved(policy, products):
    counts = gradient_primitives(policy, True, "xla")
    assert counts["dot_general"] == products


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_memory_between_the_passes_is_linear_in_the_sequence(implementation):
    attend = functools.partial(attention, implementation=implementation)
    with card("NVIDIA H200"):
        residuals = jax.eval_shape(lambda q, k, v: jax.vjp(attend, q, k, v)[1], Q, K, K)
    heads, length = 8, 64
    assert max(leaf.size for leaf in jax.tree.leaves(residuals)) == Q.size
    assert [leaf.size for leaf in jax.tree.leaves(residuals) if leaf.dtype == jnp.float32] == [2 * heads * length]


@contextlib.contextmanager
def selections(kind):
    """Choices of `dispatch.select` while calls are traced for a card."""
    found, select = [], dispatch.select

    def recorded(*arguments):
        found.append(select(*arguments))
        return found[-1]

    with card(kind), unittest.mock.patch.object(dispatch, "select", recorded):
        yield found


def chosen(kind, **changes):
    """Which implementations the passes get on a target."""
    dtype = changes.pop("dtype", jnp.bfloat16)
    batch, length, heads, size = changes.pop("shape", (2, 64, 8, 64))
    keys, value_size = changes.pop("keys", length), changes.pop("value_size", size)
    shapes = ((batch, length, heads, size), (batch, keys, 2, size), (batch, keys, 2, value_size))
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    with selections(kind) as found:
        jax.eval_shape(lambda q, k, v: attention(q, k, v, **changes), q, k, v)
    return tuple(found)


IDS = jnp.ones((2, 64), jnp.int32)


@pytest.mark.parametrize(
    "kind, changes, expected",
    [
        ("NVIDIA H200", {}, "mosaic"),
        ("NVIDIA H200", {"segment_ids": IDS, "logits_soft_cap": 30.0, "sinks": jnp.zeros((8,))}, "mosaic"),
        ("NVIDIA H100 80GB HBM3", {"return_lse": True}, "mosaic"),
        ("NVIDIA H200", {"implementation": "cudnn"}, "cudnn"),
        ("NVIDIA H200", {"implementation": ("cudnn", "mosaic"), "return_lse": True}, ("cudnn", "mosaic")),
        ("NVIDIA H200", {"dtype": jnp.float32}, "xla"),
        ("NVIDIA H200", {"shape": (2, 64, 8, 32)}, "cudnn"),
        ("NVIDIA H200", {"shape": (2, 64, 8, 32), "logits_soft_cap": 30.0}, "triton"),
        ("NVIDIA H200", {"shape": (2, 64, 8, 20), "logits_soft_cap": 30.0}, "xla"),
        ("NVIDIA H200", {"implementation": ("xla", None)}, ("xla", "mosaic")),
        ("NVIDIA A100-SXM4-80GB", {}, "cudnn"),
        ("NVIDIA A100-SXM4-80GB", {"segment_ids": IDS, "dtype": jnp.float16}, "cudnn"),
        ("NVIDIA A100-SXM4-80GB", {"sliding_window": 8}, "cudnn"),
        ("NVIDIA A100-SXM4-80GB", {"logits_soft_cap": 30.0}, "triton"),
        ("NVIDIA A100-SXM4-80GB", {"implementation": "triton"}, "triton"),
        ("NVIDIA A100-SXM4-80GB", {"shape": (2, 64, 8, 256)}, "triton"),
        ("NVIDIA A100-SXM4-80GB", {"return_lse": True}, ("cudnn", "triton")),
        ("NVIDIA GeForce RTX 4090", {}, "cudnn"),
        ("NVIDIA B200", {}, "cudnn"),
        ("NVIDIA B200", {"sinks": jnp.zeros((8,))}, "triton"),
        ("Tesla T4", {}, "xla"),
        ("cpu", {}, "xla"),
    ],
)
def test_who_serves_a_call(kind, changes, expected):
    pair = (expected, expected) if isinstance(expected, str) else expected
    assert chosen(None if kind == "cpu" else kind, **changes) == pair


@pytest.mark.parametrize("cap, expected", [(None, "cudnn"), (30.0, "xla")])
def test_documents_known_only_at_run_time_go_to_who_takes_ids(cap, expected):
    x = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
    with selections("NVIDIA H200") as found:
        jax.eval_shape(lambda x, ids: attention(x, x, x, segment_ids=ids, logits_soft_cap=cap), x, IDS)
    assert found == [expected, expected]


def test_an_implementation_for_all_calls_that_name_none():
    x = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
    with selections("NVIDIA H200") as found:
        with attention_implementation(("triton", "cudnn")):
            jax.eval_shape(lambda x: attention(x, x, x), x)
            jax.eval_shape(lambda x: attention(x, x, x, implementation="xla"), x)
        jax.eval_shape(lambda x: attention(x, x, x), x)
    assert found == ["triton", "cudnn", "xla", "xla", "mosaic", "mosaic"]


def test_a_forced_kernel_for_another_card_says_why_not():
    with pytest.raises(
        NotImplementedError, match="'mosaic' cannot serve .* compute capability 9.0, the target is NVIDIA A100"
    ):
        chosen("NVIDIA A100-SXM4-80GB", implementation="mosaic")


@pytest.mark.parametrize(
    "kind, changes, reason",
    [
        ("Tesla T4", {}, "compute capability 8.0 or more, the target is Tesla T4 .cuda, compute capability 7.5."),
        ("NVIDIA H200", {"dtype": jnp.float32}, "bfloat16 or float16, not float32"),
        ("NVIDIA H200", {"shape": (2, 64, 8, 20)}, "multiple of 8 and at most 256 .* not 20"),
        ("NVIDIA A100-SXM4-80GB", {"shape": (2, 64, 8, 136)}, "at most 128 .* not 136"),
        ("NVIDIA H200", {"shape": (2, 1, 8, 64), "keys": 64}, "as many queries as keys, .* not 1 over 64"),
        ("NVIDIA H200", {"query_offset": 3}, "at position 3"),
        ("NVIDIA H200", {"query_offset": jnp.zeros((2,), jnp.int32)}, "positions known only at run time"),
        ("NVIDIA H200", {"sliding_window": 4, "causal": False}, "sliding window is for causal attention"),
        ("NVIDIA H200", {"logits_soft_cap": 30.0}, "passes no soft cap to cuDNN"),
        ("NVIDIA H200", {"sinks": jnp.zeros((8,))}, "passes no sinks to cuDNN"),
        ("NVIDIA H200", {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "a generator of its own"),
        ("NVIDIA H200", {"value_size": 32}, "values of the keys' size 64, not 32"),
        ("NVIDIA H200", {"shape": (2, 63, 8, 64), "segment_ids": jnp.ones((2, 63), jnp.int32)}, "even lengths"),
        ("NVIDIA H200", {"return_lse": True}, "no gradient of the log-sum-exp, which return_lse=True asks for"),
    ],
)
def test_what_cudnn_cannot_serve_it_refuses_with_a_reason(kind, changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        chosen(kind, implementation="cudnn", **changes)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.parametrize("documents", ["none", "ids"])
def test_lowered_for_an_h200_the_step_calls_cudnn_once_each_way(documents):
    """The kernels that XLA is asked for, in shard_map over four GPUs: with a bias for documents alone."""
    aot = AOT(gpus=4)
    rows = jax.sharding.PartitionSpec("x")
    q, k = (aot.spec((4, *x.shape[1:]), x.dtype, rows) for x in (Q, K))
    ids = aot.spec((4, 64), jnp.int32, rows)

    attend_by_cudnn = functools.partial(attention, implementation="cudnn")

    def attend(q, k, v, ids):
        return attend_by_cudnn(q, k, v, segment_ids=ids if documents == "ids" else None)

    island = jax.shard_map(attend, mesh=aot.mesh, in_specs=rows, out_specs=rows)
    gradient = jax.grad(lambda *a: jnp.sum(island(*a).astype(jnp.float32)), argnums=(0, 1, 2))
    text = aot.lower(gradient, q, k, k, ids).as_text()
    kernel = "__cudnn$fmhaScaleBiasSoftmax" if documents == "ids" else "__cudnn$fmhaSoftmax"
    called = re.findall(r"custom_call @(__cudnn\$\w+)\(", text)
    assert sorted(called) == [kernel, kernel + "Backward"]
