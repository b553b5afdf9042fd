"""`model.generate` by transformers' names: settings, arrays of every kind, streamers, refusals."""

import json
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import TextIteratorStreamer, TextStreamer

from fastjax.errors import ConfigError
from fastjax.generation import face
from tests.support import saying
from tests.support import tokenizers as made

TOKENIZER = made.byte_level()
TOKENIZER.padding_side, TOKENIZER.pad_token = "left", "[INST]"
END, PAD = saying.END, TOKENIZER.convert_tokens_to_ids("[INST]")


def ids(said):
    return TOKENIZER.encode(said, add_special_tokens=False)


@pytest.fixture
def engines(monkeypatch):
    return saying.watch(monkeypatch, 1)


def model(**changes):
    """One that says the three tokens behind each multiple of 4, and ends the turn."""
    fours = [range(first, first + 4) for first in range(36, 48, 4)]
    return saying.model(saying.chain(*fours, ids(" the answer is")), **changes)


def options_of(engines):
    [(_, options)] = engines[-1].asked
    return options


def test_texts_to_texts(engines):
    assert face.generate(model(), [" the", " answer"], chat=False) == [" answer is", " is"]
    newline = saying.model(saying.chain(ids("\nwo")))
    said = face.generate(newline, ["q", [{"role": "user", "content": "q"}]], num_return_sequences=2)
    assert said == ["wo"] * 4
    assert [TOKENIZER.decode(prompt) for prompt, _ in engines[-1].asked] == [
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    ] * 2
    assert face.generate(model(), []) == []
    assert "".join(face.stream(model(), " the", chat=False, max_new_tokens=1)) == " answer"


KINDS = {
    "numpy": lambda rows: np.asarray(rows, np.int64),
    "int32": lambda rows: np.asarray(rows, np.int32),
    "jax": lambda rows: jnp.asarray(rows, jnp.int32),
    "lists": lambda rows: rows,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_ids_to_ids_as_in_transformers(kind, side, engines):
    padded = {"left": [[PAD, PAD, 40], [41, PAD, 44]], "right": [[40, PAD, PAD], [41, PAD, 44]]}[side]
    mask = {"left": [[0, 0, 1], [1, 1, 1]], "right": [[1, 0, 0], [1, 1, 1]]}[side]
    own = model()
    before = own.tokenizer.__getstate__()
    given = {"input_ids": KINDS[kind](padded), "attention_mask": KINDS[kind](mask)}
    found = face.generate(own, **given, max_new_tokens=4, num_return_sequences=2)
    assert [prompt for prompt, _ in engines[-1].asked] == [[40], [41, PAD, 44]]
    answers = [range(41, 44), range(45, 48)]
    expected = [[*row, *answer, END] for row, answer in zip(padded, answers, strict=True) for _ in range(2)]
    assert np.asarray(found).tolist() == expected
    like = np.zeros(0, np.int64) if kind == "lists" else given["input_ids"]
    assert type(found) is type(like) and found.dtype == like.dtype
    assert own.tokenizer.__getstate__() == before and own.tokenizer.padding_side == "right"


def test_shorter_answers_are_padded(engines):
    own = model()
    found = face.generate(own, np.asarray([[42], [40]]), max_new_tokens=3)
    assert found.tolist() == [[42, 43, END, PAD], [40, 41, 42, 43]]
    assert face.generate(own, [[42], [1, 42]], pad_token_id=0).tolist() == [[42, 43, END, 0], [1, 42, 43, END]]
    own.tokenizer.pad_token = None
    assert face.generate(own, [[42], [40]], eos_token_id=[END, 9]).tolist()[0] == [42, 43, END, END, END]


def test_pad_tokens_are_padding_where_no_mask_says_more(engines):
    own = model()
    face.generate(own, np.asarray([[PAD, 40, PAD]]))
    face.generate(own, np.asarray([[PAD, 40, PAD]]), eos_token_id=PAD, max_new_tokens=2)
    assert [engine.asked[0][0] for engine in engines] == [[40], [PAD, 40, PAD]]


def test_inputs_in_all_their_places(engines):
    own, encoded = model(), TOKENIZER(["the", "user the"], return_tensors="np", padding=True)
    expected = face.generate(own, **encoded).tolist()
    assert face.generate(own, encoded["input_ids"], attention_mask=encoded["attention_mask"]).tolist() == expected
    assert face.generate(own, input_ids=encoded).tolist() == expected
    assert face.generate(own, encoded, token_type_ids=np.zeros((2, 2))).tolist() == expected
    assert [row[:2] for row in expected] == encoded["input_ids"].tolist()


def test_a_stop_string_ends_ids_with_the_token_that_completes_it(engines):
    said = ids("is the user asked")
    own = saying.model(saying.chain(said), said[0])
    found = face.generate(own, [[40]], stop_strings="e us", tokenizer=own.tokenizer).tolist()
    assert found == [[40, *said[:3]]] and TOKENIZER.decode(said[:3]) == "is the user"
    assert engines[-1].cancelled == [(1, 0)]
    assert face.generate(own, ["q"], stop_strings=["e us"]) == ["is th"]


def test_a_streamer_gets_the_prompt_and_each_token(engines, capsys):
    calls = []
    streamer = SimpleNamespace(
        put=lambda value: calls.append((value.shape, value.tolist())), end=lambda: calls.append("end")
    )
    face.generate(model(), np.asarray([[PAD, 40]]), streamer=streamer)
    assert calls == [((1, 2), [[PAD, 40]]), *[((1,), [token]) for token in (41, 42, 43, END)], "end"]
    face.generate(model(), [" the"], chat=False, streamer=TextStreamer(TOKENIZER, skip_prompt=True))
    assert capsys.readouterr().out == " answer is<|im_end|>\n"
    pieces = TextIteratorStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=True)
    given = {"input_ids": jnp.asarray([ids("user the")]), "streamer": pieces, "max_new_tokens": 1}
    thread = threading.Thread(target=face.generate, args=(model(),), kwargs=given)
    thread.start()
    assert "".join(pieces) == " answer"
    thread.join()
    calls.clear()
    with pytest.raises(ConfigError, match="streamer: expected one prompt and one answer, got 2"):
        face.generate(model(), [[40], [41]], streamer=streamer)
    assert calls == ["end"]


FOLDER = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_length": 40,
    "cache_implementation": "hybrid",
    "odd": 3,
}


@pytest.mark.parametrize(
    ("folder", "given", "config", "expected"),
    [
        ({}, {}, None, {"temperature": 0.0, "top_k": None, "top_p": None, "max_new_tokens": 256, "n": 1, "seed": 0}),
        ({}, {"temperature": 1.5, "min_p": 0.1}, None, {"temperature": 1.5, "min_p": 0.1, "top_k": None}),
        ({}, {"do_sample": True, "num_return_sequences": 3}, None, {"temperature": 1.0, "top_k": 50, "n": 3}),
        ({}, {"do_sample": True, "top_k": 0}, None, {"temperature": 1.0, "top_k": 0}),
        ({}, {"temperature": 0, "top_p": 0.5, "use_cache": False}, None, {"temperature": 0.0, "top_p": None}),
        (FOLDER, {}, None, {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_new_tokens": 38}),
        (FOLDER, {"top_p": 0.5, "seed": 7}, None, {"temperature": 0.6, "top_p": 0.5, "seed": 7}),
        (FOLDER, {"do_sample": False}, None, {"temperature": 0.0, "top_p": None}),
        (FOLDER, {"temperature": 0.0}, None, {"temperature": 0.0}),
        (FOLDER, {"max_new_tokens": 5}, None, {"max_new_tokens": 5}),
        (FOLDER, {"max_length": 7}, None, {"max_new_tokens": 5}),
        (FOLDER, {}, {"temperature": 2.0, "top_p": None, "max_new_tokens": 9}, {"temperature": 2.0, "top_p": 0.9}),
        (FOLDER, {"temperature": 3.0}, {"temperature": 2.0, "max_new_tokens": 9}, {"temperature": 3.0}),
        ({"max_length": 4096}, {}, None, {"max_new_tokens": 510}),
        ({"num_beams": 4}, {"num_beams": 1}, None, {"temperature": 0.0}),
        ({"eos_token_id": 7}, {}, None, {"stop_tokens": (1, END, 7)}),
        ({"eos_token_id": 7}, {"eos_token_id": np.asarray([5, 6])}, None, {"stop_tokens": (5, 6)}),
        ({}, {"eos_token_id": []}, None, {"stop_tokens": ()}),
        ({}, {"repetition_penalty": 0.1, "logit_bias": {3: -100.0}}, None, {"repetition_penalty": 0.1}),
        ({}, {"stop_strings": "a", "presence_penalty": 1.0}, None, {"stop_strings": ("a",), "presence_penalty": 1.0}),
    ],
)
def test_settings(folder, given, config, expected, engines, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(folder))
    configs = [config] if config is None else [config, SimpleNamespace(to_dict=lambda: config)]
    for each in configs:
        face.generate(model(folder=tmp_path), [[40, 41]], generation_config=each, **given)
        found = options_of(engines)
        assert {name: getattr(found, name) for name in expected} == expected


def test_what_does_nothing_is_told(engines, caplog):
    face.generate(model(), [[40]], do_sample=False, temperature=0.7)
    assert "generate: temperature: without effect, since nothing is sampled; set do_sample=True" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "generate: num_beams is not served, got 4; leave it out"),
        ({"penalty_alpha": 0.6}, "generate: penalty_alpha is not served"),
        ({"logits_processor": [len]}, "generate: logits_processor is not served"),
        ({"generation_config": {"min_new_tokens": 3}}, "generate: min_new_tokens is not served"),
        ({"generation_config": 3}, "generation_config: expected a GenerationConfig or a dict, got 3"),
        ({"max_tokens": 3}, "generate: max_tokens: unknown; use max_new_tokens; expected some of "),
        ({"top_p": 1.2, "do_sample": True}, "top_p: expected a number"),
        ({"max_length": 2}, "max_length: expected more tokens than the prompt's 2, got 2"),
        ({"inputs": [[1]]}, "generate: expected either prompts or input_ids, got both"),
        ({"input_ids": None}, "generate: expected prompts or input_ids, got neither"),
        ({"input_ids": None, "inputs": ["a"], "attention_mask": [[1]]}, "attention_mask: expected input_ids beside it"),
        ({"input_ids": np.asarray([1, 2])}, r"input_ids: expected token ids \[rows, tokens\], got shape \(2,\)"),
        ({"input_ids": np.asarray([[1.0]])}, r"input_ids\[0\]: expected whole numbers, got 1.0"),
        ({"input_ids": [[1], []]}, r"input_ids\[1\]: expected at least one token, got none"),
        (
            {"attention_mask": [[1]]},
            r"attention_mask: expected the shape of input_ids, rows of \[2\] tokens, got \[1\]",
        ),
        ({"attention_mask": [[1, 2]]}, "attention_mask: expected 1 at tokens and 0 at padding"),
        ({"token_type_ids": [[0, 1]]}, "token_type_ids: expected zeros"),
    ],
)
def test_what_is_refused(given, message, engines):
    with pytest.raises(ConfigError, match=message):
        face.generate(model(), **{"input_ids": [[1, 2]], **given})
    assert not engines


def test_a_folder_that_asks_for_what_is_not_served(tmp_path, engines):
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4}')
    message = (
        r"num_beams of the folder's generation_config.json is not served, got 4; pass num_beams=1 to switch it off"
    )
    with pytest.raises(ConfigError, match=message):
        face.generate(model(folder=tmp_path), ["q"])


@pytest.mark.torch
def test_tensors_of_torch(engines):
    torch = pytest.importorskip("torch")
    calls = []
    streamer = SimpleNamespace(put=calls.append, end=lambda: None)
    given = {"input_ids": torch.tensor([[PAD, 40]]), "attention_mask": torch.tensor([[0, 1]])}
    found = face.generate(model(), **given, streamer=streamer)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int64
    assert found.tolist() == [[PAD, 40, 41, 42, 43, END]]
    assert [type(call) for call in calls] == [torch.Tensor] * 5
    assert not isinstance(found, jax.Array)
