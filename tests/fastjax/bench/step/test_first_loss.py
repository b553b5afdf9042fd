"""Cases that must begin with the same loss have figures only if they do."""

import dataclasses

import pytest

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.first_loss import with_equal_first_losses
from fastjax.bench.step.measure import StepResult
from fastjax.bench.step.table import Line
from fastjax.parallel import MeshShape

CASE = StepCase("llama3-8b", 4, 2048, "projections", "scan")
FOUND = StepResult("NVIDIA H200", "0.11.2", "bfloat16", 0.5, 2 * 8192.0, 400.0, 100.0, 2**30, 2**30)
#: Within what rounding does, and beyond it.
NEAR, FAR = 12.503, 12.504


def lines(*cases):
    """Lines of (changes of the case, first loss)."""
    return [
        Line(dataclasses.replace(CASE, **changes), dataclasses.replace(FOUND, losses=(loss, 11.0)))
        for changes, loss in cases
    ]


def faults(*cases):
    return [line.result.fault is not None for line in with_equal_first_losses(lines(*cases))]


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": "offload"},
        {"layer_loop": "unroll"},
        {"attention": "cudnn"},
        {"mlp_chunk": 1024},
        {"compiler_options": ("xla_a=1",)},
        {"offload_layers": True, "offload_embedding": True},
        {"offload_optimizer": True, "optimizer": "adamw_8bit", "steps": 3, "warmup": 1},
        {"batch": 2, "mesh": MeshShape(data=2)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_one_that_is_off_has_no_figure(changes):
    given = lines(({}, 12.5), ({"checkpointing": "full"}, 12.5001), (changes, FAR))
    first, second, off = with_equal_first_losses(given)
    assert (first, second) == tuple(given[:2])
    assert off.result.tokens_per_second is off.result.step_seconds is off.result.peak_bytes is None
    assert off.result.losses == (FAR, 11.0)
    assert off.result.fault == (
        "the first loss is 12.50400, and 12.50000 of 4×2,048 projections scan: "
        "expected the same but for 0.003 by rounding"
    )
    assert faults(({}, 12.5), (changes, NEAR)) == [False, False]


def test_of_two_that_differ_neither_has():
    assert faults(({}, 12.5), ({"checkpointing": "full"}, FAR)) == [True, True]
    pair = ({"layer_loop": "unroll"}, 12.5), ({"checkpointing": "full", "layer_loop": "unroll"}, FAR)
    assert faults(({}, 12.5), ({"checkpointing": "full"}, FAR), *pair) == [True] * 4
    assert faults(({}, 12.5)) == [False]


@pytest.mark.parametrize(
    "changes",
    [{"batch": 2}, {"seq": 1024}, {"seed": 1}, {"method": "lora", "weights": "16bit"}, {"preset": "llama3-70b"},
     {"base_compute": "float8"}, {"qat": "nf4"}, {"lengths": (9,)}, {"mesh": MeshShape(data=2)}, {"layers": 4}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_cases_of_other_weights_or_rows_differ(changes):
    assert faults(({}, 12.5), (changes, 11.0)) == [False, False]


@pytest.mark.parametrize(
    ("case", "result", "allowed"),
    [
        ({}, {}, 0.0032),
        ({}, {"tokens_per_second": 4096.0}, 0.0064),  # of 2,048 tokens
        ({}, {"tokens_per_second": 2.0**20}, 0.0032),
        ({}, {"dtype": "float16"}, 0.0004),
        ({}, {"dtype": "float32"}, 0.000125),
        ({"base_compute": "float8"}, {}, 0.0256),
        ({"qat": "nf4"}, {}, 0.0256),
        ({"preset": "gpt-oss-20b"}, {}, 0.0256),
    ],
)
def test_what_rounding_does(case, result, allowed):
    for difference, equal in ((0.97 * allowed, True), (1.03 * allowed, False)):
        given = lines((case, 12.5), (case | {"checkpointing": "full"}, 12.5 + difference))
        given = [line._replace(result=dataclasses.replace(line.result, **result)) for line in given]
        assert all(line.result.fault is None for line in with_equal_first_losses(given)) is equal


def test_lines_without_figures_and_of_others_stay():
    bad = lines(({"checkpointing": "full"}, 1.0))[0]
    failed = bad._replace(result=StepResult("NVIDIA H200", "0.11.2", losses=(1.0,), fault="it does not train"))
    given = [*lines(({}, 12.5)), failed, bad._replace(by="Unsloth 2026.10.9")]
    assert with_equal_first_losses(given) == given
