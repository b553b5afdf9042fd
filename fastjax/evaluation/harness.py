"""A model for lm-evaluation-harness (`pip install lm-eval`; Gao et al., doi 10.5281/zenodo.5371628).

import lm_eval
from fastjax.evaluation.harness import HarnessModel

results = lm_eval.simple_evaluate(HarnessModel(model), tasks=["arc_easy"])
"""

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)
from tqdm import tqdm

from fastjax.data import Encoder
from fastjax.errors import ConfigError
from fastjax.evaluation.run import encoded_pair
from fastjax.evaluation.scoring import completion_scores
from fastjax.execution.language_model import LanguageModel
from fastjax.generation.options import GenerationOptions
from fastjax.generation.text import answers_as_completed

_LOG = logging.getLogger(__name__)
#: Names that tasks give the longest answer, and the other keys of a generation.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OTHERS = ("until", "do_sample", "temperature", *_FILTERS, *_PENALTIES, "seed", *_LENGTHS)


class HarnessModel(LM):
    """A model as the harness asks it: likelihoods of continuations, of whole texts, and answers.

    Prompts longer than the model's rows lose their beginning, as with the harness's own models, and a line says so.
    """

    def __init__(self, model: LanguageModel, *, batch_size: int = 32, max_new_tokens: int = 256, seed: int = 0):
        """Take a model.

        Args:
            model: with or without an adapter; with a tokenizer.
            batch_size: rows of packed continuations that go through it together.
            max_new_tokens: longest answer, where a task names none.
            seed: of the sampling, where a task samples and names none; each request draws its own numbers.

        Raises:
            ConfigError: a model without tokenizer.
        """
        super().__init__()
        if model.tokenizer is None:
            raise ConfigError("HarnessModel: expected a model with a tokenizer, got one without; load it from a folder")
        self.model, self.batch_size, self.max_new_tokens, self.seed = model, batch_size, max_new_tokens, seed
        self.encoder = Encoder(model.tokenizer)  # pyright: ignore[reportArgumentType]
        bos = model.tokenizer.bos_token_id
        self._first = int(model.tokenizer.eos_token_id if bos is None else bos)  # pyright: ignore[reportArgumentType]

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's folder or name."""
        return str(self.encoder.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template."""
        return str(self.encoder.tokenizer.chat_template or "") if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        template = self.encoder.template
        return template.render(chat_history, "the conversation", add_generation_prompt=add_generation_prompt).text

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether each is what greedy decoding says."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            kept = context.rstrip()
            if kept:  # white space belongs to the word behind it
                pairs.append(encoded_pair(self.encoder, kept, context[len(kept) :] + continuation))
            else:
                pairs.append(([self._first], self._tokens(context + continuation)))
        return self._scored(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's rows that predict each token once."""
        pairs, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self._tokens(text), self._first, self.model.max_seq_length, 1)
            disjoint = [make_disjoint_window(window) for window in windows]
            pairs += disjoint
            counts.append(len(disjoint))
        scores = iter(self._scored(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first of the texts that end them, all of one engine."""
        options = [self._options(request.args[1]) for request in requests]
        prompts = [
            self._cut(self.encoder.encode_beginning(request.args[0]) or [self._first], each.max_new_tokens)
            for request, each in zip(requests, options, strict=True)
        ]
        completed = answers_as_completed(self.model, prompts, options)
        shown = tqdm(completed, total=len(requests), disable=disable_tqdm, desc="generate_until")
        found = {place: one.text for place, [one] in shown}
        return [found[place] for place in range(len(requests))]

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self.encoder.tokenizer.encode(text, add_special_tokens=False)]

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        most = self.model.max_seq_length
        kept = [(self._cut(prompt, len(completion) - 1), completion[-most:]) for prompt, completion in pairs]
        return [(score.log_prob, score.greedy) for score in completion_scores(self.model, kept, rows=self.batch_size)]

    def _cut(self, prompt: list[int], beside: int) -> list[int]:
        """A prompt that leaves room for so many tokens, without its beginning if need be."""
        room = max(1, self.model.max_seq_length - beside)
        if len(prompt) > room:
            _LOG.warning("a prompt of %d tokens is cut to its last %d (max_seq_length)", len(prompt), room)
        return prompt[-room:]

    def _options(self, given: dict[str, Any]) -> GenerationOptions:
        """The settings of a generation."""
        unknown = sorted(set(given) - set(_OTHERS))
        if unknown:
            raise ConfigError(f"generation_kwargs: expected some of {', '.join(_OTHERS)}, got {unknown[0]}")
        said = {name: value for name, value in given.items() if value is not None}
        options = {name: said[name] for name in (*_FILTERS, *_PENALTIES) if name in said} | {
            "max_new_tokens": next((int(said[name]) for name in _LENGTHS if name in said), self.max_new_tokens),
            "temperature": float(said.get("temperature", 1.0 if said.get("do_sample") else 0.0)),
            "seed": said.get("seed", self.seed),
            "stop_strings": _until(given),
        }
        if said.get("do_sample") is False:
            options["temperature"] = 0.0
        return GenerationOptions(**options)


def _until(given: dict[str, Any]) -> tuple[str, ...]:
    until = given.get("until") or []
    return tuple(dict.fromkeys(end for end in ([until] if isinstance(until, str) else until) if end))
