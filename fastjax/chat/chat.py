"""A conversation at work: questions to the voice that was chosen, and the lines that begin with a slash."""

import dataclasses
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from convert.errors import ConvertError, listed, shown
from fastjax import strict_yaml
from fastjax.chat.conversation import Conversation
from fastjax.chat.screen import Screen
from fastjax.chat.voices import BASE, Asked, Voice, Voices
from fastjax.errors import ConfigError, DataError
from fastjax.generation.options import GenerationOptions
from fastjax.strict_yaml import YamlError

#: Options of answers that `/set` changes.
SETTINGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop_strings"),
)
#: Options → what `/set` without a value sets them to, where that is not null.
_NONE: dict[str, Any] = {"stop_strings": (), "logit_bias": {}}
_SEEDS = 2**31


class Command(NamedTuple):
    """A line that begins with a slash.

    Attributes:
        argument: what follows its name, for the help.
        meaning: in a sentence.
        run: takes what follows.
    """

    argument: str
    meaning: str
    run: Callable[[str], None]


class Chat:
    """A conversation with voices, of which one is chosen."""

    def __init__(
        self,
        screen: Screen,
        voices: Voices,
        voice: str,
        options: GenerationOptions,
        *,
        system: str = "",
        seeded: bool = False,
    ):
        """Begin.

        Args:
            screen: that shows it.
            voices: that answer.
            voice: name of the first.
            options: of answers.
            system: the system prompt; "": none.
            seeded: whether the options' seed is meant; else every answer that is drawn has another.
        """
        self._screen, self._voices, self._voice = screen, voices, voices.named(voice)
        self._adapter = None if voice == BASE else voice
        self._options, self._seeded = options, seeded
        self._conversation = Conversation(system)
        self._over = False
        self._commands = {
            "adapter": Command("[NAME or FOLDER]", "let an adapter answer, loading it if need be", self._use_adapter),
            "base": Command("", "let the base answer", self._use_base),
            "compare": Command("[QUESTION]", "let base and adapter answer side by side", self._compare),
            "retry": Command("", "answer the last question again", self._retry),
            "undo": Command("", "take back the last question and its answer", self._undo),
            "clear": Command("", "begin anew", self._clear),
            "system": Command("[TEXT]", "begin anew with a system prompt, or without", self._set_system),
            "set": Command("[NAME VALUE]", "show the settings, or set one", self._set),
            "save": Command("FILE", "append the conversation to a file, as a row of training data", self._save),
            "help": Command("", "this list", self._help),
            "exit": Command("", "leave, as Ctrl-D does", self._exit),
        }

    @property
    def prompt(self) -> str:
        """The text before a question."""
        return f"{self._voice.name}> "

    def run(self, messages: Iterable[str]) -> bool:
        """Take questions and commands until there are no more.

        Args:
            messages: of the user.

        Returns:
            Whether each was answered.
        """
        right = True
        for message in messages:
            try:
                self._take(message)
            except (ConfigError, ConvertError, DataError, OSError) as error:
                self._screen.error(str(error))
                right = False
            except KeyboardInterrupt:  # of a command at work, such as the loading of an adapter
                if not self._screen.asks:
                    raise
                self._screen.note("stopped")
            if self._over:
                break
        return right

    def _take(self, message: str) -> None:
        if not message.startswith("/"):
            self._ask(message)
            return
        name, _, rest = message[1:].partition(" ")
        if name not in self._commands:
            there = listed([f"/{command}" for command in self._commands])
            raise ConfigError(f"expected one of {there}, got /{name}; put a space before a question that begins so")
        self._commands[name].run(rest.strip())

    def _ask(self, question: str | None) -> None:
        [asked] = self._asked_all(question, self._voice)
        self._screen.answer(asked)
        self._conversation.answer(asked.reply.reply())

    def _asked_all(self, question: str | None, *voices: Voice) -> list[Asked]:
        """Begin the answers of voices to a question, or to the last one again.

        If one refuses it the conversation is as it was before, and no voice is left at work.
        """
        before, several = list(self._conversation.turns), []
        try:
            self._conversation.ask(question or self._conversation.take_back())
            for voice in voices:
                several.append(self._asked(voice))
        except (ConfigError, DataError):
            self._conversation.turns = before
            for asked in several:
                asked.cancel()
            raise
        return several

    def _asked(self, voice: Voice) -> Asked:
        options = self._options
        if not self._seeded:
            options = dataclasses.replace(options, seed=random.SystemRandom().randrange(_SEEDS))
        return voice.ask(self._conversation.messages, options)

    def _use_adapter(self, name: str) -> None:
        if not name:
            names = [one for one in self._voices.names if one != BASE]
            self._screen.note(f"adapters: {listed(names) or 'none'}; {self._voice.name} answers")
            return
        if name not in self._voices.names and Path(name).is_dir():
            self._voice = self._voices.load(name)
        else:
            self._voice = self._voices.named(name)
        self._adapter = self._voice.name if self._voice.name != BASE else self._adapter

    def _use_base(self, rest: str) -> None:
        _expect_nothing("base", rest)
        self._voice = self._voices.named(BASE)

    def _compare(self, question: str) -> None:
        if self._adapter is None:
            raise ConfigError("/compare: expected an adapter beside the base, got none; load one: /adapter FOLDER")
        both = self._voices.named(BASE), self._voices.named(self._adapter)
        several = self._asked_all(question, *both)
        self._screen.compare(several)
        chosen = several[self._voice.name != BASE]
        self._conversation.answer(chosen.reply.reply())
        self._screen.note(f"the conversation goes on with the answer of {chosen.voice.name}")

    def _retry(self, rest: str) -> None:
        _expect_nothing("retry", rest)
        if not self._options.temperature:
            self._screen.note("temperature is 0, so that the same comes again: /set temperature 0.8 draws another")
        self._ask(None)

    def _undo(self, rest: str) -> None:
        _expect_nothing("undo", rest)
        self._screen.note(f"taken back: {self._conversation.take_back()}")

    def _clear(self, rest: str) -> None:
        _expect_nothing("clear", rest)
        self._conversation.turns.clear()
        self._screen.note("begun anew")

    def _set_system(self, text: str) -> None:
        self._conversation.turns.clear()
        self._conversation.system = text
        self._screen.note("begun anew " + (f"with the system prompt: {text}" if text else "without a system prompt"))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            self._screen.note("\n".join(f"{each}: {getattr(self._options, each)}" for each in SETTINGS))
            return
        if name not in SETTINGS:
            raise ConfigError(f"/set: expected one of {listed(SETTINGS)}, got {shown(name)}")
        try:
            parsed = strict_yaml.parse(value) if value.strip() else _NONE.get(name)
        except YamlError as error:
            raise ConfigError(f"/set {name}: expected a value, got {shown(value)}: {error.problem}") from error
        if name == "stop_strings":
            parsed = tuple(parsed) if isinstance(parsed, list | tuple) else (parsed,)
        self._options = dataclasses.replace(self._options, **{name: parsed})
        self._seeded = self._seeded or name == "seed"

    def _save(self, file: str) -> None:
        if not file:
            raise ConfigError("/save: expected a file, got none: /save chats.jsonl")
        self._conversation.save(file)
        self._screen.note(f"appended to {file}")

    def _help(self, rest: str) -> None:
        _expect_nothing("help", rest)
        rows = [(f"/{name} {one.argument}".rstrip(), one.meaning) for name, one in self._commands.items()]
        width = max(len(head) for head, _ in rows)
        lines = [f"{head:<{width}}  {meaning}" for head, meaning in rows]
        lines.append(
            'A line that ends with \\ goes on in the next one; """ begins and ends a message of several lines.'
        )
        self._screen.note("\n".join([*lines, "Ctrl-C stops an answer, Ctrl-D leaves."]))

    def _exit(self, rest: str) -> None:
        _expect_nothing("exit", rest)
        self._over = True


def _expect_nothing(name: str, rest: str) -> None:
    if rest:
        raise ConfigError(f"/{name}: expected nothing behind it, got {shown(rest)}")
