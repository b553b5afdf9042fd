"""Every type of rotary scaling equals transformers', in its frequencies and in a model's logits."""

import numpy as np
import pytest

from convert.families.mapping import read_config
from fastjax.models.rope_override import with_rope_scaling
from fastjax.models.rotary import frequencies_by_length, inverse_frequencies
from tests.support import tiny

torch = pytest.importorskip("torch")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = pytest.mark.torch

KINDS = {
    "linear": {"rope_type": "linear", "factor": 3.5},
    "llama3": tiny.ROPE,
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn, every field": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 6.0,
        "beta_slow": 1.5,
        "truncate": False,
        "attention_factor": 0.8,
    },
    "yarn with mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.6},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": 1.3, "long_factor": 4.2},
    "longrope, every field": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 48,
        "attention_factor": 0.8,
        "short_factor": 1.3,
        "long_factor": 4.2,
    },
}


def scaling_of(kind, head_dim):
    """The lists of longrope have a number a pair, and grow from the one that is given."""
    lists = {"short_factor", "long_factor"}
    pairs = np.linspace(0, 1, head_dim // 2)
    return {name: (value + pairs).tolist() if name in lists else value for name, value in KINDS[kind].items()}


@pytest.mark.parametrize(("head_dim", "theta", "length"), [(16, 5000.0, 192), (128, 5e5, 8192), (10, 321.0, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies(kind, head_dim, theta, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = scaling_of(kind, head_dim) | {"rope_theta": theta}
    config = tiny.config(head_dim=head_dim, rope_parameters=scaling, max_position_embeddings=length)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](LlamaConfig(**config))
    rope = read_config(config).rope
    # a few float32 operations in another order
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), expected.numpy(), rtol=5e-7)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    if kind.startswith(("dynamic", "longrope")):
        lengths = np.asarray([[3, rope.original_max_position_embeddings], [length + 7, 2 * length]], np.int32)
        found = np.asarray(frequencies_by_length(rope, head_dim, lengths))
        for place, tokens in np.ndenumerate(lengths):
            expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](LlamaConfig(**config), seq_len=int(tokens))
            # dynamic: a base that grows as a power, in float32
            np.testing.assert_allclose(found[place], expected.numpy(), rtol=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_an_override_are_transformers_with_the_config_that_is_saved(kind):
    """Rows longer than the original length; the override is far from the folder's own scaling."""
    folder, scaling = tiny.shared_folder(), scaling_of(kind, 16)
    changed = with_rope_scaling(tiny.CONFIG, scaling)
    arrays = tiny.arrays(tiny.CONFIG)
    tokens = np.stack(tiny.documents(tiny.CONFIG, (100,)))
    expected = torch_llama.logits(torch_llama.build(changed, arrays), tokens)
    model = tiny.model(folder, tiny.CONFIG, rope_scaling=scaling, max_seq_length=100)
    assert dict(model.hf_config) == changed
    found = tiny.logits(model, tokens)
    # float32 through three layers, logits of a few units, as in the test of logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    if kind != "llama3":
        assert np.abs(tiny.logits(tiny.model(folder, tiny.CONFIG), tokens) - found).max() > 0.1
