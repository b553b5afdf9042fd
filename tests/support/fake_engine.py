"""An engine that says what it is told to, for what stands on one."""

from types import SimpleNamespace

from fastjax.generation import text
from fastjax.generation.choices import Piece
from tests.support import tokenizers as made

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeEngine:
    """Answers request by request, `steps` tokens a piece, with the log-probability -k of the k-th token.

    Attributes:
        asked: (prompt, options) of each request.
        cancelled: (request, choice) that were cancelled.
        wanted: the tokens at a time that the last `run` asked for.
    """

    def __init__(self, says, steps):
        self.says, self.steps, self.asked, self.cancelled, self.wanted, self._going = says, steps, [], [], None, []

    def add(self, prompt, options, adapter=None):
        self.asked.append((list(prompt), options))
        tokens = list(self.says(list(prompt)))
        reason, stop = "length", None
        for place, token in enumerate(tokens[: options.max_new_tokens]):
            if token in options.stop_tokens:
                tokens, reason, stop = tokens[:place], "stop", token
        tokens = tokens[: options.max_new_tokens]
        number = 10 + len(self.asked)
        for choice in range(options.n):
            self._going.append((number, choice, tokens, reason, stop, options.top_logprobs))
        return number

    def cancel(self, request, choice=None):
        self.cancelled.append((request, choice))

    def run(self, steps=None):
        start, self.wanted = 0, steps
        while self._going:
            for one in list(self._going):
                request, choice, tokens, reason, stop, likeliest = one
                if (request, choice) in self.cancelled:
                    self._going.remove(one)
                    yield Piece(request, choice, finish_reason="cancelled")
                    continue
                new = tokens[start : start + self.steps]
                values = [-float(start + place) for place in range(len(new))]
                pairs = [((token, value),) for token, value in zip(new, values, strict=True)] if likeliest else []
                last = start + self.steps >= len(tokens)
                if last:
                    self._going.remove(one)
                ends = (reason, stop) if last else (None, None)
                yield Piece(request, choice, tuple(new), tuple(values), tuple(pairs), *ends)
            start += self.steps


def model(folder=None, template=TEMPLATE, tokenizer=True):
    """A model as far as the text layer looks into it."""
    made_tokenizer = made.byte_level() if tokenizer else None
    if tokenizer:
        made_tokenizer.chat_template = template
        made_tokenizer.pad_token = "[INST]"
    return SimpleNamespace(folder=folder, tokenizer=made_tokenizer, max_seq_length=512, hf_config={})


def install(monkeypatch, says, steps=3):
    """Put a fake engine in place; returns the list of those that were made."""
    engines = []

    def engine_for(model, lengths, new_tokens, adapters=None):
        engines.append(FakeEngine(says, steps))
        return engines[-1]

    monkeypatch.setattr(text, "engine_for", engine_for)
    return engines
