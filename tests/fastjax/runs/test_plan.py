"""A plan's policies: those that a run cannot take, and what it could set where nothing fits; nothing is compiled."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from fastjax.errors import ConfigError
from fastjax.planning.memory import ALLOCATOR_BYTES, MemoryLimits
from fastjax.runs.opening import open_shapes
from fastjax.runs.plan import Planner
from pallas_kernels.cards import CARDS
from tests.support import tiny
from tests.support.runs import config

GIB = 2**30


class Card:
    """A card that compiles nothing."""

    card, devices = CARDS["h200"], ()

    def tracing(self):
        return contextlib.nullcontext()


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The plan of a run whose steps take so many gibibytes of the device by policy; those without a number refuse."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(num_hidden_layers=4)))

    def of(needs, limit, policies=None):
        def compiled(planner, run, policy):
            if policy not in needs:
                raise ConfigError(f"layer_loop: no {policy}")
            analysis = SimpleNamespace(argument_size_in_bytes=0, temp_size_in_bytes=needs[policy] * GIB)
            names = ("output", "alias", "generated_code", "host_argument", "host_output", "host_alias", "host_temp")
            for name in names:
                setattr(analysis, f"{name}_size_in_bytes", 0)
            return SimpleNamespace(memory_analysis=lambda: analysis, as_text=lambda: "ENTRY %main () -> () {")

        monkeypatch.setattr(Planner, "_compiled", compiled)
        own = config(model={"model_name": str(tmp_path), "max_seq_length": 32, "load_in_4bit": False})
        room = MemoryLimits(limit * GIB)
        return Planner(own, Card(), room, lambda text: None).plan(open_shapes(own), policies)

    return of


def test_a_policy_that_the_run_cannot_take_is_shown_with_the_reason(planned):
    needs = {"projections": 30, "projections:2": 19, "full": 9}
    found = planned(needs, 20)
    assert [one.policy for one in found.steps] == ["projections", "full", "projections:2"]
    assert found.settings == []
    assert found.refused == {
        name: f"layer_loop: no {name}" for name in ("attention", "offload", "offload_attention", "offload_projections")
    }
    assert found.cache is not None and found.cache.dtype == "float32"
    used = found.cache.weights + ALLOCATOR_BYTES + found.cache.tokens * found.cache.token_bytes
    assert 0 <= 20 * GIB - used < found.cache.token_bytes and found.cache.weights > 0


@pytest.mark.exhaustive("offload")
@pytest.mark.parametrize("there", ["projections", "full", "offload"])
def test_a_plan_of_a_single_policy(planned, there):
    """Without "full" or "projections" no memory is left over to fill."""
    found = planned({there: 9}, 8)
    assert [one.policy for one in found.steps] == [there] and len(found.refused) == 5
    assert found.settings == ["model.offload_layers: true", "training.offload_optimizer: true"], "the table is tied"


def test_a_plan_without_a_policy_is_an_error(planned):
    with pytest.raises(ConfigError, match="layer_loop: no offload$"):
        planned({}, 20)
    with pytest.raises(ConfigError, match="layer_loop: no offload"):
        planned({"full": 9}, 20, ["full", "offload"])


def test_what_could_be_set_where_nothing_fits(planned):
    """The next policy is not among those that were tried."""
    found = planned({"projections": 30, "attention": 12}, 10, ["projections", "attention"])
    assert found.settings[0] == "model.use_gradient_checkpointing: offload_projections"
    assert planned({"full": 9}, 10, ["full"]).settings == []
