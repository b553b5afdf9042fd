"""An embedding table in the host's memory: the same step, and what it is refused for."""

import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.models.host_table import in_host_memory
from tests.support import steps, tiny

CONFIG = tiny.config(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("base"), CONFIG)


def test_the_step_is_the_same_bit_for_bit(base):
    model = tiny.adapted(base)
    moved = model.with_host_embedding()
    assert in_host_memory(moved.frozen["embed_tokens"]["weight"])
    assert not in_host_memory(model.frozen["embed_tokens"]["weight"])
    batch = tiny.batches(CONFIG, 1)[0]
    (metrics, grads), (expected, other) = steps.gradients(moved, batch), steps.gradients(model, batch)
    assert metrics["loss"] == expected["loss"]
    for (name, leaf), (_, right) in zip(steps.named(grads).items(), steps.named(other).items(), strict=True):
        np.testing.assert_array_equal(leaf, right, name)


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_a_trained_table_stays_on_the_device(base, options):
    model = FastLanguageModel.get_peft_model(base, r=2, **options)
    with pytest.raises(ConfigError, match="offload_embedding: expected false"):
        model.with_host_embedding()


def test_a_tied_table_stays_on_the_device(tmp_path):
    model = tiny.adapted(tiny.model(tmp_path, tiny.config(tie_word_embeddings=True)))
    with pytest.raises(ConfigError, match="tied"):
        model.with_host_embedding()
