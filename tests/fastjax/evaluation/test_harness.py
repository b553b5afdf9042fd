"""The model as lm-evaluation-harness asks it; a stand-in has what it needs of lm_eval where that is not installed."""

import importlib.util
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.generation import text
from fastjax.language_model import FastLanguageModel
from tests.support.chat import write_model


def rolling_windows(token_list, prefix_token, max_seq_len, context_len):
    """lm_eval.utils.get_rolling_token_windows: contexts and the tokens that they predict, each token once."""
    end = min(max_seq_len, len(token_list))
    yield [prefix_token, *token_list[: end - 1]], token_list[:end]
    while end < len(token_list):
        start, end = end, min(len(token_list), end + max_seq_len - context_len + 1)
        yield token_list[end - max_seq_len - 1 : end - 1], token_list[start:end]


STAND_IN = {
    "lm_eval": {},
    "lm_eval.api": {},
    "lm_eval.api.model": {"LM": object},
    "lm_eval.utils": {
        "get_rolling_token_windows": rolling_windows,
        "make_disjoint_window": lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
    },
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_IN.items() if importlib.util.find_spec("lm_eval") is None else ():
            patch.setitem(sys.modules, name, SimpleNamespace(**members))
        from fastjax.evaluation.harness import HarnessModel
    folder = write_model(tmp_path_factory.mktemp("harness") / "model")
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, dtype="float32", load_in_4bit=False)
    return HarnessModel(model, batch_size=2, max_new_tokens=5)


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def log_probs(harness, tokens):
    padded = np.zeros((1, 64), np.int32)  # of one length, for one program: what is behind is not seen
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(harness.model.logits(padded))[0, : len(tokens) - 1]
    every = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(tokens) - 1), tokens[1:]]
    return every, logits.argmax(-1)


def test_continuations_with_and_without_context(harness):
    requests = [asked("Who? ", "Ann"), asked("", "Ben"), asked("x" * 100, "y")]
    found = harness.loglikelihood(requests)
    for (context, said), (value, greedy) in zip((request.args for request in requests), found, strict=True):
        tokens = harness._tokens(context + said)[-65:]  # a byte a token; this tokenizer puts no BOS before a text
        tokens = tokens if context else [1, *tokens]
        scored = len(said) + (context[-1:] == " ")
        every, best = log_probs(harness, tokens)
        np.testing.assert_allclose(value, every[-scored:].sum(), rtol=1e-4)
        assert greedy == (best[-scored:].tolist() == tokens[-scored:])


def test_a_long_text_predicts_each_token_once(harness):
    whole = "abcdefghij" * 15
    (found,) = harness.loglikelihood_rolling([asked(whole)])
    tokens = [1, *harness._tokens(whole)]
    parts = [log_probs(harness, tokens[start : start + 65])[0] for start in (0, 64)]
    last = log_probs(harness, tokens[86:])[0][-22:]  # with all the context that a row holds
    np.testing.assert_allclose(found, sum(part.sum() for part in (*parts, last)), rtol=1e-4)


def test_answers_end_where_the_task_says(harness, monkeypatch):
    engines, made = [], text.engine_for
    monkeypatch.setattr(text, "engine_for", lambda *arguments: engines.append(made(*arguments)) or engines[-1])
    free, *others = harness.generate_until([asked("Who?", {"until": [], "do_sample": False})] * 3)
    assert free and others == [free] * 2
    end = free[len(free) // 2]
    wanted = [
        {"until": end},
        {"max_gen_toks": 2},
        {"temperature": 1, "min_p": 1.0, "repetition_penalty": 1.0, "seed": 3},
    ]
    cut, short, likeliest = harness.generate_until([asked("Who?", each) for each in wanted])
    assert cut == free.split(end)[0] and free.startswith(short) and len(short) < len(free)
    assert likeliest == free
    assert len(engines) == 2, "requests of several settings share an engine"
    with pytest.raises(ConfigError, match="generation_kwargs: expected some of until, .* got num_beams"):
        harness.generate_until([asked("Who?", {"num_beams": 4})])
