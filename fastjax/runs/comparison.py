"""The logits of two models on the same texts: the effect of a conversion on a model's answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float
from transformers import PreTrainedTokenizerFast

from convert.formats import Format
from convert.quantization_aware import QuantizationAware
from fastjax.data.encoding import Encoder
from fastjax.errors import ConfigError
from fastjax.execution.language_model import check_logits
from fastjax.execution.opening import OpenModel, open_pretrained
from fastjax.execution.options import LoadOptions
from fastjax.language_model import LanguageModel
from fastjax.language_model.loading import load_pretrained
from fastjax.language_model.logits import logits
from fastjax.language_model.variants import with_fake_quantization


class LogitDifference(NamedTuple):
    """Difference of two models' logits, over all tokens of all texts.

    Attributes:
        tokens: their number.
        largest: difference of two logits.
        scale: largest magnitude of the first model's logits.
        divergence: mean of KL(first ‖ second) of the distributions of the next token, in nats.
        agreement: share of the tokens after which both have the same likeliest one.
        rounding: of the second model's formats of 4 or 8 bits (`convert.formats.Format.rounding`), the largest; 0 where
            the first model's matrices have been rounded to the same values.
    """

    tokens: int
    largest: float
    scale: float
    divergence: float
    agreement: float
    rounding: float


def compare_logits(
    first: str | Path,
    second: str | Path,
    texts: Sequence[str],
    *,
    adapter: str | Path | None = None,
    base_in_nf4: bool = False,
) -> LogitDifference:
    """Compare the logits of two model folders, in float32, one model in memory at a time.

    Where the second has 4 or 8 bits, a first one that was trained for a quantisation has its matrices as they were
    trained. Inputs of products are quantised on neither side: a folder tells servers to.

    Args:
        first: model folder; its tokenizer reads the texts (the adapter's, if it has one).
        second: model folder.
        texts: texts, each of which is cut after 2,048 tokens.
        adapter: put on the first model.
        base_in_nf4: the first model's matrices are quantised to NF4 before.

    Raises:
        ConfigError: no text, a model without tokenizer, or vocabularies of different sizes.
        ConvertError: what is wrong with a folder.
    """
    if not texts:
        raise ConfigError("texts: expected at least one, got none")
    plain = LoadOptions.for_inference(dtype="float32", allow_nonfinite=True)  # differences show NaN
    options = LoadOptions.for_inference(in_nf4=base_in_nf4, dtype="float32", allow_nonfinite=True)
    opened = open_pretrained(first, options, adapter=adapter)
    other_opened = open_pretrained(second, plain)
    model = load_pretrained(opened, options, fake_quantization=False)
    trained = None if opened.adapter is None and base_in_nf4 else _trained_folder(opened)
    formats = _few_bits(other_opened)
    aware = QuantizationAware.read(trained) if trained is not None and formats else None
    same = aware is not None or (opened.adapter is None and formats == _few_bits(opened))
    if aware is not None:
        model = with_fake_quantization(model, aware.weights, None, aware.modules_to_not_quantize)
    check_logits(model, str(first))
    if model.tokenizer is None:
        raise ConfigError(f"{first}: expected a tokenizer, got none")
    encoder = Encoder(cast(PreTrainedTokenizerFast, model.tokenizer))
    encoded = [list(encoder.encode_beginning(text))[: model.max_seq_length] for text in texts]
    left = [_logits(model, tokens) for tokens in encoded]
    del model
    other = load_pretrained(other_opened, plain)
    check_logits(other, str(second))
    right = [_logits(other, tokens) for tokens in encoded]
    if left[0].shape[1] != right[0].shape[1]:
        raise ConfigError(f"{second}: expected {left[0].shape[1]} logits as {first}, got {right[0].shape[1]}")
    rounding = 0.0 if same else max((form.rounding for form in formats), default=0.0)
    return _difference(np.concatenate(left).astype(np.float64), np.concatenate(right).astype(np.float64), rounding)


def _trained_folder(opened: OpenModel) -> Path:
    """The folder of what was trained: the adapter's, or the model's."""
    if opened.adapter is None:
        return opened.source.folder
    assert opened.adapter.arrays is not None
    return opened.adapter.arrays.folder


def _few_bits(opened: OpenModel) -> list[Format]:
    """The formats of at most 8 bits in a model's folder."""
    assert opened.weights is not None
    return [form for form in opened.weights.formats() if form.bits <= 8]


def _difference(one: Float[np.ndarray, "N V"], two: Float[np.ndarray, "N V"], rounding: float) -> LogitDifference:
    log_p, log_q = _log_softmax(one), _log_softmax(two)
    return LogitDifference(
        tokens=len(one),
        largest=float(np.abs(one - two).max()),
        scale=float(np.abs(one).max()),
        divergence=float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()),
        agreement=float((one.argmax(axis=1) == two.argmax(axis=1)).mean()),
        rounding=rounding,
    )


def _logits(model: LanguageModel, tokens: Sequence[int]) -> Float[np.ndarray, "S V"]:
    """The logits after each token of a text; texts of similar length share a compiled program."""
    width = min(-(-len(tokens) // 64) * 64, model.max_seq_length)
    padded, segments = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
    padded[0, : len(tokens)], segments[0, : len(tokens)] = tokens, 1
    positions = np.arange(width, dtype=np.int32)[None] * segments
    return np.asarray(logits(model, padded, segment_ids=segments, positions=positions))[0, : len(tokens)]


def _log_softmax(scores: Float[np.ndarray, "N V"]) -> Float[np.ndarray, "N V"]:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
