"""Steps whose devices take gradients of their own rows alone and sum them once, beside those of one device."""

import dataclasses
import functools
import io

import numpy as np
import pytest
from rich.console import Console

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.loading import shapes_of
from fastjax.language_model.variants import with_checkpointing, with_fake_quantization
from fastjax.parallel import MeshShape, make_mesh
from fastjax.planning.aot import AOT
from fastjax.runs.mesh import open_mesh
from fastjax.runs.steps import sums_once, tell_gathers, why_not_once
from fastjax.training.config import DataSection, ModelSection, OutputSection, TrainConfig
from pallas_kernels.compat import JAX_VERSION
from tests.support import families, steps, tiny
from tests.support.aot import needs_cuda_plugin

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 3}
KINDS = {
    "16 bits": {},
    "nf4": {
        "load_in_4bit": True,
        "use_gradient_checkpointing": "projections",
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    },
    "unrolled": {"load_in_4bit": True, "layer_loop": "unroll"},
    "tied": {"tie_word_embeddings": True},
    "dropout": {"lora_dropout": 0.1},
    "attention dropout": {"attention_dropout": 0.1},
    "dora": {"load_in_4bit": True, "use_dora": True},
    "quantised": {"load_in_4bit": True, "quantised": "nf4"},
    "trained head": {"modules_to_save": ["lm_head"]},
    "trained rows": {"trainable_token_indices": [3, 5, 64]},
    "embedding's adapter": {"target_modules": ["q_proj", "embed_tokens"]},
    "odd vocabulary": {"vocab_size": 101},
}
LOADING = ("load_in_4bit", "use_gradient_checkpointing", "layer_loop")
ADAPTING = ("use_dora", "lora_dropout", "modules_to_save", "trainable_token_indices", "target_modules")


@functools.cache
def model(kind):
    changes = KINDS[kind]
    shape = {**SIZES, "tie_word_embeddings": False}
    shape |= {name: value for name, value in changes.items() if name not in (*LOADING, *ADAPTING, "quantised")}
    loading = {name: changes[name] for name in LOADING if name in changes}
    loading = {"load_in_4bit": False, "layer_loop": "scan", **loading}
    base = tiny.model(tiny.shared_folder(**shape), tiny.config(**shape), **loading)
    ours = tiny.adapted(base, **{name: changes[name] for name in ADAPTING if name in changes})
    return with_fake_quantization(ours, changes["quantised"]) if "quantised" in changes else ours


@functools.cache
def batch():
    """Two microbatches of eight rows, one of them padding only."""
    lengths = [(17, 20), (9, 4, 25), (38,), (11, 11), (2,), (), (40,), (21, 3)]
    config = tiny.config(**SIZES | {"vocab_size": 101})
    parts = [
        tiny.rows([tiny.documents(config, row, seed=10 * part + n) for n, row in enumerate(lengths)], 40)
        for part in range(2)
    ]
    return Batch(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))


@pytest.mark.exhaustive("nf4-fsdp")
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        pytest.param("16 bits", {"data": 8}, id="16 bits-data"),
        pytest.param("nf4", {"fsdp": 4, "data": 2}, id="nf4-fsdp"),
        pytest.param("unrolled", {"fsdp": 2, "data": 2}, id="unrolled-fsdp"),
        pytest.param("tied", {"fsdp": 8}, id="tied-fsdp"),
        pytest.param("trained rows", {"fsdp": 2}, id="trained rows-fsdp"),
        pytest.param("dora", {"fsdp": 2}, id="dora-fsdp"),
        pytest.param("quantised", {"fsdp": 2}, id="quantised-fsdp"),
    ],
)
def test_devices_that_sum_once_equal_one(kind, axes):
    mesh = make_mesh(**axes)
    assert sums_once(model(kind), mesh) == ("fsdp" not in axes), "no device of these reads another's memory"
    alone, spread = (steps.trained(model(kind), batch(), 3, **how) for how in ({}, {"mesh": mesh, "sum_once": True}))
    steps.assert_trained_alike(spread, alone)


@pytest.mark.parametrize(
    ("kind", "axes", "reason"),
    [
        ("dropout", {"data": 2}, None),
        ("attention dropout", {"data": 2}, None),
        ("nf4", {"fsdp": 2}, None),
        ("16 bits", {"data": 2, "tensor": 2}, "on data 2 × tensor 2, where"),
        ("trained head", {"fsdp": 2}, "where trained arrays are split over parallel.fsdp"),
        ("odd vocabulary", {"fsdp": 2}, "where frozen matrices do not divide over parallel.fsdp"),
        ("embedding's adapter", {"fsdp": 2}, "where the embeddings have an adapter, with parallel.fsdp above 1"),
    ],
)
def test_who_does_not_sum_once(kind, axes, reason):
    """Of some a step would be wrong, and is refused; others would draw other numbers, or have not been timed."""
    ours, mesh = model(kind), make_mesh(**axes)
    assert not sums_once(ours, mesh) and not sums_once(ours, None)
    if reason is not None:
        with pytest.raises(ConfigError, match=f"^sum_once: expected False {reason}.*, got True"):
            steps.trained(ours, batch(), mesh=mesh, sum_once=True)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.parametrize(
    ("kind", "policy", "card", "reason"),
    [
        ("nf4", "projections", "h200", None),
        ("unrolled", "full", "h200", None),
        ("nf4", "projections", "a100-80", "it needs an NVIDIA GPU of compute capability 9.0"),
        ("nf4", "none", "h200", "with none what is read is kept"),
        ("nf4", "offload_attention", "h200", "with offload_attention what is read"),
        ("16 bits", "full", "h200", "no weights are in NF4"),
        ("dropout", "full", "h200", "dropout is drawn for all rows"),
        ("trained head", "full", "h200", "where trained arrays are split over parallel.fsdp"),
    ],
)
def test_gpus_whose_memory_kernels_read_sum_once_with_fsdp(kind, policy, card, reason):
    if JAX_VERSION < (0, 11) and reason is None:
        reason = "it needs jax 0.11"
    ours, mesh = with_checkpointing(model(kind), policy), open_mesh(MeshShape(fsdp=2), AOT(card, 2).devices)
    found = why_not_once(ours, mesh)
    assert sums_once(ours, mesh) == (reason is None)
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.aot
@needs_cuda_plugin
def test_a_run_says_why_gpus_gather():
    config = TrainConfig(ModelSection("model"), DataSection("rows.jsonl"), OutputSection("run"))
    noisy = dataclasses.replace(config, training=dataclasses.replace(config.training, neftune_noise_alpha=5.0))

    def said(mesh, config=config):
        console = Console(file=io.StringIO())
        tell_gathers(model("nf4"), mesh, config, console)
        return console.file.getvalue()

    def gpus(card, **axes):
        shape = MeshShape(**axes)
        return open_mesh(shape, AOT(card, shape.size).devices)

    line = "parallel.fsdp: weights are gathered, and not read where they lie: "
    assert said(gpus("a100-80", fsdp=2)).startswith(f"{line}it needs an NVIDIA GPU of compute capability 9.0")
    assert said(gpus("h200", fsdp=2), noisy) == f"{line}noise is drawn for all rows\n"
    assert said(None) + said(gpus("a100-80", data=2)) + said(make_mesh(fsdp=2)) == ""
    assert (said(gpus("h200", fsdp=2)) == "") == (JAX_VERSION >= (0, 11))


@pytest.mark.parametrize(
    ("section", "changes", "reason"),
    [
        ("training", {}, None),
        ("training", {"neftune_noise_alpha": 5.0}, "noise is drawn for all rows"),
        ("preferences", {"loss": "dpo"}, "the loss is dpo"),
        ("parallel", {"gradient_exchange": "int8"}, "gradients travel in int8"),
    ],
)
def test_a_run_whose_loss_is_no_sum_over_rows_does_not(section, changes, reason):
    config = TrainConfig(ModelSection("model"), DataSection("rows.jsonl"), OutputSection("run"))
    config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
    mesh = make_mesh(data=2)
    assert why_not_once(model("nf4"), mesh, config) == reason
    assert sums_once(model("nf4"), mesh, config) == (reason is None) and not sums_once(model("nf4"), None, config)


def test_mixtures_and_full_fine_tuning_sum_in_every_layer():
    def base(config, **options):
        return FastLanguageModel.from_config(config, dtype="float32", load_in_4bit=False, **options)

    mixture = shapes_of(lambda: FastLanguageModel.get_peft_model(base(families.MIXTURES["qwen3_moe"]), r=4))
    full = shapes_of(lambda: base(tiny.config(**SIZES), full_finetuning=True))
    assert not any(sums_once(model, make_mesh(data=2)) for model in (mixture, full))
