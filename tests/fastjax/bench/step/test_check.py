"""The comparison with the reference: it passes the step, and no other one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fastjax.bench.step import check
from fastjax.bench.step.case import StepCase
from fastjax.parallel import MeshShape

CASE = StepCase("tiny", 2, 16, "full", "scan", rank=4, dtype="bfloat16", mlp_chunk=8)


@pytest.fixture(scope="module")
def compared():
    """The model, and the outcomes by name."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_judged", lambda model, dtype, **outcomes: found.update(outcomes, model=model))
        check.fault_of(CASE)
    return found


def judged(compared, dtype="bfloat16", **changes):
    return check._judged(dtype=dtype, **(compared | changes))


def with_leaf(outcome, name, change):
    """The outcome with one gradient changed."""

    def changed(path, leaf):
        return change(leaf) if name in jax.tree_util.keystr(path, simple=True, separator=".") else leaf

    return outcome._replace(gradients=jax.tree_util.tree_map_with_path(changed, outcome.gradients))


def test_the_step_passes(compared):
    assert judged(compared) is None
    # the fast path of a CPU is the plain one: exact beside itself, and nearer than float16's eighth only if it is exact
    assert judged(compared, found=compared["exact"], dtype="float32") is None
    assert "more than rounding allows" in judged(compared, dtype="float32")


def test_several_devices_are_compared_with_one(monkeypatch):
    meshes, make = [], check.make_train_step
    monkeypatch.setattr(
        check, "make_train_step", lambda *given, **how: meshes.append(how["mesh"]) or make(*given, **how)
    )
    mesh = MeshShape(fsdp=2, tensor=2)
    assert check.fault_of(dataclasses.replace(CASE, mesh=mesh, mlp_chunk=None, dtype="float32")) is None
    assert [None if mesh is None else mesh.size for mesh in meshes] == [None, None, 4]


def test_every_half_has_a_gradient(compared):
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(compared["exact"].gradients))


@pytest.mark.parametrize("factor", [0.0, 1.2, -1.0, float("nan")])
def test_a_wrong_gradient_of_one_layer_is_found(compared, factor):
    found = with_leaf(compared["found"], "v_proj.lora_B", lambda leaf: leaf.at[1].multiply(factor))
    fault = judged(compared, found=found)
    assert "layers.1.self_attn.qkv.adapters.v_proj.lora_B by" in fault and "layers.0" not in fault


def test_a_wrong_loss_is_found(compared):
    found = compared["found"]
    assert "loss by 3.0e-02 of 5.9e-03" in judged(compared, found=found._replace(loss=compared["exact"].loss * 1.03))


def test_a_reference_that_says_nothing_is_no_pass(compared):
    noisy = with_leaf(compared["rounded"], "o_proj.lora_A", lambda leaf: -leaf)
    assert "cannot be compared" in judged(compared, rounded=noisy)
    dead = with_leaf(compared["exact"], "o_proj.lora_A", jnp.zeros_like)
    assert "the reference has no gradient of layers.0.self_attn.o" in judged(compared, exact=dead)
