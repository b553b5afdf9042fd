"""Greedy generation equals transformers', for prompts of different lengths in one batch."""

import pytest

from tests.support import tiny
from tests.support.generation import answers_in_ids

torch = pytest.importorskip("torch")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = pytest.mark.torch

#: Shorter and longer than 32, the step in which prompts are padded; beyond the original positions of llama3 scaling.
LENGTHS = (1, 33, 7, 20)
NEW = 24

#: Untied and with large weights: small random models repeat a token for ever.
CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3}
CONFIG = tiny.config(**CHANGES)


def torch_answers(model, prompts, **options):
    width = max(len(prompt) for prompt in prompts)
    tokens, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.from_numpy(prompt).long()
        mask[row, width - len(prompt) :] = 1
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": CONFIG["pad_token_id"], **options}
    with torch.no_grad():
        return model.generate(tokens, attention_mask=mask.long(), **settings)[:, width:].tolist()


@pytest.mark.exhaustive(by="tests/fastjax/parity/test_face.py::test_the_tensors_are_transformers")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_greedy_answers_equal_transformers(layer_loop):
    reference = torch_llama.build(CONFIG, tiny.arrays(CONFIG))
    prompts = tiny.documents(CONFIG, LENGTHS, seed=4)
    expected = torch_answers(reference, prompts, eos_token_id=None)
    assert len({tuple(row) for row in expected}) == len(prompts)
    assert all(len(set(row)) > 10 for row in expected), "the answers go round in circles"
    model = tiny.model(tiny.shared_folder(**CHANGES), CONFIG, layer_loop=layer_loop)
    found = answers_in_ids(model, [prompt.tolist() for prompt in prompts], max_new_tokens=NEW)
    assert found == expected
    alone = answers_in_ids(model, [prompts[2].tolist()], max_new_tokens=NEW)
    assert alone == [expected[2]], "neighbours in the batch change an answer"


@pytest.mark.exhaustive(
    by="tests/fastjax/parity/test_face.py::test_the_tensors_are_transformers, "
    "tests/fastjax/generation/test_engine.py::test_a_stop_token_ends_an_answer_and_is_told"
)
def test_a_row_ends_at_its_stop_token():
    reference = torch_llama.build(CONFIG, tiny.arrays(CONFIG))
    prompts = tiny.documents(CONFIG, LENGTHS, seed=4)
    free = torch_answers(reference, prompts, eos_token_id=None)
    stops = [free[0][5], free[1][9]]
    expected = torch_answers(reference, prompts, eos_token_id=stops)
    model = tiny.model(tiny.shared_folder(**CHANGES), CONFIG)
    found = answers_in_ids(model, [prompt.tolist() for prompt in prompts], max_new_tokens=NEW, stop_tokens=stops)
    for row, theirs in zip(found, expected, strict=True):
        end = next((n for n, token in enumerate(theirs) if token in stops), len(theirs))
        assert row == theirs[:end]
    assert len(found[0]) <= 5 and len(found[1]) <= 9
