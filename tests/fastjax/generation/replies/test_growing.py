"""Replies of tokens: stop strings in the content alone, deltas of whole tokens."""

import functools
import random

import pytest

from fastjax.generation.choices import Piece
from fastjax.generation.replies import ReplyFormat, ReplyParser
from fastjax.generation.replies.growing import GrowingReply
from tests.support import reply_templates
from tests.support import tokenizers as made

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}]


@functools.cache
def setting(form, special=("<|im_end|>",)):
    tokenizer = made.byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer, ReplyFormat.of(reply_templates.template(form))


def grown(form, text, *, stops=(), step=1, special=("<|im_end|>",), finish="length"):
    """A reply, and (deltas, tokens sent) of each event."""
    tokenizer, found = setting(form, special)
    ids = tokenizer.encode(text, add_special_tokens=False)
    reply = GrowingReply([1], tokenizer, found, ReplyParser(found, False, TOOLS), stops)
    events = []
    for place in range(0, len(ids), step):
        last = place + step >= len(ids)
        tokens = tuple(ids[place : place + step])
        reply.add(Piece(0, 0, tokens, (0.0,) * len(tokens), finish_reason=finish if last else None))
        events.append((reply.deltas(), reply.sent))
    return reply, events, ids, tokenizer


@pytest.mark.parametrize("step", [1, 3, 500])
def test_stop_strings_count_in_the_content_alone(step):
    """Row 3: what lm-eval sends, with a thought and a call that say it."""
    thought = "<think>\nQuestion: is it?\n</think>\n\n"
    text = thought + "It is Qu so. Question: next"
    reply, _, ids, _ = grown("hermes", text, stops=["Question:"], step=step)
    answer = reply.answer()
    assert (answer.finish_reason, answer.stop, answer.text) == ("stop", "Question:", "It is Qu so. ")
    assert (reply.reply().reasoning, reply.reply().content) == ("Question: is it?", "It is Qu so. ")
    assert ids[: len(answer.token_ids)] == list(answer.token_ids) and len(answer.token_ids) < len(ids)
    call = '<tool_call>\n{"name": "look", "arguments": {"q": "Question:"}}\n</tool_call>'
    reply, *_ = grown("hermes", thought + call, stops=["Question:"], step=step, finish="stop")
    assert reply.finish_reason == "stop" and reply.stop is None
    [found] = reply.reply().tool_calls
    assert found.arguments == '{"q": "Question:"}'
    reply, *_ = grown("hermes", thought + "Quest", stops=["Question:"], step=step)
    assert reply.reply().content == "Quest" and reply.finish_reason == "length"


@pytest.mark.parametrize("form", ["hermes", "harmony"])
def test_special_tokens_part_a_reply_and_are_no_text(form):
    special = (
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|other|>",
        *reply_templates.SPECIAL,
    )
    text = {
        "hermes": "<think>\nhm<|other|>\n</think>\n\nSo<|other|> it is.",
        "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So it"
        "<|other|> is.",
    }[form]
    reply, *_ = grown(form, text, special=special, stops=["\n\nX"])
    assert (reply.reply().reasoning, reply.reply().content) == ("hm", "So it is.")
    assert reply.answer().token_ids == tuple(setting(form, special)[0].encode(text, add_special_tokens=False))


def test_deltas_belong_to_whole_tokens():
    """Row 24: the tokens that are sent decode to the texts that are sent."""
    draw = random.Random(3)
    for text in made.endings(60):
        text = f"{text} a<thi<tool_ {text}😀\n\n\n Que sti {text}"
        stops = draw.choice([(), ("Que stop", "\n\n\n\n")])
        reply, events, ids, tokenizer = grown("hermes", text, stops=stops, step=draw.randint(1, 4))
        sent = ""
        for deltas, count in events:
            sent += "".join(delta.text for delta in deltas)
            assert tokenizer.decode(ids[:count], skip_special_tokens=True) == sent, text
        assert sent == reply.answer().text == text and events[-1][1] == len(ids)
