"""The comparison with the reference: it passes the step, and no other one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fastjax.bench.step import check
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.small import small_step
from fastjax.errors import TrainingError
from fastjax.parallel import MeshShape

CASE = StepCase("tiny", 2, 16, "full", "scan", rank=4, dtype="bfloat16", mlp_chunk=8)


@pytest.fixture(scope="module")
def reference():
    return check.make_reference(small_step(CASE))


@pytest.fixture(scope="module")
def found(reference):
    """The step's outcome."""
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "judged", lambda outcome, *others: outcomes.append(outcome))
        check.fault_of(small_step(CASE), reference)
    return outcomes[0]


def with_leaf(outcome, name, change):
    """The outcome with one gradient changed."""

    def changed(path, leaf):
        return change(leaf) if name in jax.tree_util.keystr(path, simple=True, separator=".") else leaf

    return outcome._replace(gradients=jax.tree_util.tree_map_with_path(changed, outcome.gradients))


def test_the_step_passes(found, reference):
    assert check.judged(found, reference, "bfloat16") is None
    # the fast path of a CPU is the plain one: exact beside itself, and nearer than float16's eighth only if it is exact
    assert check.judged(reference.exact, reference, "float32") is None
    assert "more than rounding allows" in check.judged(found, reference, "float32")


@pytest.mark.exhaustive(by="tests/fastjax/bench/step/test_run.py::test_several_devices_beside_one")
def test_several_devices_are_compared_with_one(monkeypatch):
    meshes, make = [], check.make_train_step
    monkeypatch.setattr(
        check, "make_train_step", lambda *given, **how: meshes.append(how["mesh"]) or make(*given, **how)
    )
    case = dataclasses.replace(CASE, batch=1, mesh=MeshShape(fsdp=2, tensor=2), mlp_chunk=None, dtype="float32")
    small = small_step(case)
    assert check.fault_of(small, check.make_reference(small)) is None
    assert [None if mesh is None else mesh.size for mesh in meshes] == [None, None, 4]


@pytest.mark.exhaustive("host memory")
@pytest.mark.parametrize(
    "changes",
    [
        {"layer_loop": "unroll"},
        {"checkpointing": "offload", "offload_embedding": True, "offload_layers": True},
        {"lengths": (9, 16, 3, 4, 12, 5), "mlp_chunk": None},
        {"lengths": (9, 9, 9, 9), "fill": "padded", "mlp_chunk": None},
    ],
    ids=["unrolled", "host memory", "packed", "padded"],
)
def test_what_cases_differ_in_is_computed(reference, changes, monkeypatch):
    """By the small step as by the case: other paths, the same numbers."""
    small, models, batches, step = small_step(dataclasses.replace(CASE, **changes)), [], [], check._step
    own = reference if small.lengths is None else check.make_reference(small)

    def spy(model, batch, *others):
        models.append(model)
        batches.append(batch)
        return step(model, batch, *others)

    monkeypatch.setattr(check, "_step", spy)
    assert check.fault_of(small, own) is None
    ((model,), (batch,)) = models, batches
    assert (model.execution.remat, model.execution.layer_loop) == (small.checkpointing, small.layer_loop)
    assert model.execution.mlp_chunk == (small.mlp_chunk or "auto")
    assert (small.mlp_chunk is None) == ("lengths" in changes)
    assert model.has_host_layers == model.has_host_embedding == small.offload_layers
    assert (batch.segment_ids is None) == (small.lengths is None)


@pytest.mark.exhaustive(by="test_a_wrong_gradient_of_one_layer_is_found, test_what_cases_differ_in_is_computed")
def test_a_wrong_loop_is_found_where_it_is_used(reference, monkeypatch):
    """The loss is right and each gradient doubled, in the loop that offloads alone."""
    run = loop.run_streamed

    def doubled(*given, **how):
        x, sums = run(*given, **how)
        return 2 * x - jax.lax.stop_gradient(x), sums

    monkeypatch.setattr(loop, "run_streamed", doubled)
    fault = check.fault_of(small_step(dataclasses.replace(CASE, checkpointing="offload")), reference)
    assert fault is not None and "lora_A by 1.0e+00" in fault and "loss" not in fault
    assert check.fault_of(small_step(CASE), reference) is None


def test_every_half_has_a_gradient(reference):
    leaves = jax.tree.leaves(reference.exact.gradients)
    assert all(bool(jnp.any(leaf != 0)) for leaf in leaves) and len(leaves) == len(reference.names)


@pytest.mark.parametrize("factor", [0.0, 1.2, -1.0, float("nan")])
def test_a_wrong_gradient_of_one_layer_is_found(found, reference, factor):
    wrong = with_leaf(found, "layers.1.0.self_attn.qkv.adapters.v_proj.lora_B", lambda leaf: leaf * factor)
    fault = check.judged(wrong, reference, "bfloat16")
    assert "layers.1.self_attn.qkv.adapters.v_proj.lora_B by" in fault and "layers.0" not in fault


def test_a_wrong_loss_is_found(found, reference):
    wrong = found._replace(loss=reference.exact.loss * 1.03)
    assert "loss by 3.0e-02 of 5.9e-03" in check.judged(wrong, reference, "bfloat16")


def test_a_reference_that_says_nothing_is_no_pass(found, reference, monkeypatch):
    noisy = reference.rounded | {"layers.0.self_attn.o.adapters.o_proj.lora_A": 2.0}
    assert "cannot be compared" in check.judged(found, reference._replace(rounded=noisy), "bfloat16")
    step = check._step
    monkeypatch.setattr(check, "_step", lambda *given: with_leaf(step(*given), "o_proj.lora_A", jnp.zeros_like))
    with pytest.raises(TrainingError, match=r"the reference has no gradient of layers\.0\.self_attn\.o"):
        check.make_reference(small_step(CASE))
