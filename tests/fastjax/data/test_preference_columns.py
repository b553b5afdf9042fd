"""Rows of preferences to answers: the shapes of columns that TRL's data sets have."""

import json

import pytest

from fastjax.data.columns import parse_row
from fastjax.data.preference_columns import parse_preference
from fastjax.data.records import ChatRecord, TextRecord
from fastjax.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


CHATS = (
    ChatRecord([user("Sky?"), said("Blue.")], "f:1", None, 1),
    ChatRecord([user("Sky?"), said("Green.")], "f:1", None, 1),
)
SPACED = tuple(one._replace(messages=[user("Sky?\n"), *one.messages[1:]]) for one in CHATS)
SYSTEM = {"role": "system", "content": "Be short."}
ASKED = tuple(ChatRecord([SYSTEM, *one.messages], "f:1", None, 2) for one in CHATS)
TEXTS = TextRecord("Sky? Blue.", "f:1", 5), TextRecord("Sky? Green.", "f:1", 5)


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "Sky? ", "chosen": "Blue.", "rejected": "Green."}, TEXTS),
        # The space belongs to the answers.
        ({"chosen": "Sky? Blue.", "rejected": "Sky? Green."}, tuple(one._replace(prompt=4) for one in TEXTS)),
        ({"prompt": [user("Sky?")], "chosen": [said("Blue.")], "rejected": [said("Green.")]}, CHATS),
        ({"chosen": [user("Sky?"), said("Blue.")], "rejected": [user("Sky?"), said("Green.")]}, CHATS),
        # The prompt again in both, as a text (UltraFeedback) or as messages.
        ({"prompt": " Sky?\n", "chosen": [user("Sky?"), CHATS[0].messages[1]], "rejected": CHATS[1].messages}, CHATS),
        ({"prompt": [user("Sky?\n")], "chosen": CHATS[0].messages, "rejected": CHATS[1].messages}, SPACED),
        # The system's message stands in one of the two alone.
        ({"prompt": CHATS[0].messages[:1], "chosen": ASKED[0].messages, "rejected": ASKED[1].messages}, ASKED),
        ({"prompt": ASKED[0].messages[:2], "chosen": CHATS[0].messages, "rejected": CHATS[1].messages}, ASKED),
        # Both begin with the system's message, and what is asked stands in the prompt alone.
        ({"prompt": "Sky?", "chosen": [SYSTEM, said("Blue.")], "rejected": [SYSTEM, said("Green.")]}, ASKED),
        (
            {
                "prompt": [user("Sky?")],
                "chosen": [user("Sky?"), said("Blue.")],
                "rejected": [user("Sky?"), said("Green.")],
            },
            CHATS,
        ),
        ({"prompt": "Sky?", "chosen": [said("Blue.")], "rejected": [said("Green.")]}, CHATS),
        # Conversations as JSON text.
        ({"chosen": json.dumps(CHATS[0].messages), "rejected": json.dumps(CHATS[1].messages)}, CHATS),
        # Answers of one message; ShareGPT's turns.
        ({"prompt": [user("Sky?")], "chosen": said("Blue."), "rejected": said("Green.")}, CHATS),
        (
            {
                "prompt": [{"from": "human", "value": "Sky?"}],
                "chosen": {"from": "gpt", "value": "Blue."},
                "rejected": {"from": "gpt", "value": "Green."},
            },
            CHATS,
        ),
    ],
)
def test_pairs(row, expected):
    for pairing in ("paired", "unpaired"):
        found = parse_preference(row, "f:1", pairing=pairing)
        assert found.answers == expected and found.desirable == (True, False)


def test_a_prompt_beside_another_conversation_is_refused():
    row = {"prompt": "Sea?", "chosen": [user("Sky?"), said("Blue.")], "rejected": [user("Sky?"), said("Green.")]}
    with pytest.raises(DataError, match="f:1: 'prompt': expected a message of the beginning that both .* found \"Sea"):
        parse_preference(row, "f:1", pairing="paired")


def test_ranked_pairs_have_a_margin():
    row = {"prompt": "Sky? ", "chosen": "Blue.", "rejected": "Green."}
    for given, margin in (({}, 0.0), ({"margin": 2}, 2.0), ({"margin": None}, 0.0)):
        assert parse_preference(row | given, "f:1", pairing="ranked") == (TEXTS, (True, False), "f:1", margin)
    assert parse_preference(row | {"margin": 2}, "f:1", pairing="paired").margin == 0.0
    for wrong in ("2", True, float("nan")):
        with pytest.raises(DataError, match="f:1: 'margin' must be a finite number, found "):
            parse_preference(row | {"margin": wrong}, "f:1", pairing="ranked")


def test_single_answers_named_columns_and_templates():
    row = {"question": "Sky?", "completion": "Blue.", "label": False}
    found = parse_preference(row, "f:1", {"prompt": "question"}, pairing="unpaired", templated=True)
    assert found.answers == (CHATS[0]._replace(prompt=0),) and found.desirable == (False,)
    turns = [{"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}]
    last = parse_preference(
        {"talk": turns, "good": True}, "f:1", {"messages": "talk", "label": "good"}, pairing="unpaired"
    )
    assert last.answers[0]._replace(prompt=0) == CHATS[0]._replace(prompt=0) and last.answers[0].prompt == 1
    for label in (0, 1):
        numbered = parse_preference(row | {"label": label}, "f:1", {"prompt": "question"}, pairing="unpaired")
        assert numbered.desirable == (bool(label),) and isinstance(numbered.desirable[0], bool)


@pytest.mark.parametrize(
    "pairing, row, message",
    [
        ("paired", [], "f:1: expected an object with chosen and rejected, with prompt or the prompt in both, found"),
        (
            "paired",
            {"prompt": "a", "completion": "b", "label": True},
            "f:1: expected the columns chosen and rejected, .* the columns there are: prompt, completion, label",
        ),
        ("paired", {"chosen": "a", "rejected": None}, "the columns there are: chosen, rejected \\(null\\)"),
        (
            "paired",
            {"chosen": "ab", "rejected": 3, "prompt": "a"},
            "f:1: 'rejected' must be a string, as 'chosen' is, found 3",
        ),
        (
            "paired",
            {"chosen": [said("a")], "rejected": [said("b")]},
            "f:1: expected a prompt, or one that 'chosen' and 'rejected' begin with, got none",
        ),
        ("paired", {"prompt": "a", "chosen": ["b"], "rejected": [said("c")]}, r"f:1: chosen\[0\]: expected an object"),
        ("paired", {"chosen": {}, "rejected": {}}, "f:1: 'chosen' must be a string or a list of messages, found {}"),
        (
            "unpaired",
            {"prompt": "a", "completion": "b", "label": 2},
            "f:1: 'label' must be true or false, found 2",
        ),
    ],
)
def test_what_is_refused(pairing, row, message):
    with pytest.raises(DataError, match=message):
        parse_preference(row, "f:1", pairing=pairing)


def test_preferences_without_their_setting():
    with pytest.raises(DataError, match=r"; to learn preferences, name a loss \(preferences.loss\)"):
        parse_row({"prompt": "a", "chosen": "b", "rejected": "c"}, "f:1")
