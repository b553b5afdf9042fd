"""A server whose answers are known, for the page: the API's routes that it talks to, and the page itself."""

import asyncio
import contextlib
import json
import math
import re
import threading
import types

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from fastjax.serving import page

BASE, ADAPTER, HOSTILE_NAME = "base", "tone", "<img src=x onerror=alert(1)>"
THOUGHT = "They ask about rates; be brief."
TEXTS = {
    BASE: "A learning rate decides how far each step goes.\n\nBegin with 2e-4: naïve 🙂 done.",
    ADAPTER: "Think of it as a stride: long ones are fast, short ones are safe.",
}
HOSTILE = (
    "<script>window.broken=1</script> <img src=x onerror=window.broken=1> [x](javascript:window.broken=1) "
    "![](https://evil.example/?q=1) <b>bold</b> &amp; </div>"
)
KEY = "a-key"


def words(text):
    return re.findall(r"\s*\S+", text)


def probability(index):
    """The probability of the word at a place of an answer."""
    return (0.9, 0.6, 0.3, 0.1, 0.02)[index % 5]


def told(word, index):
    """A word as a token, with two alternatives."""
    others = {word: probability(index), " instead": (1 - probability(index)) / 2, "": (1 - probability(index)) / 4}
    ordered = sorted(others.items(), key=lambda item: -item[1])
    token = {"token": word, "logprob": math.log(probability(index)), "bytes": list(word.encode())}
    tops = [{"token": text, "logprob": math.log(value), "bytes": list(text.encode())} for text, value in ordered]
    return {**token, "top_logprobs": tops}


def tokens(word, index):
    """The tokens of a word; an emoji is two, neither of which is a character."""
    if "🙂" not in word:
        return [told(word, index)]
    token, data = told(word, index), list(word.encode())
    return [{**token, "token": "\ufffd", "bytes": part} for part in (data[:3], data[3:])]


class Script:
    """The routes, and what they were asked.

    Attributes:
        bodies: of the requests for an answer.
        paths: of all requests, with their queries.
        key: that is asked for; None: none.
        ended: how each stream ended: "whole" or "left", by the client.
    """

    def __init__(self, run=None, key=None):
        self.bodies, self.paths, self.ended, self.key = [], [], [], key
        routes = [
            *page.routes(types.SimpleNamespace(run=run)),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        self.app.add_middleware(Watched, script=self)

    async def models(self, request):
        names = (BASE, ADAPTER, HOSTILE_NAME)
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        said = next(one["content"] for one in reversed(body["messages"]) if one["role"] == "user")
        if "refuse" in said:
            return refused(400, "temperature: expected 0 to 2, got <b>3</b>")
        if "busy" in said:
            return refused(429, "The queue is full.", {"Retry-After": "7"})
        return StreamingResponse(self.events(body, said), media_type="text/event-stream")

    async def events(self, body, said):
        text = HOSTILE if "hostile" in said else TEXTS.get(body["model"], HOSTILE)
        limited = "limit" in said and not body.get("continue_final_message")
        text = text[: text.index(" each")] if limited else text
        if body.get("continue_final_message"):
            text = text.removeprefix(body["messages"][-1]["content"])
        repeated, pause = (200, 0.02) if "long" in said else (1, 0.005)
        end = "left"
        try:
            yield event({"role": "assistant", "content": ""})
            for index, word in enumerate(words(THOUGHT) if "think" in said else []):
                yield event({"reasoning_content": word}, tokens(word, index))
            for index, word in enumerate(words(text) * repeated):
                if "fail" in said and index == 3:
                    yield 'data: {"error": {"message": "The engine failed.", "type": "server_error"}}\n\n'
                    return
                if "drop" in said and index == 3:
                    return
                if "break" in said and index == 3:
                    raise RuntimeError("the connection is cut")
                yield event({"content": word}, None if "plain" in said else tokens(word, index))
                await asyncio.sleep(pause)
            if "call" in said:
                for part in ({"name": "weather", "arguments": '{"city":'}, {"arguments": ' "Bern"}'}):
                    yield event({"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": part}]})
            yield event({}, [told("<|end|>", 0)], "length" if limited else "stop")
            yield data({"choices": [], "usage": {"completion_tokens": len(words(text)) + 1}})
            yield "data: [DONE]\n\n"
            end = "whole"
        finally:
            self.ended.append(end)


def event(delta, logprobs=None, finish=None):
    told = None if logprobs is None else {"content": logprobs}
    return data({"choices": [{"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish}]})


def data(value):
    return f"data: {json.dumps(value)}\n\n"


def refused(status, message, headers=None):
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status, headers)


class Watched:
    """Notes each path, and refuses a request without the key, but for the page's own files."""

    def __init__(self, app, script):
        self.app, self.script = app, script

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            key, headers = self.script.key, dict(scope["headers"])
            self.script.paths.append(scope["path"] + ("?" if scope["query_string"] else ""))
            if (
                key
                and scope["path"] not in page.OPEN_PATHS
                and headers.get(b"authorization") != f"Bearer {key}".encode()
            ):
                return await refused(401, "the key")(scope, receive, send)
        await self.app(scope, receive, send)


@contextlib.contextmanager
def listening(app):
    """An app on a free port of this machine; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
