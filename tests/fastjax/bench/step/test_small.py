"""The small step beside the reference has what the case computes with, and its reference nothing of that."""

import dataclasses

import pytest

from fastjax.bench.step.build import filled
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.small import reference_step, small_step
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape

CASE = StepCase("llama3-8b", 4, 2048, "projections", "scan")
#: What changes how a step computes, but not what.
HOW = {
    "checkpointing": "offload",
    "layer_loop": "unroll",
    "attention": "xla",
    "mlp_chunk": 1024,
    "compiler_options": ("xla_a=1",),
    "offload_embedding": True,
    "offload_layers": True,
}
#: What changes loss and gradients, or the rows.
WHAT = {
    "preset": "llama3-70b",
    "method": "full",
    "weights": "16bit",
    "rank": 8,
    "adapters": "attention",
    "param_dtype": "bfloat16",
    "dtype": "float16",
    "lengths": (512,) * 64,
    "layers": 2,
    "batch": 1,
    "seq": 1024 - 64,
    "base_compute": "float8",
    "qat": "nf4",
    "seed": 1,
    "mesh": MeshShape(data=2),
}
#: What changes neither loss nor gradient of the first step.
NEITHER = {"steps": 5, "warmup": 2, "optimizer": "adamw_8bit", "offload_optimizer": True}


def changed(name, value):
    return small_step(dataclasses.replace(CASE, **{name: value}))


def test_every_setting_is_one_of_the_three():
    names = {*HOW, *WHAT, *NEITHER, "fill"}  # which has no meaning without lengths
    assert names == {field.name for field in dataclasses.fields(StepCase)}


@pytest.mark.parametrize("name", HOW)
def test_cases_that_compute_otherwise_have_their_own_step_and_one_reference(name):
    small = changed(name, HOW[name])
    assert small != small_step(CASE) and reference_step(small) == reference_step(small_step(CASE))


@pytest.mark.parametrize("name", WHAT)
def test_cases_that_compute_something_else_have_their_own_reference(name):
    assert reference_step(changed(name, WHAT[name])) != reference_step(small_step(CASE))


@pytest.mark.parametrize("name", NEITHER)
def test_other_cases_have_one_step(name):
    assert changed(name, NEITHER[name]) == small_step(CASE)


def test_fills():
    """Rows of the case's proportions: as many documents, as much padding."""
    case = dataclasses.replace(CASE, lengths=(100, 900, 300, 1500) * 8)
    small = {fill: small_step(dataclasses.replace(case, fill=fill)) for fill in ("packed", "padded", "longest")}
    assert len({*small.values()}) == len({*map(reference_step, small.values())}) == 3
    assert {(one.batch, one.seq) for one in small.values()} == {(2, 1024)}
    assert set(small["packed"].lengths) == {50, 450, 150, 750}
    rows = {fill: filled(one) for fill, one in small.items()}
    assert max(map(len, rows["packed"][1])) > 1 == max(map(len, rows["padded"][1]))
    assert rows["longest"][0].seq == 512 and rows["padded"][0].seq == 1024


def test_sizes():
    assert (small_step(CASE).layers, small_step(CASE).rows) == (3, "2×1,024")
    long = dataclasses.replace(CASE, batch=1, seq=65536, checkpointing="offload_attention")
    assert small_step(long).rows == "1×2,048" and small_step(long).mlp_chunk == 512, "chunks of long rows"
    kept = dataclasses.replace(long, checkpointing="projections")
    assert small_step(kept).mlp_chunk is None and small_step(dataclasses.replace(kept, mlp_chunk=8)).mlp_chunk == 512
    mixture = dataclasses.replace(CASE, preset="qwen3-30b-a3b", mesh=MeshShape(data=2))
    assert small_step(mixture).rows == "2×128"


@pytest.mark.parametrize(
    ("preset", "policy", "layers", "expected"),
    [
        ("llama3-8b", "projections:16", 6, "projections:3"),
        ("llama3-8b", "projections:1", 4, "projections:1"),
        ("llama3-8b", "projections:31", 4, "projections:3"),
        ("llama3-8b", "projections:40", 3, "projections"),
        ("llama3-8b", "projections:0", 3, "full"),
        ("llama3-8b", "offload_attention:0", 3, "offload"),
        ("gpt-oss-20b", "offload", 2, "offload"),
        ("gpt-oss-20b", "offload:12", 2, "offload:1"),
    ],
)
def test_layers_of_each_policy(preset, policy, layers, expected):
    small = small_step(dataclasses.replace(CASE, preset=preset, checkpointing=policy))
    assert (small.layers, small.checkpointing) == (layers, expected)


def test_layers_in_the_host():
    """Where a loop is; a case without one keeps the setting, which the model refuses."""
    for preset, layers, expected in (("gpt-oss-20b", None, False), ("gpt-oss-20b", 2, True), ("llama3-8b", None, True)):
        case = dataclasses.replace(CASE, preset=preset, layers=layers, offload_layers=True)
        assert small_step(case).offload_layers is expected


def test_no_policy():
    with pytest.raises(ConfigError, match="use_gradient_checkpointing: expected one of .*, got 'unsloth'"):
        changed("checkpointing", "unsloth")
