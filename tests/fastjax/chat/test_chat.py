"""A conversation in a terminal and in a pipe, with voices that say what they are told to."""

import io
import itertools
import json
import re
import signal
import types

import pytest
from rich.console import Console

from fastjax.chat import voices
from fastjax.chat.chat import SETTINGS, Chat
from fastjax.chat.lines import read_messages
from fastjax.chat.screen import Screen
from fastjax.commands import chat as chat_command
from fastjax.errors import ConfigError
from fastjax.generation.answers import GrowingAnswer
from fastjax.generation.choices import Piece
from fastjax.generation.options import GenerationOptions
from fastjax.generation.replies import Delta, Reply
from fastjax.generation.text import answer
from fastjax.language_model import FastLanguageModel
from tests.support.chat import write_model


class Growing:
    """The reply of an answer so far."""

    def __init__(self):
        self.deltas, self.finish_reason = [], None

    def reply(self):
        return Reply(*("".join(d.text for d in self.deltas if d.kind == kind) for kind in ("reasoning", "content")))


class Asked:
    """An answer in steps: a thought, and a text, whose words come one by one if it is interrupted."""

    def __init__(self, voice, text):
        self.voice, self.reply = voice, Growing()
        texts = text.split() if "interrupt" in text else [text]
        self._left = [Delta("reasoning", "hm\x1b[2J"), *(Delta("content", each) for each in texts)]

    @property
    def done(self):
        return self.reply.finish_reason is not None

    def step(self):
        delta = self._left.pop(0)
        if delta.text == "interrupt" and self.voice.name == "tuned":
            signal.raise_signal(signal.SIGINT)
        self.reply.deltas.append(delta)
        self.reply.finish_reason = None if self._left else "stop"
        return [delta]

    def cancel(self):
        self.reply.finish_reason = "cancelled"

    def status(self):
        return f"{self.voice.name} {self.reply.finish_reason}"


class Voice:
    def __init__(self, name):
        self.name, self.asked, self.begun = name, [], []

    def ask(self, messages, options):
        question = messages[-1]["content"]
        if question == "too long" or question == f"too long for {self.name}":
            raise ConfigError("the conversation is too long")
        self.asked.append((messages, options))
        self.begun.append(Asked(self, f"{self.name}: {question}"))
        return self.begun[-1]


class Voices:
    def __init__(self):
        self.made = {name: Voice(name) for name in ("base", "tuned")}
        self.names = list(self.made)

    def named(self, name):
        if name not in self.made:
            raise ConfigError(f"no {name}")
        return self.made[name]

    def load(self, folder):
        self.made["new"] = Voice("new")
        return self.made["new"]


def talk(*messages, terminal=False, **more):
    """The text that is shown, the notes beside it, the chat, and whether all went right."""
    output, notes = io.StringIO(), io.StringIO()
    shown = Console(file=output, force_terminal=terminal, width=80, highlight=False, soft_wrap=True, color_system=None)
    beside = shown if terminal else Console(file=notes, width=200, soft_wrap=True)
    voices = Voices()
    chat = Chat(Screen(shown, beside, asks=terminal), voices, "tuned", GenerationOptions(), **more)
    right = chat.run(messages)
    return output.getvalue(), notes.getvalue(), voices.made, right


def test_a_pipe_gets_the_answers_and_nothing_else():
    shown, notes, voices, right = talk("one", "two", system="be short")
    assert right and shown == "tuned: one\ntuned: two\n"
    assert "hm" in notes and "tuned stop" in notes and "\x1b" not in notes
    thought = {"role": "assistant", "content": "tuned: one", "reasoning_content": "hm\x1b[2J"}
    assert voices["tuned"].asked[1][0] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        thought,
        {"role": "user", "content": "two"},
    ]


def test_a_terminal_shows_thoughts_dimmed_and_obeys_no_model():
    output = io.StringIO()
    screen = Screen(Console(file=output, force_terminal=True, color_system="standard", width=80, soft_wrap=True))
    screen.answer(Asked(Voice("tuned"), "say \x07\x9b2J\nit"))
    assert output.getvalue() == ("\x1b[2mhm\u241b[2J\x1b[0m\n\nsay \u2407\ufffd2J\nit\n\x1b[2mtuned stop\x1b[0m\n")


def test_commands_choose_compare_and_take_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    shown, notes, voices, right = talk(
        *("one", "/compare", "/base", "two", "/compare three", "/undo", "/retry", "/save c.jsonl", "/adapter folder"),
        *("four", "/adapter tuned", "/clear", "five", "/save c.jsonl", "/exit", "six"),
    )
    assert right
    assert shown.split("\n") == [
        *("tuned: one", "== base", "base: one", "== tuned", "tuned: one", "base: two"),
        *("== base", "base: three", "== tuned", "tuned: three", "base: two", "new: four", "tuned: five", ""),
    ]
    first, second = map(json.loads, (tmp_path / "c.jsonl").read_text().splitlines())
    assert [message["content"] for message in first["messages"]] == ["one", "tuned: one", "two", "base: two"]
    assert [message["content"] for message in second["messages"]] == ["five", "tuned: five"]
    assert "taken back: three" in notes and "temperature is 0" in notes
    assert "six" not in str(voices["tuned"].asked)


def test_side_by_side_on_a_terminal():
    shown, *_ = talk("/compare one\ntwo", terminal=True)
    rows = re.sub(r"\x1b\[[?0-9]*[A-Za-z]|\r", "", shown).split("\n")
    heads = next(line for line in reversed(rows) if "base" in line and "tuned" in line and ":" not in line)
    below = next(line for line in reversed(rows) if "base: one" in line)
    assert below.index("tuned: one") == heads.index("tuned") and below.index("base: one") == heads.index("base")


def test_ctrl_c_stops_both_sides_and_shows_what_there_is():
    shown, _, voices, right = talk("/compare interrupt now", terminal=True)
    assert right and shown.count("cancelled") == 2 and "the conversation goes on" in shown
    assert "base:interrupt" in shown and "tuned:interrupt" in shown and "now" not in shown


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on():
    """No step of an engine is left half done; the second time leaves, as the first one does in a pipe."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    shown, _, voices, right = talk("interrupt now", "two", terminal=True)
    assert right and "tuned cancelled" in shown and "tuned: two" in shown
    said = [message["content"] for message in voices["tuned"].asked[1][0]]
    assert said == ["interrupt now", "tuned:interrupt", "two"]
    screen = Screen(Console(file=io.StringIO()), asks=True)
    with pytest.raises(SystemExit), screen._interruptible():
        [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        talk("interrupt", "two")
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/frob", "expected one of /adapter, /base"),
        ("/base now", "/base: expected nothing behind it, got 'now'"),
        ("/save", "/save: expected a file"),
        ("/save x", "nothing was asked yet"),
        ("/retry", "nothing was asked yet"),
        ("/compare", "nothing was asked yet"),
        ("/adapter nowhere", "no nowhere"),
        ("/set frob 1", "/set: expected one of max_new_tokens"),
        ("/set top_p 7", "top_p: expected"),
        ("/set top_p [", "/set top_p: expected a value"),
        ("/set logit_bias {a: 1}", "logit_bias: expected a mapping from token ids to numbers"),
        ("too long", "the conversation is too long"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_question_is_answered(line, told):
    shown, notes, voices, right = talk(line, "two")
    assert not right and told in notes and shown == "tuned: two\n"
    assert [message["content"] for message in voices["tuned"].asked[0][0]] == ["two"]


def test_a_refusal_leaves_the_conversation_and_no_voice_at_work():
    """A voice whose answer nobody takes would generate it before the next one."""
    question = "too long for tuned"
    *_, voices, right = talk("/base", question, "/compare", "/adapter tuned", "/retry", "/base", "two")
    assert not right and [asked.done for asked in voices["base"].begun] == [True] * 3
    assert voices["base"].begun[1].reply.finish_reason == "cancelled"
    last = [message["content"] for message in voices["base"].asked[-1][0]]
    assert last == [question, f"base: {question}", "two"]


def test_settings_and_seeds():
    *_, voices, right = talk(
        "/set temperature 0.5",
        "/set stop_strings [a, b]",
        "/set logit_bias {5: -100}",
        "one",
        "two",
        "/set seed 7",
        "/set logit_bias",
        "three",
    )
    asked = [options for _, options in voices["tuned"].asked]
    assert [each.logit_bias for each in asked] == [{5: -100}, {5: -100}, {}]
    assert right and [each.temperature for each in asked] == [0.5] * 3 and asked[0].stop_strings == ("a", "b")
    assert asked[0].seed != asked[1].seed and asked[2].seed == 7
    _, notes, _, _ = talk("/set")
    assert [line.split(":")[0] for line in notes.splitlines()] == list(SETTINGS)
    *_, voices, _ = talk("one", "two", seeded=True)
    assert [options.seed for _, options in voices["tuned"].asked] == [0, 0]


def test_the_speed_is_that_of_the_tokens_behind_the_first_step(monkeypatch):
    """A step brings the first token and further ones, a moment apart."""
    clock = itertools.count()
    monkeypatch.setattr(voices.time, "perf_counter", lambda: next(clock))
    reply = GrowingAnswer([5] * 3)
    reply.deltas = list
    engine = types.SimpleNamespace(max_length=99)
    engine.step = lambda: [Piece(1, 0, (7,)), Piece(1, 0, (7,) * 4)]
    asked = voices.Asked(Voice("tuned"), engine, 1, reply)
    asked.step()
    assert asked.status() == "tuned · 5 tokens · first after 1.00 s · 8 of 99 used"
    asked.step()
    assert asked.status() == "tuned · 10 tokens · 5.0 tokens/s · first after 1.00 s · 13 of 99 used"


def test_messages_of_several_lines():
    text = 'one\n\n  \ntwo\\\nthree\\\nfour\n"""five\n\n/six\n"""\n/seven\n"""eight"""\n"""nine\nten'
    lines, continued = iter(text.split("\n")), []

    def read(goes_on):
        continued.append(goes_on)
        return next(lines, None)

    assert list(read_messages(read)) == ["one", "two\nthree\nfour", "five\n\n/six", "/seven", "eight", "nine\nten"]
    assert continued == [False] * 4 + [True] * 2 + [False] + [True] * 3 + [False] * 3 + [True] * 2 + [False]


@pytest.mark.exhaustive(by="test_a_pipe_gets_the_answers_and_nothing_else")
def test_a_folder_answers_in_a_pipe_as_it_does_elsewhere(tmp_path, monkeypatch, capsys):
    """From the command line to the end, over a tiny random model: a question, a second one behind its answer."""
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n/save said.jsonl\nde\n"))
    monkeypatch.chdir(tmp_path)
    chat_command.main([str(folder), "--max_new_tokens", "12", "--dtype", "float32", "--no_compilation_cache"])
    shown = capsys.readouterr().out
    model, _ = FastLanguageModel.from_pretrained(str(folder), dtype="float32", load_in_4bit=False)
    turns = [{"role": "user", "content": "abc"}]
    options = {"max_new_tokens": 12, "special_tokens": "text"}
    [first] = answer(model, [turns], **options)
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "de"}]
    [second] = answer(model, [turns], **options)
    assert shown == f"{first}\n{second}\n"
    assert json.loads((tmp_path / "said.jsonl").read_text())["messages"] == turns[:2]
