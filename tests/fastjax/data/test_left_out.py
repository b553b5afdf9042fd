"""Parts of a conversation that its template does not write are counted, and those that it writes are not."""

import pytest

from fastjax.data import Encoder, notes, parse_row
from fastjax.data.pipeline import prepare
from tests.support.data import uncached

CALL = {"type": "function", "function": {"name": "find_city", "arguments": {"name": "Ulm"}}}
ALL = {
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": 'He said "why\nnot" & left'},
        {"role": "assistant", "content": "", "reasoning": "It is early.", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"river": "Danube"}'},
        {"role": "assistant", "content": "<think>\nA river.\n</think>\n\nThe Danube.", "thinking": "Well known."},
    ],
    "tools": [{"type": "function", "function": {"name": "find_city", "description": "Looks a city up."}}],
    "documents": [{"title": "Ulm", "text": "A city on a river."}],
    "chat_template_kwargs": {"enable_thinking": True},
}
HEAD = "{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking }}"
TURN = "{{ m.reasoning_content }}{{ m.content | tojson }}{{ m.tool_calls | tojson if m.tool_calls }}"
WHOLE = HEAD + "{% for m in messages %}[{{ m.role }}] " + TURN + "</s>{% endfor %}"
LAST = "{{ m.content.split('</think>')[-1] }}{{ 'call' if m.tool_calls }}"


@pytest.fixture
def noted(make_tokenizer):
    def find(template, row=ALL, **options):
        (examples,) = Encoder(make_tokenizer(template), uncached(**options)).encode([parse_row(row, "row")])
        return sorted(examples.noted)

    return find


@pytest.mark.parametrize("loss_on", ["responses", "all", "last_response"])
def test_nothing_is_left_out_of_a_whole_conversation(noted, loss_on):
    assert noted(WHOLE, loss_on=loss_on) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WHOLE.replace("{{ tools | tojson }}", ""), ["tools"]),
        (WHOLE.replace("{{ documents | tojson }}", ""), ["documents"]),
        (WHOLE.replace("{{ enable_thinking }}", ""), ["chat_template_kwargs"]),
        (WHOLE.replace("{{ m.reasoning_content }}", ""), ["reasoning"]),
        (WHOLE.replace(TURN, "{{ m.reasoning_content }}" + LAST), ["thoughts", "tool_calls"]),
        (WHOLE.replace("messages %}", "messages if m.role != 'system' %}"), ["content"]),
    ],
)
@pytest.mark.parametrize("loss_on", ["responses", "all"])
def test_a_part_that_the_template_does_not_write(noted, template, expected, loss_on):
    assert noted(template, loss_on=loss_on) == expected


def test_thoughts_of_turns_that_are_not_learnt_may_be_cut(noted):
    template = WHOLE.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content if loop.last }}")
    assert noted(template, loss_on="last_response") == []
    assert noted(template, loss_on="all") == ["reasoning"]
    assert noted(template) == []  # each answer has a row of its own


def test_such_rows_are_said_with_the_place_of_the_first(make_tokenizer, write_rows):
    tokenizer = make_tokenizer(WHOLE.replace("{{ m.reasoning_content }}", ""))
    rows = write_rows(
        "rows.jsonl", [{"messages": ALL["messages"][:1] + [{"role": "assistant", "content": "a"}]}, ALL, ALL]
    )
    statistics = prepare(rows, tokenizer, 512).statistics
    assert statistics.notes == {"reasoning": (2, f"{rows}:2")}
    assert str(statistics).endswith(f"2 {notes.KINDS['reasoning']} (first: {rows}:2)")
