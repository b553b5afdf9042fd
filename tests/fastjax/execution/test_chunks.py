"""A layer's MLP computed chunk by chunk: equal to the whole, with one chunk's intermediate results."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.execution.chunks import by_chunks, check_chunk, chunk_size
from fastjax.language_model import FastLanguageModel
from fastjax.lora.params import LoraParam
from fastjax.lora.units import WHOLE
from fastjax.models.mlp import MLP
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.models.residual_stream import FeedForward, Stream
from tests.fastjax.lora.conftest import BATCH, LENGTH, WIDTH, Maker, distance, value_and_gradients
from tests.fastjax.lora.test_mlp import FEATURES, make
from tests.support import families, tiny
from tests.support.hlo import equations

#: Two whole chunks and a shorter one.
SIZE = 12
CONFIG = read_config(tiny.CONFIG, where="tiny")
#: name -> ranks of gate, up and down, their options, whether every array is trained
CASES = {
    "NF4": ((8, 8, 8), {"kind": "nf4"}, False),
    "FP8, a bias, a rank of its own": ((4, 8, 0), {"kind": "fp8", "biases": True}, False),
    "several formats": ((8, 8, 8), {"kind": "mixed"}, False),
    "DoRA": ((8, 8, 8), {"kind": "nf4", "dora": True}, False),
    "no adapters": ((0, 0, 0), {}, True),
    "dropout": ((8, 8, 8), {"kind": "nf4", "dropout": 0.4}, False),
    "not gated": (None, {}, False),
}


def part(name):
    """A feed-forward part of a layer, and the filter of what it trains."""
    maker, (ranks, options, everything) = Maker(), CASES[name]
    if ranks is None:
        up = Projection(
            [("up_proj", FEATURES)], maker.weight("nf4", [FEATURES]), None, {"up_proj": maker.adapter(4, 128)}
        )
        mlp = MLP("relu2", up, Projection([("down_proj", WIDTH)], maker.weight("nf4", [WIDTH], FEATURES)), gated=False)
    else:
        mlp = make(maker, ranks, **options)
    norm = Norm(CONFIG, {"weight": 1 + 0.1 * maker.normal(WIDTH)})
    after = norm if everything else None
    return maker, FeedForward(Stream("mlp", norm, after, 1.0, 0.0, WHOLE), mlp), nnx.Param if everything else LoraParam


@pytest.mark.exhaustive("NF4")
@pytest.mark.parametrize("name", CASES)
def test_chunks_equal_the_whole_in_value_and_gradients(name):
    maker, module, trains = part(name)
    graphdef, trained, frozen = nnx.split(module, trains, ...)
    whole_graph, state = nnx.split(module)
    key = jax.random.key(3) if "dropout" in name else None
    decode = module.mlp.decoded_into(jnp.float32)

    def run(state, key, x):
        return nnx.merge(whole_graph, state)(key, x)

    def of(function):
        def loss(trained, x):
            return function(nnx.to_pure_dict(nnx.split(nnx.merge(graphdef, trained, frozen))[1]), x)

        return loss

    def whole(state, x):
        pieces = [x] if key is None else jnp.split(x, [*range(SIZE, LENGTH, SIZE)], axis=1)
        keys = [None] if key is None else [jax.random.fold_in(key, number) for number in range(len(pieces))]
        return jnp.concatenate([run(state, own, piece) for own, piece in zip(keys, pieces, strict=True)], axis=1)

    def chunked(state, x):
        return by_chunks(run, state, key, x, size=SIZE, decode=decode)

    x, dy = maker.normal(2, BATCH, LENGTH, WIDTH)
    arguments = nnx.to_pure_dict(trained), x, dy
    found, expected = (jax.jit(value_and_gradients, static_argnums=0)(of(f), *arguments) for f in (chunked, whole))
    assert max(distance(found, expected)) < 1e-6, name


def carried(jaxpr):
    """Shapes of what an iteration of a program's scans hands on, of nested ones too."""
    scans = (equation for equation in equations(jaxpr) if equation.primitive.name == "scan")
    return {one.aval.shape for scan in scans for one in scan.params["jaxpr"].jaxpr.outvars}


def test_no_array_is_as_long_as_the_row_and_no_frozen_matrix_has_a_gradient():
    length, features, width = 192, tiny.CONFIG["intermediate_size"], tiny.CONFIG["hidden_size"]
    model = FastLanguageModel.from_config(tiny.CONFIG, max_seq_length=length, mlp_chunk=16, dtype="float32")
    model = FastLanguageModel.get_peft_model(model, r=4)
    rows = jnp.zeros((1, length), jnp.int32)

    def loss(trainable):
        return jnp.sum(nnx.merge(model.graphdef, trainable, model.frozen)(rows, rows))

    program = jax.make_jaxpr(jax.grad(loss))(model.trainable)
    assert f"16,{2 * features}]" in str(program)
    assert f"{length},{features}]" not in str(program) and f"{length},{2 * features}]" not in str(program)
    shapes = carried(program)
    assert (4, width) in shapes  # of gate's or up's A
    assert not {(2 * features, width), (width, features)} & shapes


def test_auto_leaves_short_rows_and_policies_that_keep_projections():
    long, short = (2, 8192, WIDTH), (1, 8192, WIDTH)
    assert chunk_size("auto", long, "full") == chunk_size("auto", long, "offload_attention") == 1024
    assert chunk_size("auto", short, "full") is None
    assert chunk_size("auto", long, "projections") is chunk_size("auto", long, "none") is None
    assert chunk_size(512, short, "projections") == 512
    assert chunk_size(1, long, "full") == 1
    assert chunk_size(16384, long, "full") is chunk_size(None, long, "full") is None


def test_a_chunk_of_mixtures_alone_is_refused():
    config = read_config(families.MIXTURES["olmoe"], where="olmoe")
    assert check_chunk("auto", config) == "auto"
    with pytest.raises(ConfigError, match="mixtures of experts in all layers, got 64"):
        check_chunk(64, config)
