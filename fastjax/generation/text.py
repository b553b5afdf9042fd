"""Text in, text out: prompts through the chat template, the model and the tokenizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from fastjax.data import Encoder
from fastjax.errors import ConfigError
from fastjax.generation.generate import generate
from fastjax.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def answer(
    model: LanguageModel,
    prompts: Sequence[str],
    *,
    chat: bool = True,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> list[str]:
    """Let the model answer.

    Args:
        model: with a tokenizer.
        prompts: what the user says, one conversation each; with `chat=False` the beginning of a text.
        chat: put the prompt through the chat template, exactly as training does.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 takes the likeliest token.
        top_k: sample among so many.
        top_p: sample among the likeliest tokens of this probability together.
        seed: of the sampling.
        batch_size: prompts that go through the model together.

    Returns:
        The answers, without special tokens, in the order of the prompts.

    Raises:
        ConfigError: a model without tokenizer, a tokenizer without chat template, a setting out of range.
    """
    if model.tokenizer is None:
        raise ConfigError("answer: expected a model with a tokenizer, given one without; load it from a folder")
    tokenizer = cast("PreTrainedTokenizerFast", model.tokenizer)
    encoder = Encoder(tokenizer)
    if chat:
        encoded = [encoder.encode_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    else:
        encoded = [encoder.encode_beginning(prompt) for prompt in prompts]
    stops = encoder.stop_tokens()
    answers: list[list[int]] = []
    for start in range(0, len(encoded), batch_size):
        answers += generate(
            model,
            encoded[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + start,
            stop_tokens=stops,
        )
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in answers]
