"""The base and its adapters, each with an engine of one row, and answers of theirs while they are generated."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convert.errors import listed, shown
from fastjax.data import Encoder
from fastjax.data.records import Message
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.generation.replies import Delta, ReplyFormat, ReplyParser
from fastjax.generation.replies.growing import GrowingReply
from fastjax.generation.stops import stop_tokens
from fastjax.generation.text import with_ends
from fastjax.language_model.loading import FastLanguageModel, value_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASE = "base"
"""The name of the model without adapter."""


class Voice:
    """A model that answers."""

    def __init__(self, name: str, model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", reading: Reading):
        """Take a model; its cache is set aside with the first question.

        Args:
            name: to call it by.
            model: with or without an adapter.
            tokenizer: with a chat template.
            reading: how prompts are read.

        Raises:
            ConfigError: a tokenizer without chat template.
        """
        encoder = reading.encoder(tokenizer)
        assert encoder is not None, "there is a tokenizer"
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self._encoder: Encoder = encoder
        self._form = ReplyFormat.of(encoder.template)
        self._ends = stop_tokens(model, encoder)
        self._engine: Engine | None = None

    def ask(self, messages: Sequence[Message], options: GenerationOptions) -> "Asked":
        """Begin an answer.

        Args:
            messages: of the conversation.
            options: of the answer, which ends where the model's row does, whatever `max_new_tokens` says.

        Raises:
            ConfigError: a conversation that fills the row.
            DataError: a conversation that the chat template refuses.
        """
        self._engine = self._engine or Engine(self.model, rows=1)
        prompt, longest = self._encoder.encode_prompt(messages), self._engine.max_length
        if len(prompt) >= longest:
            raise ConfigError(
                f"the conversation has {len(prompt):,} tokens, and the model takes {longest:,} with its answer: begin "
                "anew with /clear, take back a question with /undo, or start with a larger --max_seq_length"
            )
        options = dataclasses.replace(options, max_new_tokens=min(options.max_new_tokens, longest - len(prompt)))
        thought = self._form.begins_in_thought(str(self.tokenizer.decode(prompt)))
        parser = ReplyParser(self._form, thought)
        reply = GrowingReply(prompt, self.tokenizer, self._form, parser, options.stop_strings)
        return Asked(self, self._engine, self._engine.add(prompt, with_ends(options, self._ends)), reply)


class Asked:
    """An answer that comes.

    Attributes:
        voice: that answers.
        reply: the answer so far.
    """

    def __init__(self, voice: Voice, engine: Engine, number: int, reply: GrowingReply):
        """Begin the clock."""
        self.voice, self.reply = voice, reply
        self._engine, self._number = engine, number
        self._began, self._first, self._last = time.perf_counter(), None, 0.0
        self._early = 0  # tokens that came with the first one

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.reply.finish_reason is not None

    def step(self) -> list[Delta]:
        """Generate a few tokens; the text that came with them."""
        for piece in self._engine.step():
            if piece.request != self._number or self.done:
                continue
            self.reply.add(piece)
            if self.done and piece.finish_reason is None:
                self._engine.cancel(self._number)
        self._last = time.perf_counter()
        if self._first is None and self.reply.token_ids:
            self._first, self._early = self._last, len(self.reply.token_ids)
        return self.reply.deltas()

    def cancel(self) -> None:
        """End it as it is."""
        self._engine.cancel(self._number)
        while not self.done:
            self.step()

    def status(self) -> str:
        """Its tokens, speed and end, in a line."""
        count, prompt = len(self.reply.token_ids), len(self.reply.prompt_token_ids)
        told = [self.voice.name, f"{count:,} tokens"]
        if self._first is not None:
            if count > self._early and self._last > self._first:
                told.append(f"{(count - self._early) / (self._last - self._first):,.1f} tokens/s")
            told.append(f"first after {self._first - self._began:.2f} s")
        told.append(f"{prompt + count:,} of {self._engine.max_length:,} used")
        ended = {"length": "cut: the limit of tokens is reached", "cancelled": "stopped"}
        reason = self.reply.finish_reason or ""
        return " · ".join([*told, *([ended[reason]] if reason in ended else [])])


class Voices:
    """The base and the adapters that answer, by name."""

    def __init__(self, base: LanguageModel, reading: Reading):
        """Take the base.

        Args:
            base: without adapter.
            reading: how prompts are read.
        """
        self._base, self._reading = base, reading
        self._made: dict[str, Voice] = {}
        if base.tokenizer is not None and base.tokenizer.chat_template:
            self._made[BASE] = Voice(BASE, base, base.tokenizer, reading)

    @property
    def names(self) -> list[str]:
        """The names."""
        return list(self._made)

    def load(self, folder: str, name: str | None = None) -> Voice:
        """Load an adapter.

        Args:
            folder: PEFT's, or a run's.
            name: to call it by; None: the folder's, or its run's.

        Raises:
            ConfigError: an adapter for another model, a name that is taken, or no chat template.
            ConvertError: a broken folder.
        """
        place = Path(folder)
        inner = place / "adapter" if (place / "adapter").is_dir() else place
        name = name or (inner.resolve().parent.name if inner.name == "adapter" else inner.resolve().name)
        if name in self._made:
            raise ConfigError(f"{folder}: expected an adapter by another name than {listed(self.names)}, got {name}")
        model = value_of(FastLanguageModel.load_adapter(self._base, inner))
        tokenizer = model.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ConfigError(
                f"{folder}: expected a tokenizer with a chat template, in it or in the base's folder, got none"
            )
        if BASE not in self._made:  # it reads questions as the adapter does
            self._made[BASE] = Voice(BASE, self._base, tokenizer, self._reading)
        self._made[name] = Voice(name, model, tokenizer, self._reading)
        return self._made[name]

    def named(self, name: str) -> Voice:
        """The voice of a name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._made:
            raise ConfigError(f"expected one of {listed(self.names)}, or the folder of an adapter, got {shown(name)}")
        return self._made[name]
