"""Requests read: which model, which prompts, which options, and how the answers are to be told."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from convert.errors import shown
from fastjax.data.columns import check_options, parse_messages
from fastjax.errors import ConfigError, DataError
from fastjax.generation.detokenizer import Detokenizer
from fastjax.generation.options import GenerationOptions
from fastjax.serving import fields
from fastjax.serving.errors import ApiError
from fastjax.serving.model import Models, ServedModel
from fastjax.serving.settings import ServerSettings
from fastjax.serving.worker import Wanted

#: New tokens of a completion where nobody says how many, as OpenAI's.
_COMPLETION = 16


class Echo(NamedTuple):
    """A prompt as the beginning of its answers.

    Attributes:
        text: of it, without special tokens.
        offsets: place of each token in it, in characters.
    """

    text: str
    offsets: list[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for answers.

    Attributes:
        name: of the model that was asked for.
        model: it.
        wanted: its prompts with their options.
        stream: the answers come as events.
        usage: a stream's last event tells the tokens.
        log_probs: whether they are told.
        token_ids: whether they are told.
        echo: each prompt's text and its tokens' places in it, which its answers begin with; None: they do not.
        chat: thoughts and calls are told apart.
        tools: the functions that may be called.
        in_thought: the prompt ends within a thought.
    """

    name: str
    model: ServedModel
    wanted: Sequence[Wanted]
    stream: bool = False
    usage: bool = False
    log_probs: bool = False
    token_ids: bool = False
    echo: Sequence[Echo] | None = None
    chat: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    in_thought: bool = False


class Reader:
    """Reads the bodies of requests.

    A prompt's text may be long, and so is the reading of it: it is called beside the event loop.
    """

    def __init__(self, models: Models, settings: ServerSettings, max_length: int):
        """Begin.

        Args:
            models: that may be asked for.
            settings: of the server.
            max_length: the most tokens of a prompt with its answer.
        """
        self._models, self._settings, self.max_length = models, settings, max_length

    def chat(self, body: Mapping[str, Any]) -> Request:
        """A request of /v1/chat/completions.

        Args:
            body: its object.

        Raises:
            ApiError, ConfigError, DataError: a field that does not fit.
        """
        found = fields.read(body, fields.CHAT)
        model, adapter = self.asked(found)
        new = _same(found, "max_tokens", "max_completion_tokens")
        if new == 0:
            raise ApiError(400, "max_tokens: expected at least 1, got 0", param="max_tokens")
        if "top_logprobs" in found and not found.get("logprobs"):
            raise ApiError(400, "top_logprobs: expected logprobs: true beside it, got none", param="top_logprobs")
        tools, prompt = _tools(found), self.conversation(found, model)
        if tools and not model.replies.takes_tools:
            message = "tools: expected none, since the model's chat template writes no calls that can be read"
            raise ApiError(400, message, param="tools")
        told = found.get("top_logprobs") if found.get("logprobs") else None
        wanted = [Wanted(prompt, self._options(found, model, prompt, new, told, "messages"), adapter)]
        text = model.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        in_thought = model.replies.begins_in_thought(cast(str, text))
        how = {"chat": True, "tools": tools or (), "in_thought": in_thought}
        return self._request(found, model, wanted, log_probs=bool(found.get("logprobs")), **how)

    def completion(self, body: Mapping[str, Any]) -> Request:
        """A request of /v1/completions.

        Args:
            body: its object.

        Raises:
            ApiError, ConfigError, DataError: a field that does not fit.
        """
        found = fields.read(body, fields.COMPLETION)
        model, adapter = self.asked(found)
        prompts = self.prompts(found, model)
        new, told = found.get("max_tokens", _COMPLETION), found.get("logprobs")
        echo = [_echo(model, prompt) for prompt in prompts] if found.get("echo") else None
        if new == 0 and echo is None:
            raise ApiError(400, "max_tokens: expected at least 1, got 0; 0 goes with echo: true", param="max_tokens")
        options = [self._options(found, model, prompt, new, told, "prompt") for prompt in prompts]
        if echo is not None and told is not None:
            options = [dataclasses.replace(each, prompt_logprobs=told) for each in options]
        wanted = [Wanted(prompt, each, adapter) for prompt, each in zip(prompts, options, strict=True)]
        return self._request(found, model, wanted, log_probs=told is not None, echo=echo)

    def asked(self, found: Mapping[str, Any]) -> tuple[ServedModel, str | None]:
        """The model that is asked for, and its adapter; None: the model itself, also where none is named.

        Args:
            found: the request's fields.

        Raises:
            ApiError: no such model, 404.
        """
        name = found.get("model", self._models.base)
        return self._models[name], self._models.adapter(name)

    def conversation(self, found: Mapping[str, Any], model: ServedModel) -> list[int]:
        """The tokens of a conversation.

        Args:
            found: the request's fields.
            model: that is asked.

        Raises:
            ApiError, ConfigError, DataError: messages that are none, or that the chat template refuses.
        """
        if not found.get("messages"):
            raise ApiError(400, "messages: expected at least one message, got none", param="messages")
        continued = found.get("continue_final_message", False)
        if found.get("add_generation_prompt", not continued) == continued:
            message = "add_generation_prompt: expected the contrary of continue_final_message, got the same"
            raise ApiError(400, message, param="add_generation_prompt")
        variables = check_options(found.get("chat_template_kwargs", {}), "chat_template_kwargs")
        if "chat_template" in variables:
            message = "chat_template_kwargs: expected variables of the model's template, got another chat_template"
            raise ApiError(400, message, param="chat_template_kwargs")
        effort = found.get("reasoning_effort")
        if effort is not None:
            if "reasoning_effort" not in model.encoder().template.reads:
                message = "reasoning_effort: expected none, since the model's chat template has no such variable"
                raise ApiError(400, message, param="reasoning_effort")
            variables["reasoning_effort"] = effort
        encoder = model.encoder(variables)
        tools = _tools(found)
        self._check_characters(model, (found["messages"], tools), "messages")
        messages = parse_messages(found["messages"], "messages")
        try:
            return encoder.encode_prompt(messages, tools, continue_final_message=continued)
        except DataError as error:
            message = str(error).removeprefix("the prompt: ")
            raise ApiError(400, f"messages: {message}", param="messages") from error

    def prompts(self, found: Mapping[str, Any], model: ServedModel) -> list[list[int]]:
        """The tokens of the prompts of a completion: a text, texts, token ids, or lists of them.

        Args:
            found: the request's fields.
            model: that is asked.

        Raises:
            ApiError: anything else.
        """
        prompt = found.get("prompt")
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)):
            prompt, one = [prompt], True
        else:
            one = False
        if not isinstance(prompt, list) or not prompt:
            message = f"prompt: expected a text, a list of texts, token ids or lists of them, got {shown(prompt, 60)}"
            raise ApiError(400, message, param="prompt")
        if len(prompt) * found.get("n", 1) > self._settings.answers if isinstance(found.get("n", 1), int) else False:
            raise self._too_many(len(prompt) * found.get("n", 1))
        for each in prompt:
            self._check_characters(model, each if isinstance(each, str) else "", "prompt")
        return [_tokens(model, each, "prompt" if one else f"prompt[{place}]") for place, each in enumerate(prompt)]

    def _check_characters(self, model: ServedModel, prompt: Any, where: str) -> None:
        """Refuse what cannot fit, however its characters become tokens, before that takes seconds."""
        count = _characters(prompt)
        if count > self.max_length * model.longest_token:
            problem = f"expected prompt and answer of at most {self.max_length} tokens together, got {count} characters"
            message = f"{where}: {problem}, which are more; shorten the prompt"
            raise ApiError(400, message, param=where, code="context_length_exceeded")

    def _options(
        self,
        found: Mapping[str, Any],
        model: ServedModel,
        prompt: Sequence[int],
        new: int | None,
        told: int | None,
        where: str,
    ) -> GenerationOptions:
        """Options of the answers to a prompt, whose length is known to fit."""
        room = self.max_length - len(prompt)
        if room < max(1 if new is None else new, 0):
            asked = "an answer" if new is None else f"max_tokens {new}"
            raise ApiError(
                400,
                f"{where}: expected prompt and answer of at most {self.max_length} tokens together, got a prompt of "
                f"{len(prompt)} tokens and {asked}; shorten the prompt or ask for fewer tokens",
                param=where,
                code="context_length_exceeded",
            )
        sampling = fields.sampling(found)
        ends = found.get("stop_token_ids", [])
        ignored = found.get("ignore_eos", False)
        scored = {"prompt_logprobs": 0} if new == 0 else {}  # no token is asked for
        sampling |= {"top_logprobs": told, **scored}
        options = model.options(sampling, room if new is None else new, stop_tokens=ends, ignore_eos=ignored)
        if options.n > self._settings.answers:
            raise self._too_many(options.n)
        return options.checked(model.vocabulary)

    def _request(self, found: Mapping[str, Any], model: ServedModel, wanted: Sequence[Wanted], **told: Any) -> Request:
        options = found.get("stream_options", {})
        if options and not found.get("stream"):
            raise ApiError(400, "stream_options: expected stream: true beside it, got none", param="stream_options")
        for name, value in options.items():
            if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool | None):
                message = f"stream_options: expected include_usage, true or false, got {shown(options, 60)}"
                raise ApiError(400, message, param="stream_options")
        return Request(
            found.get("model", self._models.base),
            model,
            wanted,
            stream=found.get("stream", False),
            usage=bool(options.get("include_usage")),
            token_ids=found.get("return_token_ids", False),
            **told,
        )

    def _too_many(self, count: int) -> ApiError:
        most = self._settings.answers
        return ApiError(400, f"n: expected at most {most} answers over all prompts, got {shown(count)}", param="n")


def _tokens(model: ServedModel, prompt: Any, where: str) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = model.encoder().encode_beginning(prompt)
        except DataError as error:
            message = str(error).removeprefix("the prompt: ")
            raise ApiError(400, f"{where}: {message}", param="prompt") from error
        if not ids:
            raise ApiError(400, f"{where}: expected at least one token, got an empty text", param="prompt")
        return ids
    vocabulary = model.vocabulary
    if not isinstance(prompt, list) or not prompt:
        message = f"{where}: expected a text or token ids, got {shown(prompt, 60)}"
        raise ApiError(400, message, param="prompt")
    for place, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < vocabulary:
            message = f"{where}[{place}]: expected a token id from 0 to {vocabulary - 1}, got {shown(token, 60)}"
            raise ApiError(400, message, param="prompt")
    return prompt


def _characters(value: Any) -> int:
    """Characters of the texts within a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _characters(each) for key, each in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def _echo(model: ServedModel, prompt: Sequence[int]) -> Echo:
    text = Detokenizer(model.tokenizer)
    whole = text.add(prompt) + text.finish()
    return Echo(whole, text.offsets(slice(0, len(prompt))))


def _same(found: Mapping[str, Any], *names: str) -> Any:
    """The value of a field with two names."""
    given = {name: found[name] for name in names if name in found}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ApiError(400, f"{names[0]}: expected equal values of both names, got {said}", param=names[0])
    return next(iter(given.values()), None)


def _tools(found: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The functions that may be called: those of `tools`, unless `tool_choice` is none.

    Raises:
        ConfigError: tools that are none, or a choice that is not served.
    """
    tools, choice = found.get("tools"), found.get("tool_choice", "auto")
    for place, tool in enumerate(tools or []):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ConfigError(f"tools[{place}]: expected a function with a name, got {shown(tool, 60)}")
    if choice not in ("auto", "none"):
        problem = f"expected auto or none, got {shown(choice, 60)}: a call cannot be forced"
        raise ConfigError(f"tool_choice: {problem}; leave it out, and ask for the call in a message")
    if choice == "auto" and "tool_choice" in found and not tools:
        raise ConfigError("tool_choice: expected tools beside it, got none")
    return tools if tools and choice == "auto" else None
