"""A server over a tiny model, in this process, and requests to it."""

import contextlib
import functools
import json
import tempfile
import threading
import time
import types
from pathlib import Path

import httpx

from fastjax.generation import Engine
from fastjax.generation.choices import Piece
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.saving import save_pretrained
from fastjax.serving.server import Server
from fastjax.serving.settings import ServerSettings
from fastjax.serving.worker import Worker
from tests.support import chat, reply_templates, tiny, tokenizers

#: Untied and with large weights: small random models repeat a token for ever.
CONFIG = tiny.config(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=64,
    tie_word_embeddings=False,
    initializer_range=0.3,
    max_position_embeddings=512,
)
ROWS, LENGTH = 8, 256
KEY = "a key of many letters"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@functools.cache
def model():
    """A tiny Llama with a byte tokenizer and a chat template."""
    folder = chat.write_model(Path(tempfile.mkdtemp(prefix="served-")) / "tiny", CONFIG)
    return FastLanguageModel.from_pretrained(folder, dtype="float32", load_in_4bit=False, max_seq_length=LENGTH)[0]


def engine(**settings):
    return Engine(model().value, **{"rows": ROWS, "steps": 4, **settings})


@functools.cache
def adapted(seed):
    """The model with an adapter whose arrays are random."""
    return tiny.adapted(model().value, seed, r=4, lora_alpha=64)


def write_adapters(folder):
    """Folders of two adapters."""
    for seed, name in enumerate(("sums", "Tales"), 1):
        save_pretrained(adapted(seed), folder / name)


def chat_body(text="héllo 👍", **more):
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def text_body(prompt="héllo 👍", **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}


class Scripted:
    """An engine that says a text, some tokens a step, and nothing while it is held.

    Attributes:
        steps: tokens of an answer in a step.
        free: cleared, no step comes to its end.
        broken: the next step fails.
        going: (request, choice) → tokens that are to come, of those that go on.
    """

    rows, max_length, adapter_names, cache = ROWS, 4096, (), (0, 4096)

    def __init__(self, text="", steps=3, form="hermes"):
        self.tokenizer = tokenizers.byte_level()
        special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *reply_templates.SPECIAL]}
        self.tokenizer.add_special_tokens(special)
        self.tokenizer.chat_template = reply_templates.SOURCES[form]
        self.text, self.steps, self.broken = text, steps, False
        self.free = threading.Event()
        self.free.set()
        self.going, self._ended, self._numbers, self._options = {}, [], 0, {}
        self.behind = False

    def model(self):
        config = types.SimpleNamespace(vocab_size=len(self.tokenizer))
        return types.SimpleNamespace(tokenizer=self.tokenizer, folder=None, config=config)

    @property
    def busy(self):
        return bool(self.going or self._ended)

    def add(self, prompt, options, *, adapter=None):
        self._numbers += 1
        for choice in range(options.n):
            ids = self.tokenizer.encode(self.text, add_special_tokens=False)[: options.max_new_tokens]
            self.going[self._numbers, choice] = ids
            self._options[self._numbers] = options
        return self._numbers

    def cancel(self, request, choice=None):
        for key in list(self.going):
            if key[0] == request and choice in (None, key[1]):
                del self.going[key]
                self._ended.append(Piece(*key, finish_reason="cancelled"))

    def begin(self):
        self.behind = True
        return []

    def read(self):
        self.behind = False
        assert self.free.wait(60)
        time.sleep(0.002)  # as a device would take, in which the event loop works
        if self.broken:
            raise RuntimeError("secrets of the machine")
        pieces, self._ended = self._ended, []
        for key, ids in list(self.going.items()):
            options = self._options[key[0]]
            new, self.going[key] = ids[: self.steps], ids[self.steps :]
            reason = None
            if not self.going[key]:
                del self.going[key]
                whole = self.tokenizer.encode(self.text, add_special_tokens=False)
                reason = "length" if len(whole) >= options.max_new_tokens else "stop"
            pieces.append(Piece(*key, tuple(new), (-1.0,) * len(new), finish_reason=reason))
        return pieces


class Served:
    """A running server.

    Attributes:
        url: where it listens.
        client: of HTTP, for it.
    """

    def __init__(self, worker, settings):
        self.worker, self.settings = worker, settings
        self.server = Server(worker, settings)
        self.ended = []
        self._thread = threading.Thread(target=lambda: self.ended.append(self.server.run_to_end()))
        self._thread.start()
        until(lambda: self.server.started)
        self.port = self.server.port
        self.url = f"http://127.0.0.1:{self.port}"
        headers = {} if settings.key is None else {"Authorization": f"Bearer {settings.key}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def post(self, path, body, **headers):
        return self.client.post(path, json=body, headers=headers)

    def ok(self, path, body):
        """The object of an answer with status 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path, body):
        """The objects of a stream, whose end is checked."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            text = response.read().decode()
            assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""] and all(part.startswith("data: ") for part in parts[:-1])
        return [json.loads(part[6:]) for part in parts[:-2]]

    def refused(self, path, body, status=400):
        """The error of a request that is refused, whole and streamed alike; the next one is answered."""
        found = []
        for more in ({}, {"stream": True}):
            response = self.post(path, {**body, **more})
            assert response.status_code == status, response.text
            found.append(response.json()["error"])
            assert set(found[-1]) == {"message", "type", "param", "code"}
        assert found[0] == found[1]
        return found[0]

    def close(self):
        self.client.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def served(one=None, *, queue=64, **settings):
    """A server over an engine, by default of `model`."""
    settings = ServerSettings(name="tiny", port=0, queue=queue, **settings)
    of = one.model() if isinstance(one, Scripted) else model().value
    running = Served(Worker(one or engine(), of, queue=queue), settings)
    try:
        yield running
    finally:
        running.close()


def until(condition, seconds=30):
    """Wait for something."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
