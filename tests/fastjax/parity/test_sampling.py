"""The probabilities of sampling are those of transformers' processors, in its order."""

import numpy as np
import pytest

from fastjax.generation.options import GenerationOptions
from tests.support.sampling import distribution

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PROMPT, ANSWER, WORDS = (0, 3, 3), (5, 9, 9, 9), 40


def torch_distribution(logits, option):
    """By the processors that transformers' `generate` makes of these settings."""
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=option.temperature,
        top_k=option.top_k,
        top_p=option.top_p,
        min_p=option.min_p,
        repetition_penalty=option.repetition_penalty,
        sequence_bias={(token,): bias for token, bias in option.logit_bias.items()} or None,
    )
    make = transformers.GenerationMixin._get_logits_processor
    model = type(
        "Model",
        (),
        {
            "config": transformers.LlamaConfig(vocab_size=WORDS),
            "_merge_criteria_processor_list": lambda self, default, own: default,
        },
    )()
    tokens = torch.tensor([[*PROMPT, *ANSWER]])
    scores = make(model, config, input_ids_seq_length=len(PROMPT))(tokens, torch.tensor(logits)[None])
    return scores[0].softmax(-1).numpy()


def test_probabilities_are_those_of_transformers():
    draw = np.random.default_rng(0)
    supports = set()
    for _ in range(200):
        logits = (draw.normal(size=WORDS) * 3).astype(np.float32)
        option = GenerationOptions(
            temperature=float(draw.uniform(0.2, 2)),
            top_k=draw.choice([None, 3, 10, 100]),
            top_p=draw.choice([None, 0.3, 0.8, 0.99]),
            min_p=draw.choice([None, 0.02, 0.3]),
            repetition_penalty=float(draw.choice([1, 0.7, 1.5])),
            logit_bias={} if draw.random() < 0.5 else {3: 2.0, 9: -1.5, 20: 6.0},
        )
        expected = torch_distribution(logits, option)
        found = distribution(logits, option, PROMPT, ANSWER)
        assert ((found > 0) == (expected > 0)).all(), option
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=str(option))
        supports.add(int((found > 0).sum()))
    assert len(supports) > 10
