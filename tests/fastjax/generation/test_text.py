"""Prompts on their way to the engine, texts and ids and what is neither; answers on their way back."""

import io

import numpy as np
import pytest

from convert.errors import ConvertError
from fastjax.commands import generate as command
from fastjax.data import Encoder
from fastjax.errors import ConfigError, DataError
from fastjax.generation import text
from fastjax.generation.answers import Answer
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from tests.support import saying
from tests.support import tokenizers as made

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r<|im_end|>"},
]
TOKENIZER = made.byte_level()
END = saying.END


def ids(said):
    return TOKENIZER.encode(said, add_special_tokens=False)


def model(**changes):
    """One that says "the answer is: the user" and ends the turn."""
    said = ids("the answer is: the user")
    return saying.model(saying.chain(said), said[0], **changes)


@pytest.fixture
def engines(monkeypatch):
    return saying.watch(monkeypatch)


@pytest.fixture
def answer(engines):
    return lambda prompts, **options: text.answer(model(), prompts, **options)


def asked(engines):
    return [TOKENIZER.decode(prompt) for engine in engines for prompt, _ in engine.asked]


def test_conversations_are_continued(answer, engines):
    expected = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    alone = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    said = answer([CHAT, "q", [CHAT[1]], tuple(CHAT), ids("wo"), np.asarray(ids("what"))])
    assert said == ["the answer is: the user"] * 6
    assert asked(engines) == [expected, alone, alone, expected, "wo", "what"]
    assert answer([]) == [] and len(engines) == 1
    assert answer(["the user"], chat=False) and asked(engines)[-1] == "the user"


def test_an_answer_that_has_begun_is_continued(engines):
    begun = [CHAT[1], {"role": "assistant", "content": " the answer "}]
    going = Reading(continue_final_message=True)
    text.answers(model(), [begun], reading=going)
    beginning = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert asked(engines)[-1] == beginning + "the answer "
    thinking = "{% for m in messages %}{{ m.role }}:<think>{{ m.reasoning_content }}</think>{{ m.content }}{% endfor %}"
    begun[1] = {"role": "assistant", "content": "", "reasoning": "wo"}
    text.answers(model(template=thinking), [begun], reading=going)
    assert asked(engines)[-1] == "user:<think></think>qassistant:<think>wo"
    for messages, message in (
        (CHAT, "expects the assistant's message at the end, got one of role 'user'"),
        (begun[:1] + [{"role": "assistant", "content": ""}], "expects a message of text"),
    ):
        with pytest.raises(ConfigError, match=f"messages.*: continue_final_message {message}"):
            text.answers(model(), [messages], reading=going)
    twice = model(template="{{ messages[0].content }}")
    with pytest.raises(DataError, match="writes the last message once, got 0 times"):
        text.answers(twice, [[CHAT[1], CHAT[2]]], reading=going)


def test_prompts_draw_numbers_of_their_own_by_one_seed(answer, engines):
    answer(["q"] * 3, seed=2**32 - 1, temperature=0.5, top_k=3, top_p=0.5, max_new_tokens=7)
    options = [options for _, options in engines[0].asked]
    assert len({one.seed for one in options}) == 3 and options[0].seed == 2**32 - 1
    assert {(one.temperature, one.top_k, one.top_p, one.max_new_tokens) for one in options} == {(0.5, 3, 0.5, 7)}


def test_special_tokens_in_prompts_as_text(answer, engines):
    answer([CHAT])
    answer([CHAT], special_tokens="text")
    assert [engine.asked[0][0].count(END) for engine in engines] == [5, 4]


def test_answers_tell_their_tokens(engines):
    said, n = ids("the answer is: the user"), 2
    found = text.answers(model(), ["q"], GenerationOptions(n=n, top_logprobs=1))
    [[one, other]] = found
    likeliest = tuple(((token, value),) for token, value in zip(said, one.log_probs, strict=True))
    prompt = tuple(engines[0].asked[0][0])
    expected = Answer("the answer is: the user", tuple(said), one.log_probs, likeliest, "stop", prompt, END)
    assert one == other == expected and -0.01 < min(one.log_probs) < 0
    [[short]] = text.answers(model(), ["q"], GenerationOptions(max_new_tokens=4))
    assert (short.token_ids, short.finish_reason, short.stop) == (tuple(said[:4]), "length", None)
    longer = GenerationOptions(max_new_tokens=7)
    [[whole]] = text.answers(model(), ["q"], longer, ignore_eos=True)
    assert (whole.token_ids[-1], whole.finish_reason, whole.text) == (END, "length", one.text)


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_a_stop_string_ends_an_answer_and_no_other(steps, monkeypatch):
    engines = saying.watch(monkeypatch, steps)
    after = saying.chain(ids("one")[-1:] + ids("is: the user asked"), ids("qwo")) | dict(
        [ids("o the"), ids(" asked the")]
    )
    options = GenerationOptions(stop_strings=("se", "e use", "one"), n=2, top_logprobs=1)
    found = text.answers(saying.model(after), ["one", "q"], options, reading=Reading(chat=False))
    assert [[each.text for each in row] for row in found] == [["is: th"] * 2, ["wo th"] * 2]
    for row in found:
        for each in row:
            kept = len(each.token_ids)
            assert TOKENIZER.decode(each.token_ids).startswith(each.text)
            assert not TOKENIZER.decode(each.token_ids[:-1]).startswith(each.text)
            assert len(each.log_probs) == len(each.likeliest) == kept
            assert (each.finish_reason, each.stop) == ("stop", "e use")
    assert sorted(engines[0].cancelled) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_stream_gives_pieces_and_closing_it_ends_the_row(engines):
    pieces = list(text.stream(model(), "q"))
    assert "".join(pieces) == "the answer is: the user" and len(pieces) > 1 and all(pieces)
    growing = text.stream(model(), "q", GenerationOptions(stop_strings=("never",)))
    assert "the answer is".startswith(next(growing)) and engines[-1].cancelled == []
    growing.close()
    assert engines[-1].cancelled == [(1, 0)] and not [*engines[-1].run()][0].tokens and engines[-1]._pages.free == 32
    said = text.stream(model(), "q", GenerationOptions(stop_strings=("the user asked",)))
    assert "".join(said) == "the answer is: the user"
    said = text.stream(model(), "q", GenerationOptions(stop_strings=("the user",)))
    assert "".join(said) == "the answer is: "
    with pytest.raises(ConfigError, match="n: expected 1 answer to stream, got 2"):
        text.stream(model(), "q", GenerationOptions(n=2))


def test_special_tokens_are_ids_and_no_text(engines):
    inside = [*ids("the"), made.SPECIAL.index("[INST]"), *ids(" user")]
    talks = saying.model(saying.chain(inside), inside[0])
    [[found]] = text.answers(talks, ["q"])
    assert (found.text, list(found.token_ids)) == ("the user", inside)
    assert "".join(text.stream(talks, "q")) == "the user"


def test_a_model_without_a_tokenizer_answers_ids(engines):
    plain = model(tokenizer=False)
    [[found]] = text.answers(plain, [[3, 4]], GenerationOptions(max_new_tokens=2))
    assert (found.text, len(found.token_ids), found.prompt_token_ids) == ("", 2, (3, 4))
    with pytest.raises(ConfigError, match="stop_strings: expected a model with a tokenizer"):
        text.answers(plain, [[3, 4]], GenerationOptions(stop_strings=("a",)))
    with pytest.raises(
        ConfigError, match=r"prompts\[0\]: expected token ids for a model without a tokenizer, got \"q\""
    ):
        text.answers(plain, ["q"])
    with pytest.raises(ConfigError, match="answer: expected a model with a tokenizer"):
        text.answer(plain, [[3, 4]])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("q", {}, r"prompts: expected a list of texts or conversations, got a text alone; write \[\"q\"\]"),
        (CHAT, {}, r"prompts\[0\]: expected a text or a list of messages, got one message; write \[\[.*\]\] for one"),
        ([["q"]], {}, r"prompts\[0\]\[0\]: expected an object with 'role' and 'content', found \"q\""),
        ([[]], {}, r"prompts\[0\] must be a list that is not empty"),
        ([[{"role": "alien", "content": "q"}]], {}, r"prompts\[0\]\[0\]: unknown role 'alien'"),
        (["q", 3], {}, r"prompts\[1\]: expected a text, a list of messages or token ids, got 3"),
        ([CHAT], {"chat": False}, r"prompts\[0\]: expected a text, got a conversation; leave chat at True"),
    ],
)
def test_what_is_no_prompt_is_refused(answer, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        answer(prompts, **options)


def test_half_of_a_surrogate_pair(answer, monkeypatch):
    with pytest.raises(DataError, match=r"the prompt: .* \\udcff, half of a surrogate pair"):
        answer(["a\udcff"])
    with pytest.raises(ConfigError, match=r"^--prompt: .* \\udcff, half of a surrogate pair"):
        command.main(["--model", "nowhere", "--prompt", "q", "--prompt", "a\udcff"])
    monkeypatch.setattr("sys.stdin", io.StringIO("q\na\udcff\n"))
    with pytest.raises(DataError, match=r"^standard input: .* \\udcff, half of a surrogate pair"):
        command.main(["--model", "nowhere", "--file", "-"])


@pytest.mark.parametrize(
    ("given", "named"), [(None, []), ("{}", []), ('{"eos_token_id": 5}', [5]), ('{"eos_token_id": [5, 7, 5]}', [5, 7])]
)
def test_answers_end_where_the_folder_says_too(given, named, tmp_path, engines):
    of_folder = model(folder=tmp_path)
    if given is not None:
        (tmp_path / "generation_config.json").write_text(given)
    text.answers(of_folder, ["q"], GenerationOptions(stop_tokens=(9,)))
    [(_, options)] = engines[0].asked
    assert list(options.stop_tokens) == [*Encoder(of_folder.tokenizer).stop_tokens(), *named, 9]


@pytest.mark.parametrize("given", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}', '{"eos_token_id": true}', "["])
def test_a_generation_config_that_says_something_else_is_named(given, tmp_path):
    (tmp_path / "generation_config.json").write_text(given)
    with pytest.raises(ConvertError, match=r"generation_config.json: (eos_token_id: expected a token id or|.*JSON)"):
        text.answer(model(folder=tmp_path), ["q"])
