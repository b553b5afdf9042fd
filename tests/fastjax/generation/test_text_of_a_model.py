"""Texts, ids and streams of one model and the real engine agree; too long a prompt is told before anything is made."""

import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.language_model import FastLanguageModel
from tests.support import chat, tiny

PROMPT = "abc"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.config(num_hidden_layers=2, hidden_size=64, tie_word_embeddings=False, initializer_range=0.3)
    folder = chat.write_model(tmp_path_factory.mktemp("texts") / "model", config)
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, dtype="float32", load_in_4bit=False)[0]


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_text.py::test_answers_tell_their_tokens, "
    "tests/fastjax/generation/test_text.py::test_a_stream_gives_pieces_and_closing_it_ends_the_row, "
    "tests/fastjax/generation/test_face.py::test_texts_to_texts"
)
def test_one_answer_in_all_its_forms(model):
    """Three times the same prompt, whose answer is whole each time."""
    settings = {"max_new_tokens": 32, "eos_token_id": []}
    asked = model.tokenizer([PROMPT], return_tensors="np", add_special_tokens=False)
    ids = [model.generate(**asked, **settings)[0].tolist() for _ in range(3)]
    prompt = asked["input_ids"][0].tolist()
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == len(prompt) + 32 and ids[0][: len(prompt)] == prompt
    said = model.tokenizer.decode(ids[0][len(prompt) :], skip_special_tokens=True)
    pieces = list(model.stream(prompt, **settings))
    assert "".join(pieces) == said and len(pieces) > 4  # a few tokens at a time
    options = GenerationOptions(max_new_tokens=32, top_logprobs=2)
    [[answer]] = model.answers([prompt], options, reading=Reading(chat=False), ignore_eos=True)
    assert (answer.text, list(answer.token_ids), answer.finish_reason) == (said, ids[0][len(prompt) :], "length")
    chosen = zip(answer.token_ids, answer.log_probs, strict=True)
    assert list(chosen) == [pairs[0] for pairs in answer.likeliest]
    stop = said[len(said) // 2 :][:3]
    options = GenerationOptions(max_new_tokens=32, stop_strings=(stop,))
    [[stopped]] = model.answers([prompt], options, ignore_eos=True)
    assert stopped.text == said[: said.find(stop)] and (stopped.finish_reason, stopped.stop) == ("stop", stop)


def test_a_prompt_that_is_too_long(model):
    for length, given, new in ((65, {"max_new_tokens": 1}, 1), (60, {"max_new_tokens": 5}, 5), (64, {}, 1)):
        told = f"of at most 64 together.*a prompt of {length} and max_new_tokens {new}"
        for ask in (lambda prompt, **settings: model.generate([prompt], **settings), model.stream):
            with pytest.raises(ConfigError, match=told):
                ask(np.ones(length, int), **given)
