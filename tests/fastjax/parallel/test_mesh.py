"""Where arrays live on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.models.layout import logical_axes
from fastjax.parallel import BATCH, batch_sharding, local, make_mesh, shard_frozen
from fastjax.parallel.gather import gathered
from fastjax.quantization import FP8Weight, NF4Weight, as_weight, concatenate
from tests.support import tiny
from tests.support.aot import AOT, needs_cuda_plugin

CONFIG = tiny.config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=96)


def test_matrices_are_split_by_output_rows_and_vectors_repeated():
    """With enough layers a stack of vectors looks like a matrix; split over its layers, each would be fetched apart."""
    packed = NF4Weight(
        codes=jnp.zeros((32, 64, 32), jnp.uint8),
        absmax=jnp.zeros((32, 64, 1), jnp.uint8),
        nested_absmax=jnp.zeros((32, 1)),
        nested_quant_map=jnp.zeros((32, 256)),
        nested_offset=jnp.zeros((32, 3)),
        quant_map=jnp.zeros((32, 16)),
        shape=(64, 64),
        parts=(32, 16, 16),
        dtype="bfloat16",
    )
    attention = {"qkv": {"weight": packed, "bias": jnp.zeros((32, 64))}, "o": {"weight": jnp.zeros((32, 64, 64))}}
    frozen = {
        "embed_tokens": {"weight": jnp.zeros((96, 64))},
        "layers": {0: {0: {"input_layernorm": {"weight": jnp.zeros((32, 64))}, "self_attn": attention}}},
        "norm": {"weight": jnp.zeros(64)},
    }
    axes = logical_axes(frozen, read_config(CONFIG))
    shardings = shard_frozen(frozen, axes, make_mesh(data=2, fsdp=4))
    found = {jax.tree_util.keystr(path): s.spec for path, s in jax.tree_util.tree_flatten_with_path(shardings)[0]}
    split = {name for name, spec in found.items() if "fsdp" in spec}
    layer = "['layers'][0][0]['self_attn']"
    assert split == {
        "['embed_tokens']['weight']",
        f"{layer}['o']['weight']",
        f"{layer}['qkv']['weight'].codes",
        f"{layer}['qkv']['weight'].absmax",
    }
    for name in split:
        assert found[name] == (P(None, "fsdp", None) if name.startswith(layer) else P("fsdp", None))


def test_what_does_not_divide_is_repeated():
    mesh = make_mesh(fsdp=4)
    tree = {"odd": {"weight": jnp.zeros((66, 8))}, "small": {"weight": jnp.zeros((16, 8))}}
    axes = jax.tree.map(lambda _: P("mlp", "embed input"), tree)
    assert all(s.spec == P() for s in jax.tree.leaves(shard_frozen(tree, axes, mesh)))


@pytest.mark.parametrize(
    ("sizes", "experts", "spec"),
    [
        ({"fsdp": 4}, 8, P("fsdp", None, None)),
        ({"fsdp": 4}, 6, P(None, "fsdp", None)),
        ({"fsdp": 2, "expert": 2}, 8, P(("expert", "fsdp"), None, None)),
        ({"fsdp": 4, "expert": 2}, 6, P("expert", "fsdp", None)),
    ],
)
def test_a_mesh_axis_splits_experts_or_else_their_rows(sizes, experts, spec):
    mesh, axes = make_mesh(**sizes), P("expert", "expert_mlp", "embed input")
    assert shard_frozen(jnp.zeros((experts, 64, 32)), axes, mesh).spec == spec


def test_only_what_fsdp_splits_is_gathered():
    mesh, axes = make_mesh(fsdp=2, expert=2), P("expert", "expert_mlp", "embed input")
    leaf = jax.device_put(jnp.arange(8 * 16 * 2).reshape(8, 16, 2), shard_frozen(jnp.zeros((8, 16, 2)), axes, mesh))
    with jax.set_mesh(mesh):
        whole = jax.jit(lambda leaf: gathered(leaf, [axes], leaf))(leaf)
    assert whole.sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
    np.testing.assert_array_equal(whole, leaf)


@pytest.mark.aot
@needs_cuda_plugin
def test_a_stack_of_experts_is_gathered_as_it_lies():
    """Split by rows, XLA turns the whole stack round before the loop, which takes as much memory again."""
    mesh, names = make_mesh(fsdp=4, devices=AOT("h100", 4).devices), P("layer", "expert", "expert_mlp", "embed input")
    stack = jax.ShapeDtypeStruct((6, 16, 64, 128), jnp.uint8)

    def multiply(x, codes):
        weights = codes.astype(jnp.bfloat16)
        return x + jnp.einsum("xso,xod->sd", jnp.einsum("sd,xod->xso", x, weights), weights)

    def layer(x, codes):
        codes = gathered(codes, [P(*names[1:])], x)
        return local(multiply, in_specs=(P(BATCH), P("expert")), out_specs=P(BATCH))(x, codes), None

    stack = jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=shard_frozen(stack, names, mesh))
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda stack, x: jax.lax.scan(layer, x, stack)[0])
        text = step.trace(stack, x).lower().compile().as_text()
    assert re.search(r"= \(?u8\S+.* all-gather(-start)?\(", text)
    turned = [found[1].split(",") for found in re.finditer(r"= u8\[([\d,]+)\]\S* (?:transpose|copy)\(", text)]
    assert [sizes for sizes in turned if "6" in sizes] == []


def test_a_weight_names_the_axes_of_each_of_its_arrays():
    """Codes that cross rows have none; scales have those of their codes."""
    rows, split, flat = P("heads", "embed input"), jnp.zeros((64, 128)), jnp.zeros((64, 40))
    packed = FP8Weight(jnp.zeros((64, 128), jnp.float8_e4m3fn), jnp.zeros((2, 1)), (32, 128), (64, 128), "float32")
    mixed = concatenate([NF4Weight.quantize(split), packed, split])
    found = jax.tree.leaves(as_weight(mixed).axes("heads", "embed input"))
    assert found == [rows, rows, *[P(None)] * 3, rows, rows, rows]
    assert jax.tree.leaves(NF4Weight.quantize(flat, nested=False).axes("heads", "embed input")) == [P(None)] * 2


def test_rows_of_a_batch_are_split_over_replicas():
    assert batch_sharding(make_mesh(data=2, fsdp=4)).spec == P(None, ("data", "fsdp"))
    assert batch_sharding(make_mesh(expert=2, context=2, tensor=2)).spec == P(None, ("expert",))


@pytest.mark.parametrize(("data", "fsdp"), [(8, 2), (0, 1), (1, 0)])
def test_a_mesh_needs_its_devices(data, fsdp):
    with pytest.raises(ConfigError, match="there are 8"):
        make_mesh(data=data, fsdp=fsdp)
