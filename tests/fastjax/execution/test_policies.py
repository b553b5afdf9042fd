"""The table of policies of rematerialisation: by layer, by speed, by memory; the compiler's options that they need."""

import jax
import pytest

from fastjax.errors import ConfigError
from fastjax.execution.policies import POLICIES, candidates, check_policy, policy_of
from fastjax.execution.remat import compiler_options
from fastjax.language_model import FastLanguageModel
from tests.support import tiny


def test_the_first_layers_have_a_policy_of_their_own():
    assert [policy_of("projections:2", index) for index in range(4)] == ["projections", "projections", "full", "full"]
    assert [policy_of("offload", index) for index in range(2)] == ["offload", "offload"]
    assert [policy_of("offload_attention:1", index) for index in range(2)] == ["offload_attention", "offload"]
    assert [policy_of("offload:1", index) for index in range(2)] == ["offload", "full"]


@pytest.mark.parametrize("setting", ["everything", "projections:", "projections:-1", "projections:two", ":2", ""])
def test_an_unknown_policy_is_refused(setting):
    with pytest.raises(ConfigError, match="expected one of .*NAME:k"):
        check_policy(setting)


def test_candidates_begin_with_the_fastest():
    """docs/memory.md: what keeps everything is none of them, and what makes the attention again comes late."""
    apart, hidden = candidates(hidden=False), candidates(hidden=True)
    assert apart[:3] == ("projections", "attention", "full")
    assert hidden == ("projections", "attention", "offload_projections", "offload_attention", "full", "offload")
    assert set(hidden) == set(apart) == set(POLICIES) - {"none"}


@pytest.mark.parametrize("policy", POLICIES)
def test_offloading_layers_one_by_one_needs_fences(policy):
    model = FastLanguageModel.from_config(
        tiny.CONFIG, max_seq_length=32, use_gradient_checkpointing=policy, layer_loop="unroll"
    )
    if not policy.startswith("offload"):
        assert compiler_options(model.graphdef) == compiler_options(model.graphdef, gathers=True) == {}
    elif jax.__version_info__ < (0, 11):
        with pytest.raises(ConfigError, match="expected 'scan'"):
            compiler_options(model.graphdef)
    else:
        assert any("fencing" in name for name in compiler_options(model.graphdef))
