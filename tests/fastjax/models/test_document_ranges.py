"""Where the documents of packed rows lie: found once a batch, on each device for its own rows."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.data.batches import Batch
from fastjax.models.context import document_ranges
from fastjax.parallel import make_mesh
from fastjax.training.loss import loss_sums
from pallas_kernels.attention import segment_ranges
from tests.support import tiny
from tests.support.hlo import equations


def primitives(jaxpr):
    """How often each primitive occurs, at any depth."""
    return collections.Counter(equation.primitive.name for equation in equations(jaxpr))


@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
@pytest.mark.parametrize("remat", ["full", "projections"])
def test_three_layers_and_their_recomputation_share_one_search(layer_loop, remat):
    model = tiny.model(
        tiny.shared_folder(), tiny.CONFIG, full_finetuning=True, layer_loop=layer_loop, use_gradient_checkpointing=remat
    )
    rows = Batch(*map(jnp.asarray, tiny.rows([tiny.documents(tiny.CONFIG, (17, 20))], 40)))

    def loss(trainable, rows):
        decoder = nnx.merge(model.graphdef, trainable, model.frozen)
        return loss_sums(decoder, model.trainable_filter, rows, key=None).loss_sum

    found = primitives(jax.make_jaxpr(jax.grad(loss))(model.trainable, rows).jaxpr)
    alone = primitives(jax.make_jaxpr(segment_ranges)(rows.segment_ids).jaxpr)
    for name in ("sort", "cummax"):
        assert found[name] == alone[name] > 0, name


def test_each_device_finds_those_of_its_own_rows():
    ids = np.zeros((16, 40), np.int32)
    rng = np.random.default_rng(0)
    for row in ids[:-1]:
        row[: rng.integers(20, 41)] = 1
        row[rng.integers(1, 20) :] *= 2
    whole = jax.jit(segment_ranges)(ids)
    with jax.set_mesh(make_mesh(data=2, fsdp=4)):
        split = jax.jit(document_ranges)(ids)
    assert jax.tree.structure(split) == jax.tree.structure(whole)
    for ours, theirs in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert [shard.data.shape[0] for shard in ours.addressable_shards] == [2] * 8
