"""What four H200s say to each other in one step, read off the compiled program.

The step of some meshes is first compiled for four CPUs, which the same partitioner makes, in a third of the time.
"""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies

from fastjax.data.batches import Batch
from fastjax.execution.tensor_parts import held_apart
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.loading import shapes_of
from fastjax.parallel import batch_sharding, make_mesh
from fastjax.planning.collectives import READ
from fastjax.planning.collectives import collectives as planned
from fastjax.runs.steps import sums_once
from fastjax.training.loss import loss_sums
from fastjax.training.placement import state_shardings, weight_shardings
from fastjax.training.step import init_state, make_train_step
from pallas_kernels.compat import JAX_VERSION
from tests.support.aot import QUICK_CODE, needs_cuda_plugin, target_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 640,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def compiled_step(layer_loop: str, *, cpus: bool = False, **options):
    # Collectives are placed before code is made.
    return lowered_step(layer_loop, cpus=cpus, **options).compile(compiler_options=None if cpus else QUICK_CODE)


def lowered_step(
    layer_loop: str,
    *,
    full: bool = False,
    remat: str = "full",
    config=CONFIG,
    lora=None,
    once=None,
    cpus: bool = False,
    **axes: int,
):
    # float32: cuDNN's attention, the only operation that needs the card itself to compile, does not serve it.
    if cpus:
        devices = jax.devices("cpu")[:4]
    else:
        devices = topologies.get_topology_desc(platform="cuda", target_config=target_config(), topology="1x1x4").devices
    mesh = make_mesh(**axes, devices=devices)
    options = {"dtype": "float32", "layer_loop": layer_loop, "use_gradient_checkpointing": remat}

    def made():
        base = FastLanguageModel.from_config(config, load_in_4bit=not full, full_finetuning=full, **options)
        return base if full else FastLanguageModel.get_peft_model(base, r=8, **(lora or {}))

    model = shapes_of(made)
    frozen = jax.eval_shape(lambda tree: held_apart(tree, model.config, mesh.shape["tensor"]), model.frozen)
    optimizer = optax.adamw(1e-4)

    def spec(tree, shardings):
        return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings)

    state = jax.eval_shape(lambda arrays: init_state(arrays, optimizer, jax.random.key(0)), model.trainable)
    rows = jax.ShapeDtypeStruct((1, 8, 256), jnp.int32, sharding=batch_sharding(mesh))
    loss = functools.partial(loss_sums, chunk_size=64)  # several chunks: the head is gathered once for all
    options = {"loss": loss, "mesh": mesh, "sum_once": sums_once(model, mesh) if once is None else once}
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter, **options)
    with jax.set_mesh(mesh):
        arguments = (
            spec(state, state_shardings(state, model.config, mesh)),
            spec(frozen, weight_shardings(frozen, model.config, mesh)),
            Batch(rows, rows, rows, rows),
        )
        return step.jitted.trace(*arguments).lower()


def computation(text: str, line: str) -> str:
    """The computation that a line of a program calls."""
    name = re.search(r"calls=(%[\w.\-]+)", line)[1]
    return text[text.index(f"\n{name} (") :].partition("\n}")[0]


def maker(text: str, name: str) -> str:
    """The line of a program that computes an array; bitcasts are followed."""
    line = text[text.index(f"{name} = ") :].partition("\n")[0]
    renamed = re.search(r" bitcast\((%[\w.\-]+)", line)
    return maker(text, renamed[1]) if renamed else line


def collectives(text: str) -> list[tuple[str, str]]:
    """(kind, result shapes) of every collective in a compiled program."""
    return [(kind, shapes) for shapes, kind in COLLECTIVE.findall(text)]


def test_data_parallel_cpus_sum_gradients_once_and_metrics():
    text = compiled_step("scan", cpus=True, data=4).as_text()
    found = collectives(text)
    kinds = collections.Counter(kind for kind, _ in found)
    # The adapters' gradients in one piece, the loss, the token counts (the last two are scalars).
    assert set(kinds) == {"all-reduce"}, found
    assert kinds["all-reduce"] <= 3, found
    assert collectives(text[text.index("\nENTRY ") :]) == found, "sums in the loop over the layers"


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.newer_jax("jax 0.10 gathers")
@pytest.mark.exhaustive(by="test_only_whole_stacks_are_read_by_other_devices")
def test_fsdp_devices_that_sum_once_read_each_others_codes():
    """Nothing is sent for the layers; tokens and embeddings are, and the sums."""
    config = CONFIG | {"hidden_size": 1024}  # a device's scales have 2 KiB: less is gathered
    text = compiled_step("scan", remat="projections", config=config, fsdp=4).as_text()
    found = collectives(text)
    assert collectives(text[text.index("\nENTRY ") :]) == found, "collectives in the loop over the layers"
    gathers = [shapes for kind, shapes in found if kind == "all-gather"]
    assert len(gathers) == 1 and not re.search(r"\b(u8|f32|bf16)\[", gathers[0]), gathers  # tokens
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}, found
    calls = [line for line in text.splitlines() if " custom-call(" in line]
    decodes = [line for line in calls if "/nf4_dequantize" in line]
    assert len(decodes) == 8 and all("/nf4_dequantize_shared" in line for line in decodes), len(decodes)
    # What a plan says of that, three parts of four: codes, scales of one byte for 64 elements, and the head.
    elements = 1024 * (1024 + 512 + 2 * 1024 + 1024)
    whole = 2 * 4 * (elements // 2 + elements // 64) + 4 * 640 * 1024
    [(times, sent)] = [(one.times, one.sent) for one in planned(text, 4) if one.kind == READ]
    assert (times, sent) == (4 * 8 + 4 * 2 + 1, whole * 3 / 4)
    # Their scales, and the head: none is read before the devices have met, of which the layer's index is made.
    gathered = [line for line in calls if "/shard_gather" in line]
    assert len(gathered) == 3
    for line in gathered + decodes:
        made = maker(text, re.search(r"custom-call\((%[\w.\-]+)", line)[1])
        assert "shift" in made or "shift-right-arithmetic(" in computation(text, made), made


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.newer_jax("jax 0.10 gathers")
def test_only_whole_stacks_are_read_by_other_devices():
    """The loop that offloads takes layers out of their stack: the next one's may be there when another device reads."""
    gathers = {}
    for remat in ("offload", "projections"):
        text = lowered_step("scan", once=True, remat=remat, config=CONFIG | {"hidden_size": 1024}, fsdp=4).as_text()
        moved = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
        gathers[remat] = sum("xui8>" in line for line in moved), text.count("nf4_dequantize_shared") > 0
    # The codes and the scales of four projections, forward and again for the backward pass.
    assert gathers == {"offload": (16, False), "projections": (0, True)}


LAYER = 1024 * 512 + 512 * 512 + 2048 * 512 + 512 * 1024
TABLES = 2 * 640 * 512


def test_fsdp_of_trained_weights_gathers_a_layer_on_cpus():
    """As below; a sum of which each keeps a part is a whole one here."""
    compiled = compiled_step("scan", cpus=True, fsdp=4, full=True, remat="none")
    found = collectives(compiled.as_text())
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}, found
    gathers = re.findall(r"f32\[([\d,]+)\]", " ".join(shapes for kind, shapes in found if kind == "all-gather"))
    assert sum(math.prod(map(int, dims.split(","))) for dims in gathers) == 2 * LAYER + TABLES, gathers
    assert compiled.memory_analysis().argument_size_in_bytes < 1.01 * 3 * 4 * (4 * LAYER + TABLES) / 4


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive(by="test_fsdp_of_trained_weights_gathers_a_layer_on_cpus")
def test_fsdp_of_trained_weights_gathers_a_layer_and_scatters_its_gradient():
    """With the policy that keeps everything, save what was gathered: each layer is gathered forward and backward."""
    compiled = compiled_step("scan", fsdp=4, full=True, remat="none")
    elements = collections.Counter()
    for kind, shapes in collectives(compiled.as_text()):
        elements[kind] += sum(math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", shapes))
    # The results name a shard and the whole of each, one layer's in the bodies of the two scans.
    assert elements["all-gather"] == 1.25 * (2 * LAYER + TABLES)
    assert elements["reduce-scatter"] == 1.25 * (LAYER + TABLES)
    assert set(elements) == {"all-gather", "reduce-scatter", "all-reduce"} and elements["all-reduce"] < 1e4
    assert compiled.memory_analysis().argument_size_in_bytes < 1.01 * 3 * 4 * (4 * LAYER + TABLES) / 4


def test_tokens_over_the_context_of_cpus_send_keys_and_values_round_and_gather_nothing():
    """Keys and values take three hops, forward and (recomputed) backward; their gradients come home in the fourth.

    The hidden states go back into their order, and their gradient with them.
    """
    text = compiled_step("scan", cpus=True, context=4).as_text()
    assert {kind for kind, _ in collectives(text)} == {"collective-permute", "all-reduce"}
    names = re.findall(r'= .* collective-permute(?:-start)?\(.*op_name="([^"]*)"', text)
    of_attention = sum("attention" in name for name in names)
    assert of_attention <= 2 * (3 + 3 + 3 + 4) and len(names) - of_attention == 4, names


@pytest.mark.aot
@needs_cuda_plugin
def test_heads_and_features_over_devices_gather_tokens_and_scatter_sums_twice_a_layer():
    text = compiled_step("scan", fsdp=2, tensor=2).as_text()
    forward = [
        (kind, shapes)
        for shapes, kind, name in re.findall(rf'{COLLECTIVE.pattern}.*op_name="([^"]*)"', text)
        if "jvp(layers)/while/body" in name and "transpose" not in name
    ]
    # Of four rows two whole ones, which lie one after another as they come; halves of four would be put in order.
    if JAX_VERSION >= (0, 11):
        read = re.findall(r"= \((f32\[[\d,]+\]).* custom-call\(.*jvp\(layers\)/.*/(gather|scatter)_tokens/", text)
        read = collections.Counter(one for one in read if one[0].startswith("f32[1,"))
        assert read[f"f32[1,2,{2 * 256 * 512}]", "gather"] == read[f"f32[1,{2 * 256 * 512}]", "scatter"] == 2, read
        assert [shapes for kind, shapes in forward if kind == "reduce-scatter" and "[2,256,512]" in shapes] == []
        assert again(text) == (2, 2), "with the policy that keeps the layers' inputs alone"
    else:  # rank products are scattered along with the large ones
        tokens = [kind for kind, shapes in forward if "[4,256,512]" in shapes or "[2,256,512]" in shapes]
        assert collections.Counter(tokens) == {"all-gather": 2, "reduce-scatter": 2}, forward
    assert not any("[4,128,512]" in shapes for _, shapes in forward), forward
    # Besides these fsdp alone gathers, in one piece, what the device has of the layer's codes: rows of q, k, v, gate
    # and up, columns of o and down.
    (codes,) = [shapes for _, shapes in forward if "u8[" in shapes]
    # Rank products beside tokens that are read.
    assert len(forward) == (3 if JAX_VERSION >= (0, 11) else 5), forward
    # The adapters' gradients are summed behind the loop.
    sums, behind = (
        [shapes for kind, shapes in collectives(part) if kind == "all-reduce"]
        for part in (text, text[text.index("\nENTRY ") :])
    )
    assert sums == behind, sums
    whole = {"256,256", "128,256", "512,128", "512,256"}
    assert {dims for dims in re.findall(r"u8\[([\d,]+)\]", codes)} & whole == whole, codes


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.newer_jax("jax 0.10 has collectives")
def test_what_heads_and_features_gather_is_kept_with_their_projections():
    """With the rows' root mean squares: no norm runs again; the backward pass gathers gradients alone."""
    text = compiled_step("scan", remat="projections", tensor=2).as_text()
    assert again(text) == (0, 0) and len(re.findall(r'custom-call\(.*op_name="[^"]*/gather_tokens/', text)) == 4


def again(text: str) -> tuple[int, int]:
    """Gathers of tokens and norms that a program runs again for its backward pass."""
    names = re.findall(r'custom-call\(.*op_name="([^"]*rematted_computation[^"]*)"', text)
    return sum("/gather_tokens/" in name for name in names), sum("/rms_norm_forward/" in name for name in names)


def test_tokens_travel_once_a_cpu_to_experts_that_stay():
    """There and back; there again, the gradient too, and its way back; beside them choices and weights.

    And what a CPU's top-k chooses of, the probabilities of 32 experts.
    """
    lora = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    compiled = compiled_step("scan", config=MIXTURE, lora=lora, cpus=True, expert=4)
    # Of the experts a device has its own.
    experts = 2 * 32 * 3 * 256 * 512 * (1 / 2 + 1 / 64)
    rest = 2 * 4 * 640 * 512 + 2 * 512 * (512 + 1024) * 0.52 + 3 * 4 * 2 * (32 * 8 * (256 + 512) / 4 + 8 * 1024)
    assert compiled.memory_analysis().argument_size_in_bytes < 1.05 * (experts / 4 + rest)
    moved = collections.Counter(
        (kind, shape)
        for kind, shapes in collectives(compiled.as_text())
        for shape in re.findall(r"[sf]32\[[\d,]+\]", shapes)
    )
    wide = {key: times for key, times in moved.items() if key[0] != "all-reduce"}
    assert wide == {
        ("all-gather", "f32[2048,512]"): 3,
        ("reduce-scatter", "f32[512,512]"): 2,
        ("all-gather", "s32[2048,4]"): 2,
        ("all-gather", "f32[2048,4]"): 2,
        ("reduce-scatter", "f32[512,4]"): 1,
        ("all-gather", "f32[2048,32]"): 2,
    }
