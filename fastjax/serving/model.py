"""The models that a server has by name, and what it knows of each: encoders, ends, defaults of sampling."""

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from convert.errors import shown
from convert.generation_config import generation_settings
from fastjax.data import Encoder
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.options import GenerationOptions
from fastjax.generation.prompts import Reading
from fastjax.generation.replies import ReplyFormat
from fastjax.generation.stops import stop_tokens
from fastjax.serving.errors import ApiError
from fastjax.serving.settings import ServerSettings
from fastjax.serving.tokens import TokenNames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Settings of a folder's generation_config.json that hold where a request does not say them.
_OF_FOLDER = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ServedModel:
    """A model's or an adapter's tokenizer, chat template and defaults; it holds no weights.

    Attributes:
        tokenizer: its tokenizer.
        tokens: the texts of its tokens.
        vocabulary: number of the model's tokens.
        longest_token: characters of its longest token.
        defaults: sampling where a request does not say it: the folder's generation_config.json's, and temperature 1,
            as OpenAI's, where that says nothing; 0 where it says `do_sample: false`.
        ends: the tokens that end an answer.
        replies: how its answers say thoughts and calls.
    """

    def __init__(self, model: LanguageModel, settings: ServerSettings):
        """Read defaults and ends.

        Args:
            model: with a tokenizer.
            settings: of the server.

        Raises:
            ConfigError: a model without tokenizer, or one whose tokenizer cannot encode prompts.
            ConvertError: a generation_config.json that cannot be read.
        """
        if model.tokenizer is None:
            raise ConfigError("serve: expected a model with a tokenizer, got one without; load it from a folder")
        self.tokenizer = cast("PreTrainedTokenizerBase", model.tokenizer)
        self.tokens, self.vocabulary = TokenNames(self.tokenizer), model.config.vocab_size
        self.longest_token = max(map(len, self.tokenizer.get_vocab()))
        folder = {} if model.folder is None else generation_settings(model.folder)
        self.defaults: dict[str, Any] = {"temperature": 1.0}
        self.defaults |= {name: folder[name] for name in _OF_FOLDER if folder.get(name) is not None}
        if folder.get("do_sample") is False:
            self.defaults["temperature"] = 0.0
        plain = cast(Encoder, Reading(special_tokens=settings.special_tokens).encoder(self.tokenizer))
        self._encoder = functools.lru_cache(maxsize=16)(lambda text: plain.with_variables(json.loads(text)))
        self.ends = stop_tokens(model, self.encoder())
        self.replies = ReplyFormat.of(self.encoder())

    def encoder(self, variables: Mapping[str, Any] | None = None) -> Encoder:
        """The encoder of prompts.

        Args:
            variables: of the chat template.

        Raises:
            DataError: variables that are none.
        """
        return self._encoder(json.dumps(variables or {}, sort_keys=True))

    def options(
        self, sampling: Mapping[str, Any], new: int, *, stop_tokens: Sequence[int] = (), ignore_eos: bool = False
    ) -> GenerationOptions:
        """Options of an answer.

        Args:
            sampling: fields that a request says.
            new: the most tokens.
            stop_tokens: that end it beside the model's.
            ignore_eos: leave the model's out.

        Raises:
            ConfigError: names a field that is out of its range.
        """
        fields: dict[str, Any] = self.defaults | {"seed": secrets.randbits(31)} | dict(sampling)
        ends = tuple(dict.fromkeys([*(() if ignore_eos else self.ends), *stop_tokens]))
        return GenerationOptions(**fields, max_new_tokens=new, stop_tokens=ends)


class Models:
    """The models that may be asked for.

    Attributes:
        base: the name of the one without a named adapter.
    """

    def __init__(self, base: str, model: ServedModel):
        """Begin with one.

        Args:
            base: its name.
            model: it.
        """
        self.base = base
        self._known = {base: model}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the base's first."""
        return tuple(self._known)

    def __getitem__(self, name: Any) -> ServedModel:
        """A model by its name; an ApiError of 404 where there is none, since no other is to answer in its place."""
        known = self._known.get(name) if isinstance(name, str) else None
        if known is None:
            message = f"model: expected one of {', '.join(self._known)}, got {shown(name, 80)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return known

    def adapter(self, name: str) -> str | None:
        """The adapter of a name; None: the base.

        Args:
            name: of a model.
        """
        return None if name == self.base else name

    def add(self, name: str, model: ServedModel) -> None:
        """Let an adapter be asked for.

        Args:
            name: that no other has.
            model: it.
        """
        self._known[name] = model

    def remove(self, name: str) -> None:
        """Let an adapter not be asked for.

        Args:
            name: of one that may be.
        """
        del self._known[name]
