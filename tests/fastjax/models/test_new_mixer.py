"""A mixer is one class of settings, rows of weights and one module: a recurrent one trains packed, saves and generates.

The toy stands for what comes with a state of one size: y = out(h), h = sigmoid(decay) * h + convolution(in(x)), with a
causal convolution of three taps a channel. State and convolution stop at documents.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from convert.families import FAMILIES
from convert.families.llama import LLAMA
from convert.model.layers import Attention
from convert.model.paths import WeightPath
from convert.model.spec import Row, layer_row
from fastjax import FastLanguageModel
from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.language_model.saving import save_pretrained
from fastjax.lora.params import BaseParam
from fastjax.models import caching
from fastjax.models.decoder import lm_logits
from fastjax.models.leaves import leaf_at
from fastjax.models.mixers import MIXERS
from fastjax.parallel import make_mesh
from fastjax.training.step import init_state
from tests.support import steps, tiny
from tests.support.generation import answers_in_ids

TAPS = 3
BLOCK = "recurrence"


@dataclasses.dataclass(frozen=True)
class Recurrence:
    block: ClassVar[str] = BLOCK
    sizes: ClassVar[dict[str, int]] = {"C": TAPS}


ROWS = (
    layer_row(f"{BLOCK}.in_proj.weight", "E", "E", kind="matrix", group=f"{BLOCK}.into"),
    Row(f"model.layers.{{i}}.{BLOCK}.conv", WeightPath(0, BLOCK, "conv"), ("E", "C"), "taps"),
    Row(f"model.layers.{{i}}.{BLOCK}.decay", WeightPath(0, BLOCK, "decay"), ("E",), "decay"),
    layer_row(f"{BLOCK}.out_proj.weight", "E", "E", kind="matrix", group=f"{BLOCK}.out"),
)


class State(NamedTuple):
    hidden: jax.Array
    tail: jax.Array

    PACKS = False
    AXES = (("layers", "rows", "embed"), ("layers", "rows", "taps", "embed"))


def chosen(rows, some, others):
    """One of two states, row by row."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), some, others)


class Vector(nnx.Module):
    def __init__(self, array):
        self.weight = BaseParam(array)


class RecurrenceModule(nnx.Module):
    float32 = False

    def __init__(self, settings, parts):
        own = parts.weights[settings.block]
        self.into, self.out = parts.projection(f"{BLOCK}.into"), parts.projection(f"{BLOCK}.out")
        self.conv, self.decay = Vector(own["conv"]["weight"]), Vector(own["decay"]["weight"])

    inner = property(lambda self: (self.into,))
    outer = property(lambda self: (self.out,))

    def united(self, dtype):
        return None

    def __call__(self, x, context, key, residual=None, made=None):
        places = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        ranges = context.segment_ranges
        first = jnp.broadcast_to(places == 0, x.shape[:2]) if ranges is None else ranges.k_start == places
        real = jnp.ones(x.shape[:2], bool) if ranges is None else ranges.k_end > ranges.k_start
        before = jax.tree.map(lambda leaf: leaf[0], self.init(1, len(x), (0, 0), x.dtype))
        return self._scanned(x, first, real, before, key, residual)[0]

    def init(self, layers, batch, pages, dtype):
        width = self.decay.weight[...].shape[-1]
        return State(jnp.zeros((layers, batch, width), dtype), jnp.zeros((layers, batch, TAPS - 1, width), dtype))

    def step(self, x, state, context, residual=None, made=None):
        slots, real = context.slots, context.slots.tokens != 0
        own = State(*map(slots.state_before, state))
        out, own = self._scanned(x, jnp.zeros_like(real), real, own, None, residual)
        return out, State(*map(slots.with_state, state, own))

    def _scanned(self, x, first, real, state, key, residual):
        (made,) = self.into(x, key)
        conv, decay = self.conv.weight[...].astype(x.dtype), jax.nn.sigmoid(self.decay.weight[...]).astype(x.dtype)

        def one(state, now):
            value, first, real = now
            before = chosen(first, jax.tree.map(jnp.zeros_like, state), state)
            window = jnp.concatenate([before.tail, value[:, None]], axis=1)
            hidden = decay[None] * before.hidden + jnp.einsum("bce,ec->be", window, conv)
            after = State(hidden, window[:, 1:])
            return chosen(real, after, state), hidden

        state, hidden = jax.lax.scan(one, state, [jnp.moveaxis(part, 1, 0) for part in (made, first, real)])
        (out,) = self.out(jnp.moveaxis(hidden, 0, 1), key, residual=residual)
        return out, state


TOY = dataclasses.replace(
    LLAMA,
    model_type="toy",
    mixers=lambda get, layers: tuple(Recurrence() if i % 2 == 0 else Attention() for i in range(layers)),
    rows=ROWS,
)
CONFIG = tiny.config(model_type="toy", num_hidden_layers=4)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    monkeypatch.setitem(MIXERS, Recurrence, RecurrenceModule)


def model(folder, **options):
    return tiny.model(folder, CONFIG, **options).value


def packed(lengths, rows=1, seed=0):
    """Documents one after another, and padding behind them."""
    total = sum(lengths) + 3
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths).tolist() + [0] * 3
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.arange(3)])
    tokens = np.random.default_rng(seed).integers(5, 99, (rows, total)).astype(np.int32)
    whole = [np.broadcast_to(np.asarray(part, np.int32), tokens.shape) for part in (positions, ids)]
    return tokens, *whole


def test_its_weights_are_of_its_layers_alone(tmp_path):
    config = model(tmp_path).config
    assert [layer.mixer.block for layer in config.layers] == [BLOCK, "self_attn"] * 2
    blocks = {(spec.path.layer, spec.path.block) for spec in config.specs if spec.path.block not in ("", "mlp")}
    assert blocks == {(0, BLOCK), (1, "self_attn"), (2, BLOCK), (3, "self_attn")}
    conv = next(spec for spec in config.specs if spec.kind == "taps")
    assert conv.shape == (48, TAPS) and conv.axes == ("embed", "taps")


@pytest.mark.exhaustive("scan")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_packed_documents_do_not_see_each_other(tmp_path, layer_loop):
    found = model(tmp_path, layer_loop=layer_loop)
    lengths = (7, 1, 12)
    tokens, positions, ids = packed(lengths)
    run = jax.jit(found.module())
    whole = np.asarray(run(tokens, positions, ids))
    start = 0
    for length in lengths:
        alone = np.asarray(run(tokens[:, start : start + length], positions[:, start : start + length]))
        # float32; the products' rows are others
        np.testing.assert_allclose(whole[:, start : start + length], alone, rtol=0, atol=2e-5)
        start += length


@pytest.mark.exhaustive(
    by="test_its_state_says_its_axes, tests/fastjax/generation/test_windows.py::test_answers_beyond_the_window"
)
def test_generation_gives_the_tokens_of_whole_passes(tmp_path):
    found = model(tmp_path)
    prompts = [[7, 9, 11, 13, 17], [5], list(range(20, 40))]
    answers = answers_in_ids(found, prompts, max_new_tokens=9)
    decoder = found.module()
    for prompt, answer in zip(prompts, answers, strict=True):
        row = jnp.asarray([prompt + answer], jnp.int32)
        logits = lm_logits(decoder.lm_head, decoder(row, jnp.arange(row.shape[1], dtype=jnp.int32)[None]))
        assert np.argmax(np.asarray(logits)[0, len(prompt) - 1 : -1], axis=-1).tolist() == answer


def test_its_state_says_its_axes(tmp_path):
    decoder = model(tmp_path).module()
    states = [state for stack in caching.empty_states(decoder, 2, (3, 8)) for state in stack]
    assert {type(state).__name__ for state in states} == {"State", "KeysValues"}
    sizes = {"layers": 2, "rows": 2, "pages": 3, "page": 8}
    for state in states:
        for leaf, names in zip(state, state.AXES, strict=True):
            named = dict(zip(names, leaf.shape, strict=True))
            assert {name: size for name, size in named.items() if name in sizes}.items() <= sizes.items()


def test_it_trains_whole_and_saves(tmp_path):
    found = model(tmp_path / "base", full_finetuning=True)
    tokens, positions, ids = packed((9, 14), rows=2)
    targets = np.where((ids > 0) & (np.roll(ids, -1, axis=1) == ids), np.roll(tokens, -1, axis=1), -100)
    batch = Batch(*(part[None] for part in (tokens, targets, ids, positions)))
    step, losses = steps.adam_step(found), []
    state = init_state(found.trainable, optax.adamw(1e-2, weight_decay=0.0), jax.random.key(0))
    for number in range(8):
        state, metrics = step(state, found.frozen, batch)
        losses.append(float(metrics["loss"]))
        if number == 0:  # Adam's first mean is a tenth of the gradient
            means = jax.tree_util.tree_leaves_with_path(state.opt_state[0].mu)
            norms = {leaf_at(path).kind: float(np.abs(leaf).max()) for path, leaf in means}
            assert norms.keys() >= {"taps", "decay", "matrix"} and min(norms.values()) > 0
    assert losses[-1] < 0.8 * losses[0]
    trained = found.replace(trainable=state.trainable)
    save_pretrained(trained, tmp_path / "trained")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "trained", dtype="float32", load_in_4bit=False)
    before, after = (np.asarray(each.module()(tokens, positions, ids)) for each in (trained, again.value))
    np.testing.assert_array_equal(before, after)


def test_adapters_go_on_its_projections(tmp_path):
    base = model(tmp_path)
    found = tiny.adapted(base, target_modules=["in_proj", "out_proj", "q_proj"])
    tokens, positions, ids = packed((9, 14))
    assert not np.allclose(found.module()(tokens, positions, ids), base.module()(tokens, positions, ids))


def test_tensor_parallelism_is_refused_by_name(tmp_path):
    found = model(tmp_path)
    tokens, positions, ids = packed((9, 4))
    with jax.set_mesh(make_mesh(tensor=2)), pytest.raises(ConfigError, match="layers of recurrence"):
        found.module()(tokens, positions, ids)
