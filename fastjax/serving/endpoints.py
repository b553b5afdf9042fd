"""The routes that answer: a body is read, its prompts go to the worker, and the answers are told whole or as events."""

import asyncio
import concurrent.futures
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from fastjax.errors import ConfigError, DataError
from fastjax.serving import fields
from fastjax.serving.answers import Answers
from fastjax.serving.chat import ChatForm
from fastjax.serving.completions import CompletionForm
from fastjax.serving.errors import FAILED, ApiError
from fastjax.serving.events import EventStream, unless_gone
from fastjax.serving.model import Models, ServedModel
from fastjax.serving.requests import Reader, Request
from fastjax.serving.settings import ServerSettings
from fastjax.serving.worker import Closing, EngineFailed, QueueFull, Ticket, Worker

_LOG = logging.getLogger("fastjax.serving")

T = TypeVar("T")
Form = ChatForm | CompletionForm


class Endpoints:
    """The handlers of the routes."""

    def __init__(self, worker: Worker, models: Models, settings: ServerSettings):
        """Begin.

        Args:
            worker: that answers.
            models: that may be asked for.
            settings: of the server.
        """
        self._worker, self._models, self._settings = worker, models, settings
        self._reader = Reader(models, settings, worker.max_length)
        self._aside = concurrent.futures.ThreadPoolExecutor(1, "prompts")

    def close(self) -> None:
        """End the thread that reads prompts."""
        self._aside.shutdown(cancel_futures=True)

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._answered(http, self._reader.chat, ChatForm)

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions."""
        return await self._answered(http, self._reader.completion, CompletionForm)

    async def models(self, http: HttpRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._models.names]})

    async def model(self, http: HttpRequest) -> Response:
        """GET /v1/models/NAME."""
        name = http.path_params["name"]
        self._reader.asked({"model": name})
        return JSONResponse(self._model(name))

    async def tokenize(self, http: HttpRequest) -> Response:
        """POST /tokenize: the tokens that the same prompt or conversation has as a request."""
        found = fields.read(await self._read(fields.parse, await http.body()), fields.TOKENIZE)
        model, _ = self._reader.asked(found)
        if ("prompt" in found) == ("messages" in found):
            raise ApiError(400, "prompt: expected either prompt or messages, got both or none", param="prompt")
        if "messages" in found:
            ids = await self._read(self._reader.conversation, found, model)
        elif isinstance(found["prompt"], str):
            [ids] = await self._read(self._reader.prompts, found, model)
        else:
            raise ApiError(400, "prompt: expected a text", param="prompt")
        return await self._read(self._tokens, ids, model)

    def _tokens(self, ids: Sequence[int], model: ServedModel) -> Response:
        told = {"count": len(ids), "max_model_len": self._reader.max_length, "tokens": ids}
        return JSONResponse(told | {"token_strs": [model.tokens.text(token) for token in ids]})

    def _model(self, name: str) -> dict[str, Any]:
        base = None if name == self._models.base else self._models.base
        about = {"parent": base, "root": name, "max_model_len": self._reader.max_length}
        return {"id": name, "object": "model", "created": 0, "owned_by": "fastjax", **about}

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Read a body or a prompt, which may be long, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, function, *arguments)

    async def _answered(self, http: HttpRequest, read: Callable[..., Request], form: type[Form]) -> Response:
        body = await self._read(fields.parse, await http.body())
        request = await self._read(read, body)
        ticket = self._submitted(request)
        answers = Answers(request)
        told = form(answers)
        if not request.stream:
            response = await unless_gone(http.receive, self._whole(ticket, answers, told))
            return response or Response(status_code=499)
        accepted = await unless_gone(http.receive, self._accepted(ticket))
        if accepted is None:
            return Response(status_code=499)
        return EventStream(self._events(ticket, answers, told, request), ticket.cancel)

    def _submitted(self, request: Request) -> Ticket:
        try:
            return self._worker.submit(request.wanted)
        except QueueFull:
            message = "the queue is full: as many answers as the server takes are waited for; ask again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None

    async def _accepted(self, ticket: Ticket) -> bool:
        try:
            await ticket.accepted()
            return True
        except EngineFailed:
            raise Closing from None
        except ConfigError as error:
            if str(error).startswith("adapter:"):  # it was dropped since the request was read
                raise ApiError(404, f"model: {error}", param="model", code="model_not_found") from None
            raise
        except asyncio.CancelledError:
            ticket.cancel()
            raise

    async def _whole(self, ticket: Ticket, answers: Answers, form: Form) -> Response:
        await self._accepted(ticket)
        try:
            async with asyncio.timeout(self._settings.request_seconds):
                async for _ in answers.grown(ticket):
                    pass
        except TimeoutError:
            raise self._late() from None
        except EngineFailed:
            raise ApiError(500, FAILED) from None
        finally:
            ticket.cancel()
        return JSONResponse(form.whole())

    async def _events(self, ticket: Ticket, answers: Answers, form: Form, request: Request) -> AsyncGenerator[bytes]:
        """The events of a stream, with an error as the last one but [DONE] if the answer fails."""
        growing, late = answers.grown(ticket), asyncio.get_running_loop().time() + self._settings.request_seconds
        try:
            yield b"".join(map(_event, form.begin()))
            while True:
                async with asyncio.timeout_at(late):
                    growth = await anext(growing, None)
                if growth is None:
                    break
                if events := form.grow(growth):
                    yield b"".join(map(_event, events))
            if request.usage:
                yield _event(form.usage())
        except TimeoutError:
            yield _event(self._late().body())
        except Exception as error:
            if not isinstance(error, EngineFailed):
                _LOG.exception("a stream has failed")
            yield _event(ApiError(500, FAILED).body())
        yield b"data: [DONE]\n\n"

    def _late(self) -> ApiError:
        seconds = self._settings.request_seconds
        return ApiError(504, f"the answer has taken longer than {seconds:g} s; ask for fewer tokens", code="timeout")


async def refused(http: HttpRequest, error: Exception) -> Response:
    """The response to a request that a handler refuses.

    Args:
        http: the request.
        error: what was raised.
    """
    if isinstance(error, ConfigError | DataError):
        error = ApiError.of(error)
    elif isinstance(error, Closing):
        message = "the server is about to end, and takes no more requests"
        error = ApiError(503, message, headers={"Retry-After": "10"})
    assert isinstance(error, ApiError)
    return error.response()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
