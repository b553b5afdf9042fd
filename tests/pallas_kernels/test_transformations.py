"""The table of docs/api/kernels.md: which of JAX's transformations each operation takes."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_kernels
from tests.support.operations import ROWS, cases

PAGE = Path(pallas_kernels.__file__).parents[1] / "docs/api/kernels.md"
NO_OPERATIONS = {
    "attention.attention_implementation",
    "cross_entropy.chunk_size_for",
    # in islands of their own
    "attention.ring_attention",
    "shard_gather.gather",
    "shard_gather.whole",
    "token_exchange.all_tokens",
    "token_exchange.own_sums",
}
REFUSED_EMPTY = {"attention.attention": "nowhere empty", "nf4.quantize_absmax": "at least one"}


def table() -> dict[str, dict[str, str]]:
    """Operation → transformation → "yes", "no" or "–": there is nothing to differentiate."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if "|" in line
    ]
    (_, *columns), _, *body = rows
    return {name.strip("`"): dict(zip(columns, cells, strict=True)) for name, *cells in body}


def mesh_of(kind) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])


def places_of(case) -> tuple[PartitionSpec, ...]:
    numbers = range(len(case.operands))
    return tuple(PartitionSpec("data") if number in case.split else PartitionSpec() for number in numbers)


def both(case, sums=lambda loss: loss):
    """The results and, where there are any, the gradients of the sum of their squares."""
    numbers = case.differentiated

    def loss(*operands):
        results = case.function(*operands)
        leaves = [
            leaf.astype(jnp.float32) for leaf in jax.tree.leaves(results) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        return sums(sum(jnp.sum(leaf**2) for leaf in leaves)), results

    if not numbers:
        return lambda *operands: (case.function(*operands), ())
    return lambda *operands: jax.grad(loss, argnums=numbers, has_aux=True)(*operands)[::-1]


def under_jit(case):
    return jax.jit(case.function), case.operands


def under_grad(case):
    return both(case), case.operands


def under_vmap(case):
    """One of two mapped calls; the other has other numbers in floating operands."""
    mapped = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1] if leaf.ndim else leaf]), case.operands)
    return lambda *operands: jax.tree.map(lambda leaf: leaf[0], jax.vmap(both(case))(*operands)), mapped


def under_shard_map(case):
    places = places_of(case)
    own = both(case, lambda loss: jax.lax.psum(loss, "data") if jax.typeof(loss).mat.varying else loss)
    of_results = PartitionSpec("data")

    def call(*operands):
        results, gradients = own(*operands)
        results = jax.tree.map(jnp.atleast_1d, results)
        return jax.tree.map(lambda leaf: leaf if jax.typeof(leaf).mat.varying else leaf[:0], results), gradients

    placed = (of_results, tuple(places[number] for number in case.differentiated))
    return jax.shard_map(call, mesh=mesh_of(AxisType.Auto), in_specs=places, out_specs=placed), case.operands


def on_explicit_axes(case):
    mesh = mesh_of(AxisType.Explicit)
    shardings = [NamedSharding(mesh, place) for place in places_of(case)]
    placed = [
        jax.tree.map(partial(jax.device_put, device=s), each) for s, each in zip(shardings, case.operands, strict=True)
    ]
    return both(case), placed


def exported(case):
    """For any number of rows; the operand of two rows a token has twice as many."""
    (rows,) = export.symbolic_shape("rows")

    def open_rows(number, leaf):
        if number not in case.split:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct((leaf.shape[0] // ROWS * rows, *leaf.shape[1:]), leaf.dtype)

    shapes = [jax.tree.map(partial(open_rows, number), each) for number, each in enumerate(case.operands)]
    return both(case), shapes


def in_scan(case):
    def loop(*operands):
        body = lambda carry, _: (carry, jax.checkpoint(both(case))(*operands))  # noqa: E731
        return jax.tree.map(lambda leaf: leaf[0], jax.lax.scan(body, None, None, length=2)[1])

    return loop, case.operands


def under_jvp(case):
    numbers = case.differentiated

    def call(*operands):
        def of(*chosen):
            given = dict(zip(numbers, chosen, strict=True))
            return case.function(*(given.get(number, each) for number, each in enumerate(operands)))

        chosen = [operands[number] for number in numbers]
        return jax.jvp(of, chosen, chosen)

    return call, case.operands


TRANSFORMATIONS = {
    "jit": under_jit,
    "grad": under_grad,
    "vmap": under_vmap,
    "checked shard_map": under_shard_map,
    "explicit axes": on_explicit_axes,
    "export": exported,
    "scan, remat": in_scan,
    "jvp": under_jvp,
}
CASES = cases()


def test_the_table_has_every_operation_and_every_transformation():
    documented = re.findall(r"^::: pallas_kernels\.([\w.]+)\.([a-z]\w+)", PAGE.read_text(), re.MULTILINE)
    assert {".".join(parts) for parts in documented} - NO_OPERATIONS == set(table()) == set(CASES)
    assert all(list(row) == list(TRANSFORMATIONS) for row in table().values())


@pytest.mark.parametrize("name", CASES)
def test_traced(name):
    """Every cell of the operation's row, as far as tracing tells."""
    case, found, errors = CASES[name], {}, []
    for column, transformed in TRANSFORMATIONS.items():
        if column in ("grad", "jvp") and not case.differentiated:
            found[column] = "–"
            continue
        function, operands = transformed(case)
        try:
            jax.jit(function).lower(*operands) if column == "jvp" else jax.eval_shape(function, *operands)
            found[column] = "yes"
        except Exception as error:
            found[column] = "no"
            errors.append(f"{column}: {error}")
    assert found == table()[name], "\n".join(errors)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.split])
def test_no_rows(name):
    case = CASES[name]
    operands = list(case.operands)
    for number in case.split:
        operands[number] = jax.tree.map(lambda leaf: leaf[:0], operands[number])
    if name in REFUSED_EMPTY:
        with pytest.raises(ValueError, match=REFUSED_EMPTY[name]):
            jax.eval_shape(both(case), *operands)
    else:
        jax.eval_shape(both(case), *operands)


@pytest.mark.parametrize(
    "name, argument",
    [
        ("rms_norm.rms_norm", "offset"),
        ("rms_norm.rms_norm_in_stream", "offset"),
        ("attention.attention", "scale"),
        ("attention.attention", "logits_soft_cap"),
        ("attention.attention", "dropout_rate"),
        ("cross_entropy.chunked_cross_entropy", "z_loss"),
        ("cross_entropy.token_log_probs", "logits_scale"),
    ],
)
def test_a_number_that_is_not_known_while_tracing(name, argument):
    module, operation = name.split(".")
    function = getattr(getattr(pallas_kernels, module), operation)
    x, targets = jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 2), jnp.int32)
    given: dict[str, Any] = {"eps": 1e-5} if module == "rms_norm" else {}
    operands = {"rms_norm": (x, jnp.ones(4)), "attention": (x, x, x)}.get(module)
    if operands is None:
        operands, given = (lambda *head: head[2], (), (), x[:, :, 0], targets), {"chunk_size": 1}
    with pytest.raises(TypeError, match=f"{operation}: {argument} must be known while the function is traced"):
        jax.eval_shape(lambda number: function(*operands, **given, **{argument: number}), 0.5)


@pytest.mark.exhaustive(by="test_traced")
@pytest.mark.parametrize("column", list(TRANSFORMATIONS)[:-1])
@pytest.mark.parametrize("name", CASES)
def test_values(name, column):
    """A transformed operation's results and gradients are the operation's own."""
    check_values(name, column)


@pytest.mark.parametrize(
    "name, column",
    [
        ("rms_norm.rms_norm", "checked shard_map"),
        ("attention.segment_ranges", "explicit axes"),
        ("grouped_matmul.grouped_matmul", "vmap"),
    ],
)
def test_values_of_the_most_telling(name, column):
    check_values(name, column)


def check_values(name, column):
    case = CASES[name]
    if table()[name][column] != "yes" or (column == "checked shard_map" and not case.of_rows):
        pytest.skip("no values to compare")
    function, operands = TRANSFORMATIONS[column](case)
    if column == "export":
        function, operands = export.export(jax.jit(function))(*operands).call, case.operands
    expected = jax.jit(both(case))(*case.operands)
    found = jax.jit(function)(*operands)
    if column == "jit":
        expected = expected[0]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(leaf.astype(jnp.float32)) for leaf in (one, other))
        if one.shape == other.shape or column != "checked shard_map":  # shared results are left out there
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
