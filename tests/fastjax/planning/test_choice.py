"""Which policy is taken, with made-up memories."""

import pytest

from fastjax.planning.choice import choose, first_layers
from fastjax.planning.memory import ALLOCATOR_BYTES, StepMemory

GIB = 2**30
NEEDS = {"much": 30, "some": 12, "least": 9}


@pytest.mark.parametrize(
    ("limit", "policy", "compiled", "words"),
    [
        (40, "much", ["much"], "gradient checkpointing: much, with 30.5 of 40.0 GiB"),
        (30, "some", ["much", "some"], "some, with 12.5 of 30.0 GiB; much would need 30.5"),
        (20, "some", ["some"], "some, with 12.5 of 20.0 GiB; much would need 25.0"),
        (10, "least", ["some", "least"], "least, with 9.5 of 10.0 GiB; much would need 25.0; some would need 12.5"),
        (2, "least", ["least"], "least, with 9.5 of 2.0 GiB, which is more than there is; much would need 25.0"),
        (9, "least", ["some", "least"], "least, with 9.5 of 9.0 GiB, which is more than there is; much would need"),
    ],
)
def test_the_fastest_that_fits(limit, policy, compiled, words):
    """One that cannot fit by the estimate is compiled only where nothing fits and it needs least; none is twice."""
    asked = []

    def compile(name):
        asked.append(name)
        return StepMemory(0, NEEDS[name] * GIB, 0), f"step {name}"

    at_least = {"much": 25, "some": 3, "least": 3}
    choice = choose(list(NEEDS), limit * GIB, 0, at_least=lambda name: at_least[name] * GIB, compile=compile)
    assert (choice.policy, asked, choice.compiled) == (policy, compiled, f"step {policy}")
    assert choice.memory.device == NEEDS[policy] * GIB + ALLOCATOR_BYTES
    assert words in str(choice)


def test_what_the_host_has_no_memory_for_is_not_taken():
    memories = {"kept": StepMemory(0, 9 * GIB, 0), "moved": StepMemory(0, 2 * GIB, 8 * GIB)}

    def taken(limit, host):
        return choose(
            list(memories), limit * GIB, host * GIB, at_least=lambda _: 0, compile=lambda name: (memories[name], name)
        )

    assert taken(10, 1).policy == "kept"
    assert taken(5, 8).policy == "moved"
    choice = taken(5, 7)
    assert choice.policy == "kept" and not choice.fits
    assert "; moved would need 2.5 and 8.0 in the host's memory" in str(choice)
    assert choice.row()["host_limit_bytes"] == 7 * GIB


def by_host(needs, host, **pinned):
    """The choice among steps that all fit on the device, by their gibibytes of the host's memory."""

    def compile(name):
        return StepMemory(0, GIB, needs[name] * GIB), name

    return choose(list(needs), 9 * GIB, host * GIB, at_least=lambda _: 0, compile=compile, **pinned)


def test_too_little_memory_of_the_host_is_said():
    """The one that needs least of it is taken where all need too much."""
    choice = by_host({"much": 9, "less": 8}, 5)
    assert choice.policy == "less" and not choice.fits
    assert "less, with 1.5 of 9.0 GiB and 8.0 of 5.0 GiB in the host's memory, which is more than there is" in str(
        choice
    )


def test_what_xla_does_not_pin_is_not_taken():
    """The variable is named where its limit alone is too low."""
    needs, limit = {"most": 90, "much": 75, "some": 30}, 64 * GIB
    choice = by_host(needs, 80, pinned=limit)
    assert (choice.policy, choice.fits, choice.host_limit) == ("some", True, limit)
    assert [one.pinned for one in choice.refused] == [False, True]
    assert "75.0 in the host's memory (XLA takes so much with XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=82" in str(choice)
    assert by_host(needs, 20, pinned=limit).fits is False, "the host has less than XLA would pin"
    alone = by_host({"much": 75}, 80, pinned=limit)
    assert not alone.fits
    assert "more than there is (XLA takes so much with XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=82" in str(alone)


@pytest.mark.parametrize(
    ("limit", "policy"), [(20, "projections:16"), (10.7, "projections:1"), (10.5, None), (9, None), (40, None)]
)
def test_memory_left_over_is_filled(limit, policy):
    """Ten units with nothing kept, thirty with all thirty-two layers' projections."""
    assert first_layers(limit, 10, 30, 32) == policy
    assert first_layers(limit, 10, 10, 32) is None
