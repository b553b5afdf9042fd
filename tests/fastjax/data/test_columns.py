import json

import pytest

from fastjax.data import ChatRecord, TextRecord, parse_row
from fastjax.errors import DataError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FUNCTION = {"name": "f", "parameters": {}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"text": "t", "id": 1}, TextRecord("t", "w")),
        ({"messages": [USER, ANSWER], "text": None}, ChatRecord([USER, ANSWER], "w")),
        ({"messages": [USER], "prompt": "of the set"}, ChatRecord([USER], "w")),
        ({"prompt": "q", "completion": " a"}, TextRecord("q a", "w", prompt=1)),
        ({"prompt": [USER], "completion": [ANSWER]}, ChatRecord([USER, ANSWER], "w", prompt=1)),
        ({"instruction": "q", "output": "a"}, ChatRecord([USER, ANSWER], "w")),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            ChatRecord([{"role": "user", "content": "q\n\ni", "instruction": "q", "input": "i"}, ANSWER], "w"),
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            ChatRecord([USER, ANSWER], "w"),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "a"},
                ],
                "tools": json.dumps([FUNCTION]),
            },
            ChatRecord(
                [
                    {"role": "system", "content": "s"},
                    USER,
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "content": "1"},
                    ANSWER,
                ],
                "w",
                [{"type": "function", "function": FUNCTION}],
            ),
        ),
        # Arguments as a string, as OpenAI has them, and no content.
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                    }
                ],
                "tools": [{"type": "function", "function": FUNCTION}],
            },
            ChatRecord(
                [{"role": "assistant", "tool_calls": [CALL | {"id": "1"}]}],
                "w",
                [{"type": "function", "function": FUNCTION}],
            ),
        ),
        # What a row says of its messages: learnt or not. The template does not see it.
        (
            {"messages": [USER | {"train": False}, ANSWER | {"train": False}, USER | {"weight": 0}, ANSWER]},
            ChatRecord([USER, ANSWER, USER, ANSWER], "w", train=(False, False, False, None)),
        ),
        (
            {
                "messages": [
                    USER,
                    ANSWER | {"weight": 0},
                    ANSWER | {"weight": 1.0},
                    ANSWER | {"weight": 1, "train": True},
                ]
            },
            ChatRecord([USER, ANSWER, ANSWER, ANSWER], "w", train=(None, False, True, True)),
        ),
        ({"messages": [USER | {"train": None}, ANSWER | {"weight": None}]}, ChatRecord([USER, ANSWER], "w")),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "train": False}]},
            ChatRecord([USER, ANSWER], "w", train=(None, False)),
        ),
        (
            {"prompt": [USER], "completion": [ANSWER | {"weight": 0}, USER, ANSWER]},
            ChatRecord([USER, ANSWER, USER, ANSWER], "w", prompt=1, train=(None, False, None, None)),
        ),
        # Content in parts.
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "value": "a"}], "loss_weight": 0}]},
            ChatRecord([USER, ANSWER], "w", train=(None, False)),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
            ChatRecord([USER, ANSWER], "w"),
        ),
    ],
)
def test_every_kind_of_row(row, record):
    assert parse_row(row, "w") == record


def test_columns_are_renamed_and_decide_between_kinds():
    row = {"question": "q", "answer": "a", "text": "t"}
    assert parse_row(row, "w", {"instruction": "question", "output": "answer"}) == ChatRecord([USER, ANSWER], "w")
    assert parse_row(row, "w", {"prompt": "question", "completion": "answer"}) == TextRecord("qa", "w", prompt=1)
    assert parse_row(row, "w", {"text": "answer"}) == TextRecord("a", "w")
    both = {"instruction": "q", "output": "a", "text": "t"}
    assert parse_row(both, "w", {"text": "text"}) == TextRecord("t", "w")
    with pytest.raises(DataError, match=r"w: the columns of several kinds of example: instruction, text; say which"):
        parse_row(both, "w")


def test_prompt_and_completion_are_messages_where_a_template_was_named():
    assert parse_row({"prompt": "q", "completion": "a"}, "w", templated=True) == ChatRecord([USER, ANSWER], "w")


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"question": "q", "text": None},
            None,
            r"w: expected the columns messages, .*there are: question, text \(null",
        ),
        ({"question": "q"}, {"prompt": "question"}, r"expected the columns 'question', 'completion'; .* question$"),
        ({"prompt": "a", "answer": "b"}, None, "expected the columns .*; the columns there are: prompt, answer"),
        ([1], None, r"expected an object with messages, .* or input_ids, found \[1\]"),
        ({"text": "a", "messages": []}, None, "the columns of several kinds of example: messages, text; say which"),
        ({"messages": []}, None, "'messages' must be a list that is not empty"),
        ({"messages": "hi"}, None, "'messages' must be a list"),
        ({"messages": [{"content": "a"}]}, None, r"messages\[0\]: expected an object with 'role' and 'content'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, None, r"messages\[0\]: unknown role 'bot'; the roles are"),
        ({"messages": [{"role": "user"}]}, None, r"messages\[0\]: 'content' must be a string, found null"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, None, r"'content' must be a string, found \[\"a\"\]"),
        ({"prompt": "q", "completion": 3}, None, "'completion' must be a string, found 3"),
        ({"instruction": ["q"], "output": "a"}, None, r"'instruction' must be a string, found \[\"q\"\]"),
        ({"q": 3, "output": "a"}, {"instruction": "q"}, "'q' must be a string, found 3"),
        ({"conversations": [{"from": "alien", "value": "q"}]}, None, r"conversations\[0\]: unknown speaker 'alien'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, None, r"conversations\[0\]: 'value' must be a string"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, None, "'value' is not valid JSON"),
        ({"messages": [USER], "tools": "{"}, None, "'tools' is not valid JSON"),
        ({"messages": [USER], "tools": [3]}, None, "'tools' must be a list of JSON schemas"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, None, r"tool_calls\[0\]: expected an object with"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            None,
            "'arguments' is not valid JSON",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None, "'content' must be a string"),
        (
            {"messages": [USER, ANSWER | {"weight": 0.5}]},
            None,
            r"messages\[1\]: 'weight' must be 0 \(not learnt\) or 1 \(learnt\), found 0\.5; weights between",
        ),
        ({"messages": [ANSWER | {"weight": True}]}, None, r"messages\[0\]: 'weight' must be 0 .* found true"),
        ({"messages": [ANSWER | {"weight": -1}]}, None, r"messages\[0\]: 'weight' must be 0 .* found -1"),
        ({"messages": [ANSWER | {"train": "no"}]}, None, r"messages\[0\]: 'train' must be true or false, found \"no\""),
        (
            {"messages": [ANSWER | {"train": True, "weight": 0}]},
            None,
            r"messages\[0\]: 'train' is true and 'weight' 0: leave one of them out",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "a", "weight": 2}]},
            None,
            r"conversations\[0\]: 'weight' must be 0",
        ),
    ],
)
def test_what_is_wrong_is_named(row, columns, message):
    with pytest.raises(DataError, match=message) as caught:
        parse_row(row, "w", columns)
    assert str(caught.value).startswith("w: ")


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": LONG, "content": "a"}]},
        {"messages": [{"role": "user", "content": {LONG: 1}}]},
        {"messages": [LONG]},
        {"conversations": [{"from": LONG, "value": "a"}]},
        {"text": [LONG] * 100},
        {LONG: 1},
        {f"{n} {LONG}": 1 for n in range(100)},
        [LONG],
    ],
)
def test_a_message_repeats_little_of_a_row(row):
    with pytest.raises(DataError) as error:
        parse_row(row, "file:1")
    assert len(str(error.value)) < 800
    with pytest.raises(DataError, match="expected the columns 'xxx") as error:
        parse_row({"a": "b"}, "file:1", {"text": LONG})
    assert len(str(error.value)) < 400


def test_a_turn_s_reasoning_is_its_messages():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "thinking": "because", "train": True}]
    record = parse_row({"conversations": turns}, "w")
    assert record.messages[1] == {"role": "assistant", "content": "a", "thinking": "because"}
    assert record.train == (None, True)


@pytest.mark.parametrize(
    ("role", "known"),
    [("function", "tool"), ("ipython", "tool"), ("observation", "tool"), ("model", "assistant"), ("human", "user")],
)
def test_other_names_of_roles(role, known):
    for row in ({"messages": [{"role": role, "content": "a"}]}, {"conversations": [{"role": role, "content": "a"}]}):
        assert parse_row(row, "w").messages == [{"role": known, "content": "a"}]


def test_columns_as_json_text():
    said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = {"messages": [USER, said], "tools": [FUNCTION]}
    packed = {
        "messages": json.dumps([USER, said | {"tool_calls": json.dumps([CALL])}]),
        "tools": json.dumps([FUNCTION]),
    }
    assert parse_row(packed, "w") == parse_row(row, "w")
    pair = {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])}
    assert parse_row(pair, "w") == ChatRecord([USER, ANSWER], "w", prompt=1)
    for text in ("[1] and [2]", "[1]", "[]", '[{"x": 1}]'):  # texts that are no conversations
        assert parse_row({"prompt": text, "completion": "a"}, "w") == TextRecord(f"{text}a", "w", prompt=len(text))
    assert parse_row(row | {"tools": [json.dumps(FUNCTION)]}, "w") == parse_row(row, "w")
    with pytest.raises(DataError, match="w: 'messages' is not valid JSON: "):
        parse_row({"messages": "[oh"}, "w")


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ({"content": "a", "tool_calls": []}, None),
        ({"content": "a", "tool_calls": ""}, None),
        ({"content": "a", "tool_calls": "null", "function_call": None}, None),
        ({"content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}, {"x": 1}),
        ({"content": "", "tool_calls": [], "function_call": {"name": "f", "arguments": ""}}, {}),
        ({"content": None, "tool_calls": [{"name": "f", "parameters": {"x": 1}}]}, {"x": 1}),
        ({"content": None, "tool_calls": [{"name": "f", "arguments": None}]}, {}),
    ],
)
def test_calls_in_other_forms(said, calls):
    (found,) = parse_row({"messages": [{"role": "assistant", **said}]}, "w").messages
    expected = {"role": "assistant"} | ({} if said["content"] is None else {"content": said["content"]})
    call = {"type": "function", "function": {"name": "f", "arguments": calls}}
    assert found == expected | ({} if calls is None else {"tool_calls": [call]})


def test_turns_of_sharegpt_are_messages_in_any_column():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert parse_row({"messages": turns}, "w") == parse_row({"conversations": turns}, "w")


def test_a_thought_among_the_parts_is_the_message_s_reasoning():
    parts = [{"type": "thinking", "thinking": "be"}, {"type": "thinking", "thinking": "cause"}]
    message = {"role": "assistant", "content": [*parts, {"type": "text", "text": "a"}]}
    (found,) = parse_row({"messages": [message]}, "w").messages
    assert found == {"role": "assistant", "content": "a", "reasoning_content": "because"}


SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "q", "output": "a"},
        {"prompt": [USER], "completion": [ANSWER]},
    ],
)
def test_a_column_says_what_the_system_says(column, row):
    plain, record = parse_row(row, "w"), parse_row(row | {column: "Be short."}, "w")
    assert record.messages == [SYSTEM, *plain.messages]
    assert record.prompt == (2 if "prompt" in row else 0)
    assert parse_row(row | {column: ""}, "w") == plain
    named = parse_row(row | {"rule": "Be short."}, "w", {"system": "rule"})
    assert named.messages == record.messages


def test_the_system_stands_once():
    row = {"messages": [SYSTEM, USER, ANSWER | {"train": True}], "system": "Be short."}
    assert parse_row(row, "w").messages == [SYSTEM, USER, ANSWER]
    flagged = parse_row({"messages": [USER, ANSWER | {"train": False}], "system": "Be short."}, "w")
    assert flagged.train == (None, None, False)
    with pytest.raises(DataError, match="w: 'system' and the system's message in the conversation are not the same"):
        parse_row(row | {"system": "Be long."}, "w")
    with pytest.raises(DataError, match="w: 'system_prompt': expected a conversation beside it, since prompt"):
        parse_row({"prompt": "a", "completion": "b", "system_prompt": "Be short."}, "w")
    assert parse_row({"text": "a", "system": "Be short."}, "w") == TextRecord("a", "w")


def test_turns_before_an_instruction():
    row = {"instruction": "q", "output": "a", "history": [["q0", "a0"], ["q1", "a1"]], "system": "Be short."}
    contents = [message["content"] for message in parse_row(row, "w").messages]
    assert contents == ["Be short.", "q0", "a0", "q1", "a1", "q", "a"]
    with pytest.raises(DataError, match=r"w: 'history'\[0\] must be a question and its answer, found"):
        parse_row(row | {"history": [["q0"]]}, "w")


def test_variables_of_the_template():
    row = {"messages": [USER, ANSWER]}
    given = {"chat_template_kwargs": '{"enable_thinking": false}', "documents": [{"title": "t"}]}
    assert parse_row(row | given, "w").options == {"enable_thinking": False, "documents": [{"title": "t"}]}
    assert parse_row(row | {"chat_template_kwargs": None}, "w").options is None
    for wrong, message in (
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object of names and values, found"),
        (
            {"chat_template_kwargs": {"tools": []}},
            "'chat_template_kwargs': expected none of messages, tools, .* found",
        ),
        ({"documents": "d"}, "'documents' must be a list, found"),
    ):
        with pytest.raises(DataError, match=f"w: {message}"):
            parse_row(row | wrong, "w")
