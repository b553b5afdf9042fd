"""The presets are the models that they are named after, and the command line's options their cases."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from convert.families.mapping import read_config
from fastjax.bench.presets import preset_config
from fastjax.bench.step.build import open_case_mesh
from fastjax.bench.step.case import StepCase, resolve_method
from fastjax.commands.bench_step import REGIMES, make_cases, make_parser
from fastjax.errors import ConfigError
from fastjax.execution.execution import Execution
from fastjax.execution.load import random_weights
from fastjax.execution.options import LoadOptions
from fastjax.execution.precision import make_precision
from fastjax.parallel import MeshShape

#: Published counts of parameters.
PARAMETERS = {
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3.5-9b": 8_953_803_264,  # the text model, as published in GGUF
    "qwen3.5-35b-a3b": 34_660_610_688,
    "glm-4.7-flash": 29_943_393_920,  # without the module that predicts further tokens
}


def sizes(preset, weights):
    """The weights' shapes, without making them."""
    config = read_config(preset_config(preset, None, weights))
    options = LoadOptions(dtype="bfloat16", load_in_4bit=weights != "16bit")
    how = options, make_precision(options, config), Execution()
    mxfp4 = weights == "mxfp4"
    return jax.eval_shape(lambda key: random_weights(config, key, *how, mxfp4=mxfp4)[1], jax.random.key(0))


@pytest.mark.parametrize("preset", PARAMETERS)
def test_parameters(preset):
    assert sum(leaf.size for leaf in jax.tree.leaves(sizes(preset, "16bit"))) == PARAMETERS[preset]


def test_experts_in_mxfp4():
    """As the published files: the experts in 4.25 bits a value, the rest in bfloat16."""
    tree = sizes("gpt-oss-20b", "mxfp4")
    by_dtype = {}
    for leaf in jax.tree.leaves(tree):
        by_dtype[leaf.dtype] = by_dtype.get(leaf.dtype, 0) + leaf.size * leaf.dtype.itemsize
    experts = 24 * 32 * 3 * 2880 * 2880
    assert by_dtype == {
        jnp.dtype("uint8"): experts * 17 // 32,  # 9.46 GiB of all 12.8
        jnp.dtype("bfloat16"): 2 * (PARAMETERS["gpt-oss-20b"] - experts),
    }


def test_the_default_is_llama_3_8b():
    (case,) = cases()
    assert case == StepCase() and case.trained == "QLoRA, NF4, r=16"
    assert (case.rows, case.kept, case.layer_loop) == ("4×2,048", "projections", "scan")


def test_rows_may_be_longer_than_the_published_positions():
    assert [StepCase(seq=seq).config.max_position_embeddings for seq in (2048, 262144)] == [131072, 262144]


def test_layers_keep_their_kinds():
    config = read_config(preset_config("gpt-oss-20b", 3, "nf4"))
    assert [mixer.sliding_window for mixer in config.attention] == [128, None, 128]
    assert config.rope.factor == 32 and config.attention_sinks
    with pytest.raises(ConfigError, match="--layers: expected at most the 24 of gpt-oss-20b, got 25"):
        preset_config("gpt-oss-20b", 25, "nf4")
    with pytest.raises(ConfigError, match=r"mxfp4: expected a preset .* \(gpt-oss-20b\), got tiny"):
        preset_config("tiny", None, "mxfp4")


@pytest.mark.parametrize(
    "given, expected",
    [
        ((None, None), ("qlora", "nf4")),
        ((None, "16bit"), ("lora", "16bit")),
        ((None, "mxfp4"), ("qlora", "mxfp4")),
        (("full", None), ("full", "16bit")),
    ],
)
def test_method_and_weights(given, expected):
    assert resolve_method(*given) == expected


def cases(*arguments):
    return make_cases(make_parser().parse_args(arguments))


def test_cases():
    speed = cases("--regime", "speed", "--method", "full", "--preset", "llama3.2-1b", "--optimizer", "adamw_8bit")
    assert [(case.rows, case.checkpointing, case.layer_loop) for case in speed] == [
        ("4×2,048", "projections", "unroll"),
        ("4×2,048", "projections", "scan"),
    ]
    assert {(case.trained, case.weights) for case in speed} == {("full, bfloat16, adamw_8bit", "16bit")}
    given = ["--checkpointing", "projections", "full", "--attention", "xla", "cudnn"]
    plain = cases("--adapters", "attention", "--weights", "16bit", "--layers", "4", *given)
    assert [(case.checkpointing, case.attention) for case in plain] == [
        ("projections", "xla"), ("projections", "cudnn"), ("full", "xla"), ("full", "cudnn"),
    ]  # fmt: skip
    assert {(case.model, case.trained, case.param_dtype) for case in plain} == {
        ("llama3-8b, 4 layers", "LoRA, r=16 on attention", "float32")
    }


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_is_of_the_preset_that_is_given(regime):
    found = cases("--regime", regime, "--preset", "gpt-oss-20b", "--weights", "mxfp4")
    parts = [{"batch": 4, "seq": 2048} | part for part in REGIMES[regime]]
    assert [case.rows for case in found] == [f"{part['batch']}×{part['seq']:,}" for part in parts]
    assert {case.preset for case in found} == {"gpt-oss-20b"}
    assert {case.preset for case in cases("--regime", regime)} == {"llama3-8b"}


def test_cases_in_the_host():
    names = "offload_embedding", "offload_layers", "offload_optimizer"
    for name in names:
        (case,) = cases("--checkpointing", "full", f"--{name}")
        assert [getattr(case, one) for one in names] == [one == name for one in names]
    (case,) = cases("--checkpointing", "none", "--method", "full", "--optimizer", "adamw_8bit", "--offload_optimizer")
    assert case.kept == "none, moments on the host"


def test_cases_on_meshes():
    """A case for each; rows are those of each part of a mesh that has its own."""
    found = cases("--mesh", "one", "fsdp=2", "data=2,tensor=2", "--batch", "3", "--checkpointing", "full")
    assert [(case.where, case.devices, case.rows, case.step_rows) for case in found] == [
        ("one device", 1, "3×2,048", 3), ("fsdp 2", 2, "3×2,048", 6), ("data 2 × tensor 2", 4, "3×2,048", 6),
    ]  # fmt: skip
    options = cases("--checkpointing", "full", "--compiler_options", "none", "xla_a=1,xla_b=false")
    assert [case.xla_options for case in options] == [{}, {"xla_a": "1", "xla_b": False}]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mesh": MeshShape(fsdp=16)}, "--mesh fsdp 16: mesh: .* needs 16 devices, there are 8"),
        ({"mesh": MeshShape(tensor=3)}, "--mesh tensor 3: parallel.tensor: expected a divisor of num_attention_heads"),
        ({"mesh": MeshShape(expert=2)}, "--mesh expert 2: parallel.expert: expected 1 of a model without mixtures"),
        ({"mesh": MeshShape(context=2), "seq": 30}, "--mesh context 2: batch: expected rows of a multiple of 4 tokens"),
    ],
)
def test_meshes_that_a_case_does_not_suit(changes, message):
    case = dataclasses.replace(StepCase("tiny", 2, 32, "full", "scan"), **changes)
    with pytest.raises(ConfigError, match=message):
        open_case_mesh(case)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--method", "lora", "--weights", "nf4"], "--weights: expected 16bit with --method lora, got nf4"),
        (["--method", "full", "--rank", "8"], "--rank is for methods with adapters"),
        (["--regime", "long", "--seq", "8"], "--seq: expected it without --regime"),
        (["--method", "full", "--offload_layers"], "--offload_layers is for methods with adapters"),
        (
            ["--offload_layers", "--layer_loop", "scan", "unroll"],
            "--offload_layers: .* scan alone, got unroll$",
        ),
        (["--offload_layers", "--regime", "speed"], "--offload_layers: .*, got unroll"),
        (["--offload_layers", "--qat", "nf4"], "--offload_layers: expected it without --qat, got nf4"),
        (
            ["--offload_optimizer", "--optimizer", "adamw_16bit"],
            "--offload_optimizer: expected --optimizer adamw or adamw_8bit, got adamw_16bit",
        ),
        (["--mesh", "data=2", "--offload_embedding"], "--offload_embedding: expected it without --mesh data 2"),
        (["--mesh", "one", "data=2", "--offload_layers"], "--offload_layers: expected it without --mesh data 2"),
        (["--mesh", "fsdp=2", "--offload_optimizer"], "--offload_optimizer: expected it without --mesh fsdp 2"),
        (["--mesh", "tensor=2", "--mlp_chunk", "8"], "--mlp_chunk: expected it without --mesh tensor 2"),
        (["--mesh", "one", "fsdp=2,rows=2"], "--mesh: expected one, or sizes of data, .*, got fsdp=2,rows=2"),
        (["--mesh", "fsdp=0"], "--mesh: expected one, .*, got fsdp=0"),
        (["--compiler_options", "none", "xla_a"], "expected none or NAME=VALUE,NAME=VALUE, got xla_a"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cases(*arguments)
