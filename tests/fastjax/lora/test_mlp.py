"""The gated block as a unit: values and gradients against float64, for every option of adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.lora.params import BaseParam, LoraParam
from fastjax.models.mlp import MLP
from fastjax.models.projection import Projection
from fastjax.residuals import SAVED
from tests.fastjax.lora.conftest import BATCH, LENGTH, WIDTH, Maker, counted
from tests.support import plain_lora

FEATURES = 128
#: name -> ranks of gate, up and down (0: no adapter), options
CASES = {
    "all": ((8, 8, 8), {}),
    "gate and up": ((8, 8, 0), {}),
    "down": ((0, 0, 8), {}),
    "up": ((0, 4, 0), {}),
    "ranks of their own, wider than a kernel serves": ((16, 3, 130), {}),
    "dropout": ((8, 8, 8), {"dropout": 0.3}),
    "biases": ((12, 8, 8), {"biases": True}),
    "biases under the down adapter alone": ((0, 0, 8), {"biases": True}),
    "one projection for both": ((8,), {}),
    "one projection for both, with biases and dropout": ((8, 0), {"biases": True, "dropout": 0.3}),
}


def make(maker, ranks, *, kind=jnp.float32, biases=False, dora=False, activation="silu", **options):
    """An MLP; gate and up are one projection where a rank for them both is given, or two ranks in all."""
    names = ["gate_proj", "up_proj"] if len(ranks) == 3 else ["gate_up_proj"]
    *inner, down = ranks if len(ranks) > 1 else (*ranks, 4)
    sizes = [(name, 2 * FEATURES // len(names)) for name in names]
    scalings = iter((1.5, 0.25, 2.0))

    def projection(sizes, ranks, columns):
        found = {
            name: maker.adapter(rank, rows, columns, scaling=next(scalings), dora=dora, **options)
            for (name, rows), rank in zip(sizes, ranks, strict=True)
            if rank
        }
        total = sum(rows for _, rows in sizes)
        bias = maker.normal(total) if biases else None
        return Projection(sizes, maker.weight(kind, [rows for _, rows in sizes], columns), bias, found)

    return MLP(activation, projection(sizes, inner, WIDTH), projection([("down_proj", WIDTH)], [down], FEATURES))


def functions(block, dropout, kind=LoraParam):
    graphdef, trained, frozen = nnx.split(block, kind, ...)

    def of(run):
        def loss(trained, x):
            return run(nnx.merge(graphdef, trained, frozen), x, jax.random.key(3) if dropout else None)

        return loss

    return of(lambda block, x, key: block(x, key)), of(plain_lora.mlp), nnx.to_pure_dict(trained)


@pytest.mark.exhaustive(
    "float32-all",
    "float32-one projection for both",
    "float32-ranks of their own, wider than a kernel serves",
    "bfloat16-dropout",
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_plain_lora(compare, name, dtype):
    maker, (ranks, options) = Maker(), CASES[name]
    block = make(maker, ranks, kind=dtype, **options)
    assert block.why_not_fused(dtype) is None
    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH, dtype=dtype)
    compare(*functions(block, options.get("dropout")), x, dy)


def test_what_a_fresh_adapter_of_down_makes_counts_once():
    """As of a projection alone."""
    maker = Maker()
    block = make(maker, (0, 0, 4), kind=jnp.bfloat16)
    x, residual = maker.normal(2, 4, 512, WIDTH, dtype=jnp.bfloat16)
    adapter = block.down.adapters["down_proj"]
    plain = jax.nn.silu(x @ block.gate_up.weight[:FEATURES].T) * (x @ block.gate_up.weight[FEATURES:].T)
    products = np.asarray(plain @ adapter.lora_A[...].T.astype(x.dtype), np.float64)
    b = maker.normal(WIDTH, 4, scale=2.0**-12)

    @nnx.jit
    def run(lora_B, x):
        own = nnx.clone(block)
        own.down.adapters["down_proj"].lora_B.set_value(lora_B)
        return own(x, None, residual)

    addend = adapter.scaling * products @ np.asarray(b, np.float64).T
    assert counted(run, (b, addend), x) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("ranks", [(0, 0, 0), (8, 8, 0)], ids=["no adapter", "beside adapters"])
def test_trained_weights_have_their_gradients(compare, ranks):
    """Without an adapter h comes out of the kernel that makes the gradient of gate and up."""
    maker = Maker(5)
    block = make(maker, ranks)
    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH)
    compare(*functions(block, None, BaseParam), x, dy)


@pytest.mark.exhaustive("nf4-dropout", "fp8-all")
@pytest.mark.parametrize("name", ["all", "dropout"])
@pytest.mark.parametrize("kind", ["nf4", "fp8", "mixed"])
def test_equals_plain_lora_on_packed_weights(compare, name, kind):
    maker, (ranks, options) = Maker(1), CASES[name]
    block = make(maker, ranks, kind=kind, **options)
    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH)
    compare(*functions(block, options.get("dropout")), x, dy)


@pytest.mark.exhaustive("gelu")
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_other_activations(compare, activation):
    maker = Maker(2)
    block = make(maker, (8, 8, 8), activation=activation)
    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH)
    compare(*functions(block, None), x, dy)


@pytest.mark.exhaustive("options1")
@pytest.mark.parametrize("options", [{"dora": True}, {"dora": True, "dropout": 0.3, "biases": True}])
def test_dora_goes_projection_by_projection(compare, options):
    maker = Maker(3)
    block = make(maker, (8, 8, 8), **options)
    assert "DoRA" in block.why_not_fused(jnp.float32)
    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH)
    compare(*functions(block, options.get("dropout")), x, dy)


def test_why_a_block_is_not_one_unit():
    maker = Maker(4)
    assert make(maker, (0, 0, 0)).why_not_fused(jnp.float32) is None
    assert "no adapter" in make(maker, (0, 0, 0), biases=True).why_not_fused(jnp.float32)
    block = make(maker, (4, 4, 4))
    block.down.float32 = ("down_proj",)
    assert "different dtypes" in block.why_not_fused(jnp.bfloat16) and block.why_not_fused(jnp.float32) is None


@pytest.mark.exhaustive("ranks0-relu2")
@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize("ranks", [(8, 8), (0, 8), (0, 0)])
def test_a_block_without_a_gate_goes_projection_by_projection(compare, activation, ranks):
    maker = Maker(6)

    def projection(name, rows, columns, rank):
        own = {name: maker.adapter(rank, rows, columns, dropout=0.3)} if rank else {}
        return Projection([(name, rows)], maker.weight(jnp.float32, [rows], columns), maker.normal(rows), own)

    inner, outer = projection("up_proj", FEATURES, WIDTH, ranks[0]), projection("down_proj", WIDTH, FEATURES, ranks[1])
    block = MLP(activation, inner, outer, gated=False)
    assert "not gated" in block.why_not_fused(jnp.float32)
    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH)
    compare(*functions(block, 0.3), x, dy)


def kept(policy, name="all"):
    """Shapes of the arrays that a block keeps for its backward pass, under a policy of jax.checkpoint or none."""
    maker, (ranks, options) = Maker(5), CASES[name]
    unit, _, trained = functions(make(maker, ranks, kind="nf4", **options), options.get("dropout"))
    if policy is not None:
        unit = jax.checkpoint(unit, policy=policy)
    x = maker.normal(BATCH, LENGTH, WIDTH, dtype=jnp.bfloat16)
    pullback = jax.eval_shape(lambda trained, x: jax.vjp(unit, trained, x)[1], trained, x)
    return [leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")]


@pytest.mark.parametrize("name", ["all", "dropout", "biases"])
def test_gate_and_up_are_kept_once_and_no_decoded_weight(name):
    shapes = kept(None, name)
    large = sorted(shape for shape in shapes if shape[:2] == (BATCH, LENGTH) and shape[-1] >= WIDTH)
    assert large == [(BATCH, LENGTH, WIDTH), (BATCH, LENGTH, 2 * FEATURES)]
    assert not {(2 * FEATURES, WIDTH), (WIDTH, FEATURES)} & set(shapes)


def test_the_policy_by_names_keeps_gate_and_up_and_the_thin_products():
    shapes = kept(jax.checkpoint_policies.save_only_these_names(*SAVED))
    of_tokens = sorted(shape for shape in shapes if shape[:2] == (BATCH, LENGTH))
    # x (the block's own argument), gate and up, padded thin products of gate and up, and of down
    assert of_tokens == [
        (BATCH, LENGTH, 16),
        (BATCH, LENGTH, 32),
        (BATCH, LENGTH, WIDTH),
        (BATCH, LENGTH, 2 * FEATURES),
    ]


def test_the_policy_that_keeps_nothing_keeps_the_input():
    shapes = kept(jax.checkpoint_policies.nothing_saveable)
    assert [shape for shape in shapes if shape[:2] == (BATCH, LENGTH)] == [(BATCH, LENGTH, WIDTH)]
