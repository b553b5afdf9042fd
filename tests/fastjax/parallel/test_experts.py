"""A mixture's experts on several devices against the same on one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.lora.experts import routed_experts
from fastjax.parallel import make_mesh
from fastjax.quantization import MXFP4Weight
from pallas_kernels import routed_glu
from pallas_kernels.grouped_matmul import ZEROS_BEHIND
from pallas_kernels.grouped_matmul.api import DW, DX, MATMUL
from tests.fastjax.lora import test_experts as unit
from tests.fastjax.lora.conftest import Maker
from tests.support import steps

#: float32: the sum over a token's devices is another order of the same terms.
TOLERANCE = 1e-6
MESHES = {"four": {"expert": 4, "data": 2}, "two": {"expert": 2, "fsdp": 2, "data": 2}}


def mxfp4(out, into):
    """Random experts in MXFP4, whose codes are any bytes."""
    rng = np.random.default_rng(out)
    codes = rng.integers(0, 256, (unit.EXPERTS, out, into // 2), np.uint8)
    scales = rng.integers(122, 126, (unit.EXPERTS, out, into // 32), np.uint8)
    return MXFP4Weight(jnp.asarray(codes), jnp.asarray(scales), (out, into), "float32")


@functools.cache
def operands(name, kind):
    maker = Maker()
    block, arrays = unit.make(maker, name, jnp.float32 if kind == "mxfp4" else kind)
    if kind == "mxfp4":
        arrays = arrays._replace(gate_up=mxfp4(2 * unit.FEATURES, unit.WIDTH), down=mxfp4(unit.WIDTH, unit.FEATURES))
    x, dy = maker.normal(2, unit.TOKENS, unit.WIDTH, dtype=jnp.float32)
    return block, arrays, x, dy


def value_and_gradients(name, kind, experts, mesh):
    """The sums, the gradients of x, the weights and all that is trained, and the program's text."""
    block, arrays, x, dy = operands(name, kind)
    weights = unit.routing()[0]
    fields = {field: value for field, value in arrays._asdict().items() if value is not None}
    frozen = {field: fields.pop(field) for field in ("gate_up", "down") if kind in ("nf4", "mxfp4")}

    @jax.jit
    def run(trained, frozen, x, weights, experts, dy):
        def out(trained, x, weights):
            return routed_experts(block, x, weights, experts, arrays._replace(**trained, **frozen))

        y, pull = jax.vjp(out, trained, x, weights)
        return y, pull(dy)

    arguments = fields, frozen, x, weights, experts, dy
    if mesh is None:
        return jax.device_get(run(*arguments)), ""
    here = make_mesh(**mesh)
    rows, split = (NamedSharding(here, spec) for spec in (P(("data", "fsdp", "expert")), P("expert")))
    places = (*(jax.tree.map(lambda _: split, part) for part in (fields, frozen)), *[rows] * 4)
    arguments = jax.device_put(arguments, places)
    with jax.set_mesh(here):
        y, (trained, *others) = run(*arguments)
        text = run.lower(*arguments).as_text()
    for leaf in jax.tree.leaves(trained):
        assert leaf.sharding.shard_shape(leaf.shape)[0] == unit.EXPERTS // mesh["expert"]
    return jax.device_get((y, (trained, *others))), text


def assert_near(found, expected):
    """Every array, in the Euclidean norm."""
    for name, leaf in steps.named(expected).items():
        difference = np.linalg.norm(np.asarray(steps.named(found)[name], np.float64) - leaf)
        assert difference <= TOLERANCE * np.linalg.norm(np.asarray(leaf, np.float64)), name


@pytest.mark.exhaustive("four-trained", "four-mxfp4")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("clamped with biases", jnp.float32), ("both", "nf4"), ("biases", "mxfp4")],
    ids=["trained", "nf4", "mxfp4"],
)
@pytest.mark.parametrize("mesh", MESHES)
def test_experts_on_several_devices_equal_those_on_one(name, kind, mesh):
    """The last expert gets no token; a device of two experts gets a token once, with both of its choices."""
    experts = unit.routing()[1]
    expected, _ = value_and_gradients(name, kind, experts, None)
    found, text = value_and_gradients(name, kind, experts, MESHES[mesh])
    assert_near(found, expected)
    # Tokens there and sums back, and for the gradient: what the forward pass gathered is kept. Besides, numbers of the
    # choices, and a gradient of each choice's weight.
    gathered = re.findall(rf'"stablehlo\.all_gather"\(.*x{unit.WIDTH}xf32>\)', text)
    assert (len(gathered), text.count('"stablehlo.reduce_scatter"'), text.count("all_to_all")) == (2, 3, 0)


def test_no_token_is_dropped_where_all_choose_the_same_experts():
    experts = jnp.zeros((unit.TOKENS, unit.CHOSEN), jnp.int32).at[:, 1].set(1)
    expected, _ = value_and_gradients("both", "nf4", experts, None)
    found, _ = value_and_gradients("both", "nf4", experts, MESHES["two"])
    assert_near(found, expected)


@pytest.fixture
def poisoned(monkeypatch):
    """A context in which rows behind products' groups, and the gated block's, are NaN, but for a product's zeros.

    Sums over rows take in as many as those zeros, as Hopper's do of one operand.
    """

    def behind(rows, array):
        return jnp.where((jnp.arange(array.shape[0]) < rows).reshape(-1, *[1] * (array.ndim - 1)), array, jnp.nan)

    def poison(registry, name, wrapped):
        monkeypatch.setitem(registry.implementations, name, wrapped(registry[name]))

    def of_product(implementation):
        def product(x, w, sizes, *arguments):
            return behind(jnp.sum(sizes) + ZEROS_BEHIND, implementation.forward(x, w, sizes, *arguments))

        return implementation._replace(forward=product)

    def of_sum(implementation):
        def product(dy, x, sizes, rows, *, dtype):
            first = jnp.sum(sizes)
            near = (jnp.arange(len(dy)) >= first) & (jnp.arange(len(dy)) < first + ZEROS_BEHIND)
            read = [jnp.where(near[:, None], array, 0) for array in (dy, *([x] if rows is None else []))]
            nothing = sum(0 * jnp.sum(array.astype(jnp.float32)) for array in read)
            return (implementation.forward(dy, x, sizes, rows, dtype=dtype) + nothing).astype(dtype)

        return implementation._replace(forward=product)

    def of_glu(implementation):
        def forward(gate_up, rows, *arguments):
            return behind(rows, implementation.forward(gate_up, rows, *arguments))

        def backward(gate_up, dh, weights, rows, *arguments):
            return [behind(rows, array) for array in implementation.backward(gate_up, dh, weights, rows, *arguments)]

        return implementation._replace(forward=forward, backward=backward)

    poison(MATMUL, "xla", of_product)
    poison(DX, "xla", of_product)
    poison(DW, "xla", of_sum)
    poison(routed_glu.REGISTRY, "xla", of_glu)
    monkeypatch.setattr(unit, "TOKENS", 512)
    for cached in (unit.routing, operands):
        cached.cache_clear()
    yield
    for cached in (unit.routing, operands):
        cached.cache_clear()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "kind"), [("clamped with biases", jnp.float32), ("both", "nf4")], ids=["trained", "nf4"]
)
def test_what_has_no_meaning_is_read_by_nobody(name, kind):
    experts = unit.routing()[1]
    expected, _ = value_and_gradients(name, kind, experts, None)
    found, _ = value_and_gradients(name, kind, experts, {"expert": 4, "data": 2})
    assert_near(found, expected)
