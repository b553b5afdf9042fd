"""Products in float8 over bases of every format against those of the rounded operands; steps, adapters and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from convert.families.mapping import read_config
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution.options import LoadOptions
from fastjax.execution.precision import make_precision
from fastjax.lora import mlp
from fastjax.lora.mlp import Block, Operands, gated_block
from fastjax.lora.rank_products import PartSpec
from fastjax.parallel import make_mesh
from fastjax.quantization import FP8Weight, NF4Weight, concatenate, matmul
from fastjax.quantization.float8 import Float8Compute, decoded_in_float8, in_float8
from fastjax.quantization.weights import as_weight
from pallas_kernels.float8 import Rounded, Scaled, quantize_rows
from tests.support import families, steps, tiny

SHAPE = (128, 192)


def weight(kind):
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(0.02 * rng.normal(size=SHAPE), jnp.bfloat16)
    if kind == "nf4":
        return NF4Weight.quantize(matrix)
    if kind == "mixed":
        return concatenate([NF4Weight.quantize(matrix[:64]), matrix[64:]])
    if kind == "dense":
        return matrix
    block = {"fp8, rows": (1, 192), "fp8, tensor": (128, 192), "fp8, blocks": (64, 64)}[kind]
    scales = rng.uniform(1e-4, 4e-4, (SHAPE[0] // block[0], SHAPE[1] // block[1]))
    codes = (matrix.astype(jnp.float32) / 4e-4).astype(jnp.float8_e4m3fn)
    return FP8Weight(codes, jnp.asarray(scales, jnp.float32), block, SHAPE, "bfloat16")


def wide(codes, scales):
    return np.asarray(codes, np.float64) * np.asarray(scales, np.float64)[..., None]


@pytest.mark.exhaustive("nf4")
@pytest.mark.parametrize("kind", ["nf4", "mixed", "dense", "fp8, rows", "fp8, tensor", "fp8, blocks"])
def test_products_are_those_of_the_rounded_operands(kind):
    base = weight(kind)
    rounded, rng = in_float8(base), np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(size=(2, 3, size)), jnp.bfloat16) for size in reversed(SHAPE))
    y, pull = jax.vjp(lambda x: matmul(x, rounded), x)
    dx = pull(dy)[0]
    np.testing.assert_array_equal(dx, as_weight(rounded).transposed(dy))
    pieces = base.weights if kind == "mixed" else [base]
    plain = np.asarray(as_weight(base).dequantize(jnp.float32), np.float64)
    expected, gradient, start = [], np.zeros((2, 3, SHAPE[1])), 0
    for piece in map(as_weight, pieces):
        own = dy[..., start : start + piece.shape[0]]
        start += piece.shape[0]
        forward, backward = piece.float8(False), piece.float8(True)
        expected.append(wide(*quantize_rows(x)) @ wide(*forward[:2]).T)
        if backward.factors is not None:
            own = (own.astype(jnp.float32) * backward.factors[None, None, :]).astype(own.dtype)
        gradient += wide(*quantize_rows(own)) @ wide(*backward[:2]).T
    for ours, theirs, exact in (
        (y, np.concatenate(expected, axis=-1), np.asarray(x, np.float64) @ plain.T),
        (dx, gradient, np.asarray(dy, np.float64) @ plain),
    ):
        # bfloat16's rounding of the result, of two products for mixed weights
        assert np.abs(np.asarray(ours, np.float64) - theirs).max() < 2.0**-7 * np.abs(theirs).max()
        # two operands of 3 bits: 2.6% each
        assert 0.02 < np.linalg.norm(theirs - exact) / np.linalg.norm(exact) < 0.045


@pytest.mark.exhaustive("nf4")
@pytest.mark.parametrize("kind", ["nf4", "mixed", "dense", "fp8, rows"])
def test_the_products_of_the_gradient_alone(kind):
    """To the bit bfloat16's products forward and float8's back."""
    base, rng, some = weight(kind), np.random.default_rng(2), slice(64, 128)
    x, dy = (jnp.asarray(rng.normal(size=(2, 3, size)), jnp.bfloat16) for size in reversed(SHAPE))
    both, back = in_float8(base), in_float8(base, forward=False)
    for ours, theirs, out in (
        (back, both, slice(None)),
        (as_weight(back).rows(some), as_weight(both).rows(some), some),
    ):
        y, pull = jax.vjp(lambda x, ours=ours: matmul(x, ours), x)
        np.testing.assert_array_equal(y, matmul(x, base)[..., out])
        np.testing.assert_array_equal(as_weight(ours).matmul_scaled(x), y)
        expected = as_weight(theirs).transposed(dy[..., out])
        np.testing.assert_array_equal(pull(dy[..., out])[0], expected)
        np.testing.assert_array_equal(as_weight(ours).transposed(dy[..., out]), expected)
    made = as_weight(decoded_in_float8(base, False, gradient=True))
    np.testing.assert_array_equal(matmul(x, made), matmul(x, base))
    np.testing.assert_array_equal(made.transposed(dy), as_weight(both).transposed(dy))
    if kind != "mixed":
        assert made.reads_rounded(True) == both.reads_rounded(True)
        assert not back.reads_rounded(False) and back.reads_rounded(True) == both.reads_rounded(True)


def test_codes_with_scales_of_blocks_are_rounded_once_and_never_exceed_the_format():
    rng = np.random.default_rng(2)
    codes = jnp.asarray(rng.uniform(-448, 448, (100, 72)), jnp.float8_e4m3fn).at[0, 0].set(448.0).at[1, 1].set(jnp.nan)
    scales = jnp.asarray(np.exp2(rng.uniform(-9, 3, (4, 3))), jnp.float32)  # whole blocks and shorter ones
    base = FP8Weight(codes, scales, (32, 32), (100, 72), "bfloat16")
    exact = np.asarray(codes, np.float64) * np.repeat(np.repeat(scales, 32, 0)[:100], 32, 1)[:, :72]
    for transposed in (False, True):
        operand = base.float8(transposed)
        assert operand.codes.dtype == jnp.float8_e4m3fn and operand.factors is None
        assert np.all(np.log2(operand.scales) == np.round(np.log2(operand.scales)))
        found, values = wide(*operand[:2]), exact.T if transposed else exact
        assert np.isnan(found).sum() == np.isnan(found[1, 1]) == 1
        # half a place of three bits, or half of a row's smallest step
        bound = np.maximum(np.abs(values) * 2.0**-4, np.asarray(operand.scales, np.float64)[:, None] * 2.0**-10)
        assert np.all((np.abs(found - values) <= bound) | np.isnan(values))


def test_what_is_not_bfloat16_is_multiplied_as_ever_and_rows_stay_in_float8():
    base = weight("nf4")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, SHAPE[1])), jnp.float32)
    np.testing.assert_array_equal(matmul(x, in_float8(base)), matmul(x, base))
    some, low = slice(64, 128), x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(matmul(low, in_float8(base).rows(some)), matmul(low, in_float8(base))[..., some])


#: Sides of 64 and 128, of whole blocks of NF4.
FLOAT8 = LoadOptions(dtype="bfloat16", base_compute="float8")
CONFIG = tiny.config(
    hidden_size=128,
    intermediate_size=256,
    head_dim=32,
    num_hidden_layers=1,
    initializer_range=0.05,
    attention_bias=False,
)
EVERY, OUTLIER = 37, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose layers' inputs have outlier features, which the matrices hardly read."""
    found = tmp_path_factory.mktemp("outliers")
    tensors = tiny.arrays(CONFIG)
    for name, array in tensors.items():
        if name.endswith("layernorm.weight"):
            array[::EVERY] = OUTLIER
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            array[:, ::EVERY] /= OUTLIER
    tiny.write_folder(found, CONFIG, tensors)
    return found


@functools.cache
def model(folder, dtype="bfloat16", **options):
    """Every trained array is random, and small: adapters read outliers too."""
    found = tiny.adapted(tiny.model(folder, CONFIG, load_in_4bit=True, dtype=dtype, **options))
    return found.replace(trainable=jax.tree.map(lambda leaf: 0.05 * leaf, found.trainable))


def batch():
    documents = [tiny.documents(CONFIG, lengths, seed=number) for number, lengths in enumerate([(30, 9), (40,)] * 4)]
    return Batch(*(array[None] for array in tiny.rows(documents, 40)))


def cosines(found, expected):
    flat = [
        (np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)) for a, b in zip(found, expected, strict=True)
    ]
    return [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in flat]


def test_loss_and_every_adapters_gradient_stay_near_float32s_with_outliers_in_the_input(folder):
    exact, expected = steps.gradients(model(folder, "float32"), batch())
    metrics, found = steps.gradients(model(folder, base_compute="float8"), batch())
    plain, others = steps.gradients(model(folder), batch())
    np.testing.assert_allclose(metrics["loss"], exact["loss"], rtol=1e-2)
    leaves = [jax.tree.leaves(tree) for tree in (found, expected, others)]
    rounded, near = cosines(leaves[0], leaves[1]), cosines(leaves[2], leaves[1])
    print(f"cosines with float32: float8 {min(rounded):.5f} to {max(rounded):.5f}, bfloat16 from {min(near):.5f}")
    # 3.7% of noise a product; it is float8's, not bfloat16's
    assert min(near) > min(rounded) > 0.99


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_scales_and_rounding_that_are_left_to_the_gated_block_change_no_bit(dropout, monkeypatch):
    """They are powers of two. With a dropped input of down's adapter its gradient is added before the block."""
    rng, (features, width) = np.random.default_rng(3), SHAPE

    def make(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    weights = [in_float8(NF4Weight.quantize(make(*shape))) for shape in ((2 * features, width), (width, features))]
    parts = [
        PartSpec("gate_proj", features, 4),
        PartSpec("up_proj", features, 4),
        PartSpec("down_proj", width, 4, dropout=dropout),
    ]
    inputs = {"gate_proj": width, "up_proj": width, "down_proj": features}
    matrices = {part.name: (make(4, inputs[part.name]), make(part.rows, 4)) for part in parts}
    block, x, dy = Block("silu", tuple(parts[:2]), parts[2]), make(2, 3, width), make(2, 3, width)
    seen = []

    def unit(x, matrices):
        arrays = Operands(weights[0], None, weights[1], matrices, jax.random.key(0) if dropout else None)
        return gated_block(block, x, arrays, x)

    def results():
        y, pull = jax.vjp(unit, x, matrices)
        return y, pull(dy)

    for place in ("glu_lora_forward", "glu_lora_backward"):
        kernel = getattr(mlp, place)
        monkeypatch.setattr(mlp, place, lambda *a, kernel=kernel, **o: seen.append(a) or kernel(*a, **o))
    found = results()
    assert [isinstance(arguments[0], Scaled) for arguments in seen] == [True] * len(seen)
    assert isinstance(seen[-1][2], Scaled) == (not dropout)
    plain = lambda weight, x, dtype=None: weight.matmul_into(x, dtype or x.dtype)  # noqa: E731
    monkeypatch.setattr(Float8Compute, "matmul_scaled", plain)
    monkeypatch.setattr(Float8Compute, "transposed_scaled", Float8Compute.transposed)
    monkeypatch.setattr(Float8Compute, "reads_rounded", lambda weight, transposed: False)  # rows come as they are
    seen.clear()
    expected = results()
    assert not any(isinstance(argument, Scaled) for arguments in seen for argument in arguments)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_whose_gradients_products_are_in_float8_has_bfloat16s_loss(folder):
    _, exact = steps.gradients(model(folder, "float32"), batch())
    plain, others = steps.gradients(model(folder), batch())
    metrics, found = steps.gradients(model(folder, base_compute="float8_backward"), batch())
    _, both = steps.gradients(model(folder, base_compute="float8"), batch())
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-6)
    near, far = (min(cosines(jax.tree.leaves(tree), jax.tree.leaves(exact))) for tree in (found, both))
    print(f"cosines with float32: backward alone from {near:.5f}, both passes from {far:.5f}")
    assert near > far
    assert_rounded(found, others)


def assert_rounded(found, plain):
    """Gradients that are not those of products in bfloat16, in another order of sums or not."""
    assert min(cosines(jax.tree.leaves(found), jax.tree.leaves(plain))) < 0.9995


@pytest.mark.exhaustive("float8")
@pytest.mark.parametrize("base_compute", ["float8", "float8_backward"])
def test_an_mlp_by_chunks_decodes_once_and_computes_the_same(folder, base_compute):
    """Rows are rounded one by one, so chunks of them are rounded alike, but for XLA's bfloat16 in other fusions."""
    whole, expected = steps.gradients(model(folder, base_compute=base_compute), batch())
    chunked = model(folder, base_compute=base_compute, mlp_chunk=128)
    metrics, found = steps.gradients(chunked, batch())
    np.testing.assert_allclose(metrics["loss"], whole["loss"], rtol=1e-4)
    near = min(cosines(jax.tree.leaves(found), jax.tree.leaves(expected)))
    assert near > 0.999, near
    decoder = chunked.module()
    mlp = decoder.layers[0][0].mlp
    assert mlp.decoded_into(jnp.dtype(jnp.bfloat16)) == base_compute
    assert_rounded(found, steps.gradients(model(folder), batch())[1])


@pytest.mark.exhaustive(by="tests/fastjax/execution/test_tensor_parts.py::test_products_in_float8_are_summed")
@pytest.mark.parametrize("base_compute", ["float8", "float8_backward"])
def test_several_devices_compute_what_one_does(folder, base_compute):
    ours = model(folder, base_compute=base_compute)
    metrics, expected = steps.gradients(ours, batch())
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread, found = steps.gradients(ours, batch(), mesh=mesh)
    assert_rounded(found, steps.gradients(model(folder), batch(), mesh=mesh)[1])
    # Parts of a row along `tensor` have scales of their own; their sums are rounded to bfloat16, then added.
    np.testing.assert_allclose(spread["loss"], metrics["loss"], rtol=1e-3)
    assert min(cosines(jax.tree.leaves(found), jax.tree.leaves(expected))) > 0.995


def test_mixtures_and_cards_without_float8_are_refused():
    config = read_config(CONFIG, where="config")
    for card in ("NVIDIA A100-SXM4-80GB", "Tesla T4"):
        device = AbstractDevice(device_kind=card, num_cores=None, platform="cuda")
        with (
            jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
            pytest.raises(ConfigError, match=f"base_compute: .*on {card} .*compute capability 8.9 or more"),
        ):
            make_precision(FLOAT8, config)
    moe = read_config(families.MIXTURES["qwen3_moe"], where="config")
    with pytest.raises(ConfigError, match="base_compute: .*got float8 with mixtures of experts"):
        make_precision(FLOAT8, moe)
    with pytest.raises(ConfigError, match="base_compute: expected None .*, got float8 with dtype float32"):
        make_precision(LoadOptions(base_compute="float8"), config)


@pytest.mark.exhaustive("float8")
@pytest.mark.parametrize("base_compute", ["float8", "float8_backward"])
def test_what_makes_the_rows_of_a_product_rounds_them(folder, base_compute, monkeypatch, request):
    """The norms, h where it is made, and the gated block's gradient with B's way back: and no number changes by it."""
    request.addfinalizer(jax.clear_caches)  # of programs that are traced with what is put in place here
    seen = {False: [], True: []}
    for transposed, name in ((False, "matmul_scaled"), (True, "transposed_scaled")):
        product = getattr(Float8Compute, name)

        def spied(weight, rows, *dtype, product=product, transposed=transposed):
            seen[transposed].append((weight.shape, isinstance(rows, Rounded)))
            return product(weight, rows, *dtype)

        monkeypatch.setattr(Float8Compute, name, spied)
    ours = model(folder, base_compute=base_compute)
    jax.clear_caches()  # what another test has traced is not traced again
    metrics, found = steps.gradients(ours, batch())
    width, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"] * 32
    qkv, o = (heads + 2 * CONFIG["num_key_value_heads"] * 32, width), (width, heads)
    gate_up, down = (2 * inner, width), (width, inner)
    forward = base_compute == "float8"
    assert set(seen[False]) == {(qkv, forward), (gate_up, forward), (down, forward), (o, False)}
    assert set(seen[True]) == {(qkv, True), (gate_up, True), (down, False)}  # o's goes through plain projections
    seen[False].clear(), seen[True].clear()
    monkeypatch.setattr(Float8Compute, "reads_rounded", lambda weight, transposed: False)
    jax.clear_caches()
    plain, expected = steps.gradients(ours, batch())
    assert not any(rounded for calls in seen.values() for _, rounded in calls)
    # XLA may keep more than bfloat16 between operations that it fuses
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-4)
    assert min(cosines(jax.tree.leaves(found), jax.tree.leaves(expected))) > 0.9995


def test_rows_that_are_multiplied_before_they_are_rounded_are_not_rounded_before():
    """Scales of the gradient's terms, and pieces of several formats, which have scales of their own."""
    reads = lambda held: [in_float8(held).reads_rounded(transposed) for transposed in (False, True)]  # noqa: E731
    assert reads(weight("fp8, rows")) == reads(weight("fp8, tensor")) == [True, False]
    assert reads(weight("fp8, blocks")) == reads(weight("nf4")) == reads(weight("dense")) == [True, True]
    assert reads(weight("mixed")) == [False, False]
    assert not as_weight(weight("nf4")).reads_rounded(False)  # it multiplies in bfloat16
