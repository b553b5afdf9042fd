"""Text of an answer as it comes: what is sent joined is what decoding gives, and stop strings end it in time."""

import functools
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fastjax.errors import ConfigError
from fastjax.generation.detokenizer import Detokenizer, Stopped
from tests.support import tokenizers as made

BROKEN = "\ufffd"


def stripped():
    """Llama 2's decoder, which takes a space off the text's beginning."""
    tokenizer = made.byte_fallback()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def metaspace():
    tokenizer = made.unigram("first")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def words():
    """Without a decoder: words with a space between them."""
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate("a b . ! n't c".split())}, unk_token="a")
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


KINDS = {
    "byte level": made.byte_level,
    "byte fallback": made.byte_fallback,
    "byte fallback, stripped": stripped,
    "unigram": lambda: made.unigram("first"),
    "metaspace": metaspace,
    "words": words,
}


@functools.cache
def tokenizer_of(kind):
    return KINDS[kind]()


def answers(tokenizer, count):
    """Ids of texts with emoji and CJK characters, and random ids: specials, bytes of no character, ids of no token."""
    draw, size = random.Random(5), len(tokenizer)
    for text in made.endings(count):
        yield tokenizer.encode(f"{text} 世界 👨‍👩‍👧", add_special_tokens=False)
        yield draw.choices(range(size + 3), k=draw.randint(1, 12))
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids.insert(draw.randrange(len(ids) + 1), draw.randrange(size))
        yield ids[: draw.randint(1, len(ids))]


def parts(ids, seed):
    """Ids in groups of random sizes."""
    draw, start = random.Random(seed), 0
    while start < len(ids):
        size = draw.choice([1, 1, 1, 2, 5])
        yield ids[start : start + size]
        start += size


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_joined_are_the_decoded_answer(kind):
    tokenizer = tokenizer_of(kind)
    for number, ids in enumerate(answers(tokenizer, 150)):
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        detokenizer = Detokenizer(tokenizer)
        sent = [detokenizer.add(part) for part in parts(ids, number)]
        assert "".join(sent) + detokenizer.finish() == whole, (ids, sent)
        assert detokenizer.tokens == len(ids) and detokenizer.stopped is None


def test_no_half_character_is_sent():
    tokenizer = tokenizer_of("byte level")
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in made.byte_level().tokenize("é漢𝄞")]
    assert len(ids) == 2 + 3 + 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([one]) for one in ids] == ["", "é", "", "", "漢", "", "", "", "𝄞"]
    assert detokenizer.finish() == ""
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([one]) for one in ids[:4]] == ["", "é", "", ""]
    assert detokenizer.finish() == BROKEN
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add([*ids[2:4], *ids[:2]]) == f"{BROKEN}é"


def test_a_run_of_byte_tokens_is_sent_when_it_has_ended():
    tokenizer = tokenizer_of("byte fallback")
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "漢字".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([one]) for one in ids] == [""] * 6
    assert detokenizer.add([tokenizer.convert_tokens_to_ids("▁the")]) == "漢字 the"
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(ids[:4]) + detokenizer.finish() == tokenizer.decode(ids[:4]) == BROKEN * 4


@pytest.mark.parametrize(
    ("data", "stop", "text", "kept", "through"),
    [
        ("漢字".encode(), "字", "漢", 3, 6),
        ("漢字".encode(), " the", "漢字", 6, 7),
        (b"\xbd\xbd", f"{BROKEN} t", BROKEN, 1, 3),
    ],
)
def test_a_stop_in_a_run_of_byte_tokens(data, stop, text, kept, through):
    tokenizer = tokenizer_of("byte fallback")
    ids = tokenizer.convert_tokens_to_ids([*(f"<0x{byte:02X}>" for byte in data), "▁the"])
    detokenizer = Detokenizer(tokenizer, [stop])
    assert detokenizer.add(ids) == text
    assert (detokenizer.tokens, detokenizer.stopped) == (kept, Stopped(stop, through))


def test_spaces_at_the_beginning_and_behind_a_control_token():
    tokenizer = tokenizer_of("byte fallback, stripped")
    the, control = tokenizer.convert_tokens_to_ids(["▁the", "<|im_start|>"])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([one]) for one in (control, the, control, the)] == ["", "the", "", " the"]
    assert detokenizer.tokens == 4


STOPS = [
    ["e a"],
    ["the", "there"],
    ["r as", " a"],
    ["swer is wh"],
    ["w", "answ"],
    ["世", "界"],
    ["never"],
    ["hat the us", "at t"],
]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "unigram"])
def test_the_text_ends_before_the_stop_that_begins_first(kind):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("is the answer what the user asked 世界 the", add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for number, stops in enumerate(STOPS * 8):
        found = [whole.find(stop) for stop in stops if stop in whole]
        detokenizer = Detokenizer(tokenizer, stops)
        sent, counts = "", []
        for part in parts(ids, number):
            sent += detokenizer.add(part)
            counts.append((len(sent), detokenizer.tokens))
            assert whole[: min(found, default=None)].startswith(sent)
        held = detokenizer.finish()
        assert sent + held == whole[: min(found, default=None)]
        assert (detokenizer.stopped is None) == (not found) and (not found or held == "")
        # Each event ends with a token, but for the end of the answer.
        for length, count in counts[:-1]:
            assert length in (len(tokenizer.decode(ids[:count], skip_special_tokens=True)), len(sent))
        if found and kind == "byte level" and "世" not in stops:
            ends = [len(tokenizer.decode(ids[:count], skip_special_tokens=True)) for count in range(len(ids))]
            assert detokenizer.tokens == sum(end < min(found) for end in ends)
            stop = detokenizer.stopped.stop
            assert detokenizer.stopped.tokens == sum(end < whole.find(stop) + len(stop) for end in ends)


def test_what_could_become_a_stop_is_held_back_until_it_cannot():
    tokenizer = tokenizer_of("byte level")

    def sent(text, stops):
        detokenizer = Detokenizer(tokenizer, stops)
        found = [detokenizer.add([tokenizer.convert_tokens_to_ids(one)]) for one in text]
        return [*found, detokenizer.finish()], detokenizer.stopped

    assert sent("ababc.", ["abc"]) == (["", "", "ab", "", "", "", ""], Stopped("abc", 5))
    assert sent("ab", ["abc"]) == (["", "", "ab"], None)
    assert sent("xabd", ["bc", "abd"]) == (["x", "", "", "", ""], Stopped("abd", 4))
    # A match waits for one that began before it, and is taken if that does not come.
    assert sent("abcd", ["abcd", "bc"]) == (["", "", "", "", ""], Stopped("abcd", 4))
    assert sent("abce", ["abcd", "bc"]) == (["", "", "", "a", ""], Stopped("bc", 3))
    assert sent("abc", ["abcd", "bc"]) == (["", "", "", "a"], Stopped("bc", 3))
    assert sent("aaaab", ["aab"]) == (["", "", "a", "a", "", ""], Stopped("aab", 5))


def test_a_stop_within_a_token_keeps_the_token():
    tokenizer = tokenizer_of("byte level")
    the = tokenizer.encode("the answer", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(the) == ["the", "Ġanswer"]
    detokenizer = Detokenizer(tokenizer, ["sw"])
    assert detokenizer.add(the) == "the an"
    assert (detokenizer.tokens, detokenizer.stopped) == (2, Stopped("sw", 2))
    detokenizer = Detokenizer(tokenizer, [" an"])
    assert detokenizer.add(the) == "the" and detokenizer.tokens == 1
    assert detokenizer.add(the) == detokenizer.finish() == ""


def test_a_stop_may_name_special_tokens():
    tokenizer = tokenizer_of("byte level")
    the, answer, end = tokenizer.convert_tokens_to_ids(["the", "Ġanswer", "<|im_end|>"])
    detokenizer = Detokenizer(tokenizer, ["<|im_end|> ans"])
    assert [detokenizer.add([one]) for one in (end, the, end)] == ["", "the", ""]
    assert (detokenizer.add([answer]), detokenizer.stopped) == ("", Stopped("<|im_end|> ans", 4))
    assert detokenizer.tokens == 2
    detokenizer = Detokenizer(tokenizer, ["<|im_end|> ans"])
    assert detokenizer.add([the, end, the, answer]) + detokenizer.finish() == "thethe answer"
    assert detokenizer.tokens == 4
    detokenizer = Detokenizer(tokenizer, ["sw"])
    assert detokenizer.add([the, end, answer]) == "the an" and detokenizer.tokens == 3


def test_a_long_stop_and_a_long_answer_cost_no_more_a_token():
    detokenizer = Detokenizer(tokenizer_of("byte level"), ["a" * 5000 + "b"])
    token = tokenizer_of("byte level").convert_tokens_to_ids("a")
    for _ in range(20):
        detokenizer.add([token] * 1000)
    assert detokenizer.tokens == 15_000 and detokenizer.stopped is None
    assert len(detokenizer.finish()) == 5000


@pytest.mark.parametrize("stops", [[""], "abc", [3]])
def test_what_is_no_stop_string_is_refused(stops):
    with pytest.raises(ConfigError, match=r"stop_strings: expected a list of texts that are not empty, got"):
        Detokenizer(tokenizer_of("byte level"), stops)
