"""The compiler's options that policies of rematerialisation need."""

import jax
import pytest

from fastjax.errors import ConfigError
from fastjax.execution.policies import POLICIES
from fastjax.execution.remat import compiler_options
from fastjax.language_model import FastLanguageModel
from tests.support import tiny


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
