"""Layers whose matrices lie in the host's memory: the same step, bit for bit, with every policy."""

import pytest

from fastjax.host_memory import in_host_memory
from fastjax.models.remat import POLICIES
from tests.support import steps, tiny

CONFIG = tiny.config(hidden_size=64, num_hidden_layers=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base = tiny.model(tmp_path_factory.mktemp("base"), CONFIG, load_in_4bit=True)
    return tiny.adapted(base, lora_dropout=0.25)


def in_host(model):
    return {name for name, leaf in steps.named(model.frozen).items() if in_host_memory(leaf)}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_step_is_the_same_bit_for_bit(model, policy):
    plain = model.with_checkpointing(policy)
    moved = plain.with_host_layers()
    assert not in_host(plain) and any("gate_up" in name and "codes" in name for name in in_host(moved))
    batch = tiny.batches(CONFIG, 1, accumulation=2)[0]
    (metrics, grads), (expected, other) = steps.gradients(moved, batch), steps.gradients(plain, batch)
    assert metrics["loss"] == expected["loss"]
    steps.assert_same(grads, other)
