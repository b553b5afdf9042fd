"""Layers whose matrices lie in the host's memory: the same numbers, and copies beside the products."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from fastjax.errors import ConfigError
from fastjax.execution.streamed import run_streamed
from fastjax.host_memory import in_host_memory, to_host_memory
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.host import with_host_layers
from fastjax.language_model.variants import with_checkpointing
from fastjax.parallel import make_mesh
from fastjax.training.compiled import COMPILER_OPTIONS
from fastjax.training.loss import loss_sums
from fastjax.training.step import init_state, make_train_step
from tests.support import families, steps, tiny
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.generation import answers_in_ids, whole_passes

LLAMA = {"hidden_size": 64, "num_hidden_layers": 4}
MIXTURE = families.MIXTURES["qwen3_moe"] | {"num_hidden_layers": 5, "mlp_only_layers": []}


def in_host(model):
    return {name for name, leaf in steps.named(model.frozen).items() if in_host_memory(leaf)}


def by_chunks(model, chunk):
    """The model whose MLPs compute so many tokens at a time."""
    return model.executed(dataclasses.replace(model.execution, chunk=chunk))


def loop_bodies(text):
    """The lines of the two loops' bodies with copies in them."""
    bodies = [
        part for part in text.split("\n\n") if "fusion-start" in part and "tuple(" in part and "ENTRY" not in part
    ]
    assert len(bodies) == 2
    return [body.splitlines() for body in bodies]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Masks are half of a program's compilation: adapters before and in the MLP stand for the others."""
    base = tiny.model(tmp_path_factory.mktemp("base"), tiny.config(**LLAMA), load_in_4bit=True)
    return tiny.adapted(base, lora_dropout=0.25, target_modules=["q_proj", "down_proj"])


@pytest.mark.exhaustive("offload-16")  # both passes, residuals and chunks; "full" is the mixture's below
@pytest.mark.parametrize(("policy", "chunk"), [("full", None), ("projections", None), ("offload", 16)])
def test_the_step_is_the_same_bit_for_bit(adapted, policy, chunk):
    """As with the layers on the device and everything computed again."""
    plain = by_chunks(with_checkpointing(adapted, "full"), chunk)
    moved = with_host_layers(by_chunks(with_checkpointing(adapted, policy), chunk))
    assert not in_host(plain) and any("gate_up" in name and "codes" in name for name in in_host(moved))
    batch = tiny.batches(tiny.config(**LLAMA), 1, accumulation=2)[0]
    (metrics, grads), (expected, other) = steps.gradients(moved, batch), steps.gradients(plain, batch)
    assert metrics["loss"] == expected["loss"]
    steps.assert_same(grads, other)


def test_the_first_layers_alone_send_their_attention_to_the_host():
    base = tiny.model(
        tiny.shared_folder(**LLAMA), tiny.config(**LLAMA), use_gradient_checkpointing="offload_attention:2"
    )
    lora = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
    ours, batch = tiny.adapted(base, **lora), tiny.batches(tiny.config(**LLAMA), 1)[0]
    assert [(stack.start, stack.count) for stack in ours.plan] == [(0, 2), (2, 2)]
    plain = tiny.adapted(tiny.model(tiny.shared_folder(**LLAMA), tiny.config(**LLAMA)), **lora)
    (metrics, grads), (expected, other) = steps.gradients(ours, batch), steps.gradients(plain, batch)
    assert metrics["loss"] == expected["loss"]
    steps.assert_close(tiny.by_layer(grads, ours.plan), tiny.by_layer(other, plain.plan), 5e-6)


def test_periods_of_layers_and_their_sums(tmp_path):
    """Two kinds of layers by turns and one at the end, which stays on the device; the routers' sums have gradients."""
    model = tiny.adapted(tiny.model(tmp_path, MIXTURE), target_modules=["q_proj", "o_proj"])
    moved = with_host_layers(model)
    assert [(stack.period, stack.count) for stack in moved.plan] == [(2, 2), (1, 1)]
    assert {name.split("]")[1] for name in in_host(moved)} == {"[0"}, "of the stack with number 0"
    batch, loss = tiny.batches(MIXTURE, 1)[0], functools.partial(loss_sums, router_aux_loss_coef=0.5)
    (metrics, grads), (expected, other) = (steps.gradients(m, batch, loss=loss) for m in (moved, model))
    steps.assert_same(metrics, expected)
    steps.assert_same(grads, other)


def test_a_step_compiled_from_shapes_takes_layers_from_the_host(adapted):
    """As a run compiles it, before its model is there; the program of the test above."""
    moved = with_host_layers(by_chunks(with_checkpointing(adapted, "offload"), 16))
    batch = tiny.batches(tiny.config(**LLAMA), 1, accumulation=2)[0]
    step = make_train_step(moved.graphdef, steps.RECORDER, moved.trainable_filter)
    state = init_state(moved.trainable, steps.RECORDER, jax.random.key(0))

    def shape(leaf):
        found = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return to_host_memory(found) if in_host_memory(leaf) else found

    shapes = jax.tree.map(shape, moved.frozen)
    assert in_host(moved.replace(frozen=shapes)) == in_host(moved)
    traced = step.trace(state, shapes, batch)
    places = [aval.memory_space for aval in traced.jaxpr.in_avals]
    assert places.count(jax.memory.Space.Host) == len(in_host(moved)) > 0
    expected, grads = steps.gradients(moved, batch)
    after, metrics = traced.lower().compile()(state, moved.frozen, batch)
    assert metrics["loss"] == expected["loss"]
    steps.assert_same(jax.device_get(after.opt_state), grads)


def test_loaded_layers_stay_in_the_host(tmp_path):
    folder = tiny.shared_folder(**LLAMA)
    options = {"dtype": "float32", "max_seq_length": 64}
    loaded, _ = FastLanguageModel.from_pretrained(folder, offload_layers=True, **options)
    plain, _ = FastLanguageModel.from_pretrained(folder, **options)
    assert in_host(loaded) == in_host(with_host_layers(plain))
    steps.assert_same(loaded.frozen, plain.frozen)
    # Adapters on the second half of the layers: stacks of two, rearranged.
    lora = {
        "r": 2,
        "layers_to_transform": [2, 3],
        "init_lora_weights": False,
        "target_modules": ["q_proj", "down_proj"],
    }
    fresh, other = (FastLanguageModel.get_peft_model(model, **lora) for model in (loaded, plain))
    assert [stack.count for stack in fresh.plan] == [2, 2] and in_host(fresh) == in_host(with_host_layers(other))
    prompts = [[5, 9, 30], [7, 8]]
    found = answers_in_ids(fresh, prompts, max_new_tokens=4)
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer) == 4 and answer == whole_passes(other, prompt, answer, width=16).argmax(-1).tolist()
    merged = fresh.save_pretrained_merged(tmp_path / "merged", base_in_nf4=True)
    assert (merged / "config.json").exists()


def test_refusals(adapted):
    with pytest.raises(ConfigError, match="offload_layers: expected false where every weight is trained, got true"):
        with_host_layers(FastLanguageModel.from_config(tiny.CONFIG, 32, full_finetuning=True))
    with pytest.raises(ConfigError, match="offload_layers: expected false where no layers are scanned, got true; set"):
        with_host_layers(FastLanguageModel.from_config(tiny.CONFIG, 32, layer_loop="unroll"))
    model = with_host_layers(adapted)
    step = make_train_step(model.graphdef, steps.RECORDER, model.trainable_filter, mesh=make_mesh(data=2))
    state = init_state(model.trainable, steps.RECORDER, jax.random.key(0))
    with pytest.raises(ConfigError, match="frozen: expected arrays in the memory of 2 devices"):
        step(state, model.frozen, tiny.batches(tiny.config(**LLAMA), 1)[0])


@pytest.mark.exhaustive("offload_projections-2-2-2")  # of every kind of residual; the other two are above
@pytest.mark.parametrize(
    ("policy", "stream", "queries", "keys"),
    [("offload", 1, 0, 0), ("offload_attention", 1, 1, 0), ("offload_projections", 2, 2, 2)],
)
def test_residuals_in_the_host_change_nothing(adapted, policy, stream, queries, keys):
    """Bit for bit the same as computed again, by the program of the test above; and they are in the host."""
    batch = tiny.batches(tiny.config(**LLAMA), 1, accumulation=2)[0]
    moved, plain = (by_chunks(with_checkpointing(adapted, name), 16) for name in (policy, "full"))
    (metrics, grads), (expected, other) = steps.gradients(moved, batch), steps.gradients(plain, batch)
    assert metrics["loss"] == expected["loss"]
    steps.assert_same(grads, other)
    step = steps.recording_step(moved.graphdef, moved.trainable_filter)
    state = init_state(moved.trainable, steps.RECORDER, jax.random.key(0))
    made = re.findall(r"<host>\[3,2,40,(\S+)\] = device_put", str(step.trace(state, moved.frozen, batch).jaxpr))
    assert [made.count(one) for one in ("64", "4,16", "2,16")] == [stream, queries, keys]


@pytest.mark.exhaustive("fsdp")  # of each device, where weights are gathered
@pytest.mark.parametrize("axis", [None, "data", "fsdp", "tensor"])
def test_every_place_in_the_loops_rooms_is_written(monkeypatch, request, tmp_path, axis):
    """Rooms of NaN change nothing: on one device, and on each of several that share the batch, weights or layers."""
    config = tiny.config(**LLAMA | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "vocab_size": 128})
    adapted = tiny.adapted(tiny.model(tmp_path, config, load_in_4bit=True), target_modules=["q_proj", "down_proj"])
    batch, options = tiny.batches(config, 1)[0], {}
    if axis is not None:
        options = {"mesh": make_mesh(**{axis: 2}), "sum_once": axis != "tensor"}
    expected, other = steps.gradients(adapted, batch, **options)
    rooms = []

    def poisoned(shape, dtype):
        rooms.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 77, dtype)

    monkeypatch.setattr(jax.lax, "empty", poisoned)
    for again in (steps.recording_step.cache_clear, jax.clear_caches):
        again()
        request.addfinalizer(again)  # nobody is given a program with such rooms
    metrics, found = steps.gradients(adapted, batch, **options)
    assert (4, 2 if axis is None else 1, 40, 128) in rooms, "of the layers' inputs"
    assert metrics["loss"] == expected["loss"]
    steps.assert_same(found, other)


#: Of the layers compiled for a card.
WIDTH, COUNT = 2048, 6


def compiled_layers(own, names, *, tokens, memory_kind="device", policy=None, offload=False):
    """Forward and backward pass of layers x -> own(x, weights) · scale, of which scale is trained, for an H200."""
    aot = AOT("h200")

    def layer(x, state, shared, index):
        return jax.checkpoint(lambda x: own(x, state) * state["scale"], policy=policy)(x), {}

    def loss(scale, x, weights):
        out, _ = run_streamed(layer, x, {"scale": scale, **weights}, (), COUNT, offload=offload)
        return jnp.sum(out.astype(jnp.float32))

    x, scale = aot.spec((tokens, WIDTH), jnp.bfloat16), aot.spec((COUNT, 1, WIDTH), jnp.bfloat16)
    weights = dict.fromkeys(names, aot.spec((COUNT, WIDTH, WIDTH), jnp.bfloat16, memory_kind=memory_kind))
    return aot.compile(jax.value_and_grad(loss), scale, x, weights, options=COMPILER_OPTIONS)


def two_products(x, state):
    return jnp.tanh(jnp.tanh(x @ state["in"]) @ state["out"])


def products_in(lines):
    """A product of a layer in a stack is one with the slice that it reads."""
    return [n for n, line in enumerate(lines) if "__cublas" in line or "calls=%dynamic-slice-fusion" in line]


@needs_cuda_plugin
@pytest.mark.aot
def test_residuals_travel_beside_the_products():
    """In both passes the copy of a layer's input begins before the layer's products and ends after them."""
    compiled = compiled_layers(two_products, ("in", "out"), tokens=4096, offload=True)
    assert compiled.memory_analysis().host_temp_size_in_bytes == (COUNT - 1) * 4096 * WIDTH * 2
    for lines in loop_bodies(compiled.as_text()):
        large = rf"bf16\[({COUNT - 1}|1),4096,{WIDTH}\]"
        starts = [n for n, line in enumerate(lines) if re.search(rf"{large}.* fusion-start\(", line)]
        ends = [n for n, line in enumerate(lines) if re.search(rf"= {large}.* fusion-done\(", line)]
        products = products_in(lines)
        assert len(products) >= 2 and min(starts) < products[0] and products[-2] < max(ends)


@needs_cuda_plugin
@pytest.mark.aot
def test_copies_run_beside_the_products():
    """In both passes a layer's copies, at offsets linear in the loop's counter, begin before another's products."""
    compiled = compiled_layers(two_products, ("in", "out"), tokens=512, memory_kind="pinned_host")
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.host_argument_size_in_bytes == 2 * COUNT * WIDTH * WIDTH * 2
    assert memory.temp_size_in_bytes < 5 * 2 * WIDTH * WIDTH * 2 + 2 * COUNT * 512 * WIDTH * 2, "not all layers"
    large = rf"bf16\[1,{WIDTH},{WIDTH}\]"
    for lines in loop_bodies(text):
        starts = [n for n, line in enumerate(lines) if re.search(rf"{large}.* fusion-start\(", line)]
        ends = [n for n, line in enumerate(lines) if re.search(rf"{large}.* fusion-done\(", line)]
        products = [n for n, line in enumerate(lines) if "custom-call(" in line and "__cublas" in line]
        assert len(starts) == len(ends) == 2 <= len(products)
        assert max(starts) < min(products) and products[-2] < min(ends)
    strides = re.findall(r'"byte_stride":"(-?\d+)"', text)
    assert jax.__version_info__ < (0, 11) or all(
        strides.count(str(sign * WIDTH * WIDTH * 2)) >= 2 for sign in (1, -1)
    ), "two copies in each loop"
