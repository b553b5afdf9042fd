"""Gradients that travel in few bits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from convert.families.mapping import read_config
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape, make_mesh
from fastjax.parallel.checks import check_exchange
from fastjax.parallel.exchange import FORMATS, UNIT, exchange, no_feedback, pack, unpack
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step
from tests.support import families, steps, tiny

REPLICAS = 8
PACKED = ("bfloat16", "int8", "int4")
#: A stack of layers of odd sizes, a matrix, and a vector that travels in float32.
SHAPES = {"layers": {0: {0: {"matrix": (2, 70, 90)}}}, "table": (101, 48), "norm": (48,)}
CONFIG = tiny.config(hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def gradients(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 3))
    return jax.tree.map(
        lambda shape: jax.random.normal(next(keys), (REPLICAS, *shape)), SHAPES, is_leaf=lambda s: isinstance(s, tuple)
    )


@functools.cache
def exchanged(name):
    """[replicas, …] gradients and feedback -> every replica's own copy of the sums, and the feedback."""
    mesh = make_mesh(data=REPLICAS)

    def own(gradients, feedback):
        one = jax.tree.map(lambda leaf: leaf[0], gradients)
        sums, feedback = exchange(one, feedback, name, ("data",))
        return jax.tree.map(lambda leaf: leaf[None], sums), feedback

    parts = P("data")
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(parts, parts), out_specs=(parts, parts), check_vma=False))


@pytest.mark.exhaustive("bfloat16", "int4")
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_number_is_the_nearest_of_its_format(name):
    form, numbers = FORMATS[name], jax.random.normal(jax.random.key(0), (3, 4 * UNIT)) * 10
    found = unpack(pack(numbers, form), form)
    scale = np.abs(np.asarray(numbers).reshape(3, -1, form.block)).max(-1) / (form.levels or 1)
    bound = np.repeat(scale, form.block, 1) / 2 if form.levels else np.abs(numbers) / 256
    assert np.all(np.abs(found - numbers) <= 1.0001 * bound)
    np.testing.assert_allclose(unpack(pack(found, form), form), found, rtol=1e-6)
    assert not np.any(unpack(pack(jnp.zeros(UNIT), form), form))


@pytest.mark.exhaustive("bfloat16", "int4")
@pytest.mark.parametrize("name", PACKED)
def test_replicas_hold_the_same_bits_and_what_is_kept_back_makes_up_the_sum(name):
    total, received = None, None
    feedback = no_feedback(jax.tree.map(lambda leaf: leaf[0], gradients(0)), REPLICAS)
    for seed in range(3):
        own = gradients(seed)
        sums, feedback = exchanged(name)(own, feedback)
        for leaf in jax.tree.leaves(sums):
            assert all(np.asarray(copy).tobytes() == np.asarray(leaf[0]).tobytes() for copy in leaf)
        plus = functools.partial(jax.tree.map, jnp.add)
        own, sums = (jax.tree.map(f, t) for f, t in ((lambda a: a.sum(0), own), (lambda a: a[0], sums)))
        total, received = (own, sums) if total is None else (plus(total, own), plus(received, sums))
    np.testing.assert_allclose(received["norm"], total["norm"], rtol=1e-6, atol=1e-6)
    assert feedback.sent["norm"] is None
    for place in (lambda t: t["table"], lambda t: t["layers"][0][0]["matrix"]):
        want, got = np.asarray(place(total)), np.asarray(place(received))
        stack = want.shape[:-2]
        kept = np.asarray(place(feedback.sent), np.float32).sum(0)
        owners = np.moveaxis(np.asarray(place(feedback.summed), np.float32), 0, -2).reshape(*stack, -1)
        kept = kept + owners[..., : want[(0,) * len(stack)].size].reshape(want.shape)
        # All that was sent has come, or is kept: in bfloat16, of what rounding took (at most a seventh of a maximum).
        largest = np.abs(want).max()
        np.testing.assert_allclose(got + kept, want, rtol=0, atol=5e-3 * largest)
        assert np.abs(got - want).max() > 0


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_found_by_all(name, value):
    own = gradients(0)
    own["table"] = own["table"].at[5, 50, 7].set(value)
    sums, _ = exchanged(name)(own, no_feedback(jax.tree.map(lambda leaf: leaf[0], own), REPLICAS))
    assert np.all(~np.isfinite(np.asarray(sums["table"])).all(axis=(1, 2)))
    assert np.all(np.isfinite(np.asarray(sums["layers"][0][0]["matrix"])))


@pytest.mark.parametrize(("name", "largest"), [("bfloat16", 1 / 2), ("int8", 1 / 3.93), ("int4", 1 / 7)])
def test_the_bytes_on_the_link_are_the_formats_share(name, largest):
    """Read off the program: what an all-to-all and an all-gather send, over a float32 all-reduce's 2(n - 1)/n."""
    size = 256 * REPLICAS * UNIT
    own = {"m": jnp.zeros((REPLICAS, size // 64, 64))}
    text = exchanged(name).lower(own, no_feedback(jax.tree.map(lambda a: a[0], own), REPLICAS)).as_text()
    moved = 0.0
    for line in text.splitlines():
        if "all_to_all" in line or "all_gather" in line:
            *dims, kind = re.findall(r"-> tensor<([\w]+)>", line)[0].replace("ui", "i").split("x")
            moved += np.prod([int(d) for d in dims]) * int(re.sub(r"\D", "", kind)) / 8 * (REPLICAS - 1) / REPLICAS
    share = moved / (2 * (REPLICAS - 1) / REPLICAS * 4 * size)
    assert share == pytest.approx(FORMATS[name].bytes / FORMATS["float32"].bytes, rel=1e-9)
    assert share <= largest


@functools.cache
def model():
    return tiny.model(
        tiny.shared_folder(hidden_size=64, intermediate_size=128, num_hidden_layers=2), CONFIG, full_finetuning=True
    )


def batch():
    lengths = [(17, 20), (9, 4, 25), (38,), (11, 11), (30,), (12, 6), (40,), (21, 3)]
    rows = [tiny.documents(CONFIG, row, seed=n) for n, row in enumerate(lengths)]
    return Batch(*(array[None] for array in tiny.rows(rows, 40)))


OPTIMIZER = OptimizerConfig(learning_rate=3e-3, max_grad_norm=1.0, lr_scheduler_type="constant", warmup_ratio=0.0)


def step():
    ours, optimizer = model(), make_optimizer(OPTIMIZER, 40)
    options = {"mesh": make_mesh(data=REPLICAS), "gradient_exchange": "int4"}
    made = make_train_step(ours.graphdef, optimizer, ours.trainable_filter, **options)
    start = functools.partial(init_state, gradient_exchange="int4", replicas=REPLICAS)
    return made, lambda: start(ours.trainable, optimizer, jax.random.key(1))


def test_a_checkpoint_holds_what_is_kept_back_and_a_bad_step_leaves_it(tmp_path):
    made, start = step()
    state, _ = made(start(), model().frozen, batch())
    kept = jax.device_get(state.feedback)
    assert max(np.abs(leaf.astype(np.float32)).max() for leaf in jax.tree.leaves(kept)) > 0
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, Progress(step=1))
    checkpoints.wait()
    again = checkpoints.load(1, start())
    steps.assert_same(jax.device_get(again.feedback), kept)
    after = [jax.device_get(made(one, model().frozen, batch())[0].trainable) for one in (state, again)]
    steps.assert_same(*after)
    broken = checkpoints.load(1, start())
    norm = broken.trainable["norm"]
    broken = broken._replace(trainable=broken.trainable | {"norm": {"weight": norm["weight"] * np.nan}})
    broken, metrics = made(broken, model().frozen, batch())
    assert not metrics["finite"]
    steps.assert_same(jax.device_get(broken.feedback), kept)


@pytest.mark.parametrize(
    ("family", "shape", "name", "expected"),
    [
        ("llama", MeshShape(data=2), "int2", "one of float32, bfloat16, int8, int4"),
        ("llama", MeshShape(fsdp=2), "int8", "float32 with one replica, as parallel.data is 1"),
        ("llama", MeshShape(data=2, fsdp=2), "int8", "float32 where devices share a replica"),
        ("qwen2_moe", MeshShape(data=2), "int4", "float32 with a mixture of experts"),
    ],
)
def test_what_an_exchange_does_not_serve_is_refused(family, shape, name, expected):
    config = read_config(CONFIG if family == "llama" else families.MIXTURES[family])
    with pytest.raises(ConfigError, match=f"^parallel.gradient_exchange: expected {expected}.*, got {name}$"):
        check_exchange(config, shape, name)
    check_exchange(config, shape, "float32")
