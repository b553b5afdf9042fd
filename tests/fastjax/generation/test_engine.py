"""Answers of the engine are those of each prompt alone, whatever comes and goes beside it."""

import functools
import logging

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.errors import ConfigError
from fastjax.generation import engine as engine_module
from fastjax.generation.engine import Engine
from fastjax.generation.engines import Engines, whole_on
from fastjax.generation.options import GenerationOptions
from fastjax.parallel import make_mesh
from tests.support import tiny
from tests.support.families import CONFIGS
from tests.support.family_mixtures import MIXTURES
from tests.support.generation import answers_in_ids, whole_passes

FAMILIES = {**CONFIGS, **MIXTURES}
#: Untied and with large weights: small random models repeat a token for ever.
CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3, "hidden_size": 64}
CONFIG = tiny.config(**CHANGES)
WIDTHS = engine_module.WIDTHS
#: Of most engines, which so have the same programs; 12 pages.
SETTINGS = {"rows": 4, "steps": 4, "tokens": 12 * 16}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Prompts and answers of many pages, and prompts of several pieces."""
    monkeypatch.setattr(engine_module, "PAGE", 16)
    monkeypatch.setattr(engine_module, "CHUNK", 32)
    monkeypatch.setattr(engine_module, "LEAST", 32)
    monkeypatch.setattr(engine_module, "WIDTHS", (8, 512))  # one width; more in test_windows.py


@functools.cache
def model(adapter=False):
    base = tiny.model(tiny.shared_folder(**CHANGES), CONFIG, load_in_4bit=True)
    targets = ["q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"]
    return tiny.adapted(base, use_dora=True, lora_dropout=0.5, target_modules=targets) if adapter else base


@functools.cache
def prompts():
    return [prompt.tolist() for prompt in tiny.documents(CONFIG, (9, 1, 33, 20, 70, 32), seed=4)]


def collected(engine, requests, schedule=None):
    """Every answer, {(request, choice): pieces}, with requests that come after so many steps."""
    pieces, numbers, rest = {}, {}, list(zip(schedule or [0] * len(requests), requests, strict=True))
    steps = 0
    while rest or engine.busy:
        while rest and rest[0][0] <= steps:
            prompt, options = rest.pop(0)[1]
            numbers[len(numbers)] = engine.add(prompt, options)
        for piece in engine.step():
            pieces.setdefault((piece.request, piece.choice), []).append(piece)
        steps += 1
    return [
        [pieces[numbers[place], choice] for choice in range(options.n)] for place, (_, options) in enumerate(requests)
    ]


def tokens_of(pieces):
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    return [token for piece in pieces for token in piece.tokens]


def check_alone(prompt, answer, count):
    """Each of so many tokens is the likeliest one by a forward pass over the row."""
    assert len(answer) == count and answer == whole_passes(model(), prompt, answer).argmax(-1).tolist()


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_adapters.py::test_each_row_has_its_own_adapter_and_no_other, "
    "tests/fastjax/generation/test_serving.py::test_a_greedy_answer_among_45_others_is_the_one_alone, "
    "tests/fastjax/evaluation/test_evaluation.py::test_scores_are_those_of_the_whole_forward_pass"
)
def test_rows_that_come_and_go_answer_as_alone():
    """With an adapter over 4-bit weights, three rows for six prompts, a small cache, and prompts of several pieces."""
    rng = np.random.default_rng(3)
    engine = Engine(model(adapter=True), rows=3, tokens=13 * 16, steps=3)
    requests = [(prompt, GenerationOptions(max_new_tokens=int(rng.integers(1, 24)))) for prompt in prompts() * 2]
    found = collected(engine, requests, schedule=sorted(rng.integers(0, 9, len(requests)).tolist()))
    for (prompt, options), (pieces,) in zip(requests, found, strict=True):
        answer = tokens_of(pieces)
        assert len(answer) == options.max_new_tokens and pieces[-1].finish_reason == "length"
        whole = whole_passes(model(adapter=True), prompt, answer)
        assert answer == whole.argmax(-1).tolist()
        told = [value for piece in pieces for value in piece.log_probs]
        np.testing.assert_allclose(told, whole[np.arange(len(answer)), answer], rtol=0, atol=2e-4)
    assert engine._pages.free == 13 and sorted(engine._free) == [0, 1, 2]


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_windows.py::test_answers_beyond_the_window, "
    "tests/fastjax/generation/test_adapters.py::test_shared_experts_and_latents_take_several_adapters"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_by_its_forward_pass(family, tmp_path, monkeypatch):
    """A row decodes between the pieces of another's prompt, one or both rows at a time."""
    monkeypatch.setattr(engine_module, "LEAST", 16)
    monkeypatch.setattr(engine_module, "WIDTHS", WIDTHS)
    config = FAMILIES[family]
    folder = tiny.write_folder(tmp_path, config, tiny.arrays(config))
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}} if family == "granite" else {}
    made = tiny.model(folder, None, max_seq_length=64, **linear)  # not with positions that change as a row grows
    engine = Engine(made, rows=2, steps=4, prefill_tokens=16)
    given = [prompt.tolist() for prompt in tiny.documents(config, (5, 40, 19))]
    requests = [(prompt, GenerationOptions(max_new_tokens=10)) for prompt in given]
    for (prompt, _), (pieces,) in zip(requests, collected(engine, requests, [0, 0, 1]), strict=True):
        answer = tokens_of(pieces)
        whole = whole_passes(made, prompt, answer, width=64)
        told = np.asarray([value for piece in pieces for value in piece.log_probs])
        np.testing.assert_allclose(told, whole[np.arange(len(answer)), answer], rtol=0, atol=1e-3)
        np.testing.assert_allclose(told, whole.max(-1), rtol=0, atol=1e-3)


@pytest.mark.exhaustive("32")  # whole pages; 70 tokens are those of the test below
@pytest.mark.parametrize("length", [32, 37, 70])
def test_answers_of_one_prompt_share_its_pages(length):
    prompt = tiny.documents(CONFIG, (length,), seed=5)[0].tolist()
    engine = Engine(model(), **SETTINGS)
    before = engine._pages.free
    engine.add(prompt, GenerationOptions(max_new_tokens=16, n=4))
    pieces = engine.step()
    own = engine._pages.needed(length + 16) - length // 16
    assert engine._pages.free == before - length // 16 - 4 * own
    answers = {choice: [] for choice in range(4)}
    for piece in [*pieces, *engine.run()]:
        answers[piece.choice] += piece.tokens
    assert len({*map(tuple, answers.values())}) == 1
    check_alone(prompt, answers[0], 16)
    assert engine._pages.free == before


def test_a_shared_prompt_stays_until_its_last_answer_ends():
    """The answer that brought it is cancelled, and another prompt takes what became free."""
    prompt, other = prompts()[4], prompts()[5]
    whole, own = len(prompt) // 16, -(-(len(prompt) + 16) // 16) - len(prompt) // 16
    assert whole + 4 * own == 12, "all of the cache"
    engine = Engine(model(), **SETTINGS)
    request = engine.add(prompt, GenerationOptions(max_new_tokens=16, n=4))
    pieces = engine.step()
    engine.cancel(request, 0)
    assert engine._pages.free == own
    second = engine.add(other, GenerationOptions(max_new_tokens=4))
    answers = {}
    for piece in [*pieces, *engine.run()]:
        answers.setdefault((piece.request, piece.choice), []).extend(piece.tokens)
    assert answers[request, 1] == answers[request, 2] == answers[request, 3]
    check_alone(prompt, answers[request, 1], 16)
    check_alone(other, answers[second, 0], 4)
    assert engine._pages.free == 12


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_serving.py::test_a_seed_and_penalties_give_the_answers_that_they_give_alone"
)
def test_answers_beyond_the_rows_wait_for_them():
    engine = Engine(model(), rows=2, steps=4)
    found = collected(engine, [(prompts()[0], GenerationOptions(max_new_tokens=6, n=5))])
    assert [tokens_of(pieces) for pieces in found[0]] == answers_in_ids(model(), [prompts()[0]], max_new_tokens=6) * 5


def test_many_answers_and_many_prompts_come_in_together(monkeypatch):
    """A prompt's answers begin in one call, though others leave too little room for them in the first one."""
    monkeypatch.setattr(engine_module, "ENTRIES", 3)
    requests = [(prompts()[place], GenerationOptions(max_new_tokens=4, n=n)) for place, n in ((0, 1), (1, 1), (3, 2))]
    found = collected(Engine(model(), **SETTINGS), requests)
    for (prompt, _), answers in zip(requests, found, strict=True):
        for pieces in answers:
            check_alone(prompt, tokens_of(pieces), 4)


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_adapters.py::test_devices_that_answer_as_one_have_the_same_adapters"
)
def test_several_devices_answer_as_one():
    devices = jax.devices()[:2]
    engines = Engines(model(adapter=True), devices, rows=2, steps=4)
    assert [engine._state.rows.lengths.devices() for engine in engines.engines] == [{each} for each in devices]
    requests = [(prompt, GenerationOptions(max_new_tokens=6, n=2)) for prompt in prompts()[:4]]
    found = collected(engines, requests)
    expected = answers_in_ids(model(adapter=True), prompts()[:4], max_new_tokens=6)
    for answers, one in zip(found, expected, strict=True):
        assert [tokens_of(pieces) for pieces in answers] == [one] * 2
    engines.cancel(1)  # after the end
    assert engines._left == [0, 0] and not engines.busy and not engines._requests and not engines._numbers
    for twice in ([], [devices[0], devices[0]]):
        with pytest.raises(ConfigError, match="devices: expected devices, each once"):
            Engines(model(), twice)


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_adapters.py::test_devices_that_answer_as_one_have_the_same_adapters"
)
def test_a_model_on_all_devices_answers_on_all_of_them():
    """And one whose arrays are split over them answers as well."""
    mesh = make_mesh(data=2, fsdp=2)
    everywhere = jax.device_put((model().trainable, model().frozen), NamedSharding(mesh, P()))
    copied = model().replace(trainable=everywhere[0], frozen=everywhere[1])
    assert len(whole_on(copied)) == 4 and whole_on(model()) == []
    for axis in ("tensor", "fsdp"):
        message = rf"expected no mesh of several devices around it \(jax.set_mesh\), got {{'{axis}': 2}}; a model"
        with jax.set_mesh(make_mesh(**{axis: 2})), pytest.raises(ConfigError, match=message):
            answers_in_ids(model(), [[1]], max_new_tokens=1)
    expected = answers_in_ids(model(), prompts()[:3], max_new_tokens=5)
    assert answers_in_ids(copied, prompts()[:3], max_new_tokens=5) == expected
    split = jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("fsdp") if leaf.shape[0] % 2 == 0 else P())),
        model().frozen,
    )
    assert answers_in_ids(model().replace(frozen=split), prompts()[:3], max_new_tokens=5) == expected


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_serving.py::test_a_seed_and_penalties_give_the_answers_that_they_give_alone"
)
def test_sampled_answers_need_no_neighbours():
    """A row draws the same numbers alone, among others, later, and in a full cache."""
    options = GenerationOptions(max_new_tokens=20, temperature=1.0, top_p=0.95, seed=7, n=2)
    alone = collected(Engine(model(), rows=2), [(prompts()[3], options)])[0]
    engine = Engine(model(), rows=4, tokens=16 * 16, steps=5)
    others = [
        (prompt, GenerationOptions(max_new_tokens=9, temperature=2.0, seed=n)) for n, prompt in enumerate(prompts())
    ]
    beside = collected(engine, [*others, (prompts()[3], options)], [0, 0, 0, 1, 1, 2, 2])[-1]
    assert [tokens_of(pieces) for pieces in beside] == [tokens_of(pieces) for pieces in alone]
    assert tokens_of(alone[0]) != tokens_of(alone[1])


def test_a_stop_token_ends_an_answer_and_is_told():
    plain = (prompts()[0], GenerationOptions(max_new_tokens=12))
    ((pieces,),) = collected(Engine(model(), **SETTINGS), [plain])
    free = tokens_of(pieces)
    check_alone(prompts()[0], free, 12)
    options = GenerationOptions(max_new_tokens=12, stop_tokens=(free[5], free[8]))
    end = min(free.index(free[5]), free.index(free[8]))
    ((pieces,),) = collected(Engine(model(), **SETTINGS), [(prompts()[0], options)])
    assert tokens_of(pieces) == free[:end]
    assert (pieces[-1].finish_reason, pieces[-1].stop_token) == ("stop", free[end])
    last = GenerationOptions(max_new_tokens=end + 1, stop_tokens=(free[end],))
    ((pieces,),) = collected(Engine(model(), **SETTINGS), [(prompts()[0], last)])
    assert pieces[-1].finish_reason == "stop", "the last token that is allowed"


@pytest.mark.exhaustive(
    by="tests/fastjax/generation/test_text.py::test_a_stream_gives_pieces_and_closing_it_ends_the_row, "
    "tests/fastjax/generation/test_text.py::test_a_stop_string_ends_an_answer_and_no_other, "
    "test_a_shared_prompt_stays_until_its_last_answer_ends"
)
def test_a_cancelled_answer_gives_back_its_room_and_hurts_nobody():
    engine = Engine(model(), rows=3, steps=2)
    rooms = engine._pages.free
    first = engine.add(prompts()[4], GenerationOptions(max_new_tokens=40, n=2))
    second = engine.add(prompts()[0], GenerationOptions(max_new_tokens=12))
    waits = engine.add(prompts()[1], GenerationOptions(max_new_tokens=12))
    pieces = engine.step()
    engine.cancel(first, 1)
    engine.cancel(waits)
    engine.cancel(first, 1)
    pieces += engine.step()
    engine.cancel(first)
    pieces += engine.run()
    engine.cancel(second)
    assert not engine.busy and engine._pages.free == rooms
    reasons = [(p.request, p.choice, p.finish_reason) for p in pieces if p.finish_reason]
    assert sorted(reasons) == [
        (first, 0, "cancelled"),
        (first, 1, "cancelled"),
        (second, 0, "length"),
        (waits, 0, "cancelled"),
    ]
    answer = [token for piece in pieces if piece.request == second for token in piece.tokens]
    assert [answer] == answers_in_ids(model(), [prompts()[0]], max_new_tokens=12)


def test_a_cache_in_float8_changes_a_little():
    requests = [(prompt, GenerationOptions(max_new_tokens=8)) for prompt in prompts()[:3]]
    for (prompt, _), (pieces,) in zip(
        requests, collected(Engine(model(), rows=3, cache_dtype="float8_e4m3fn"), requests), strict=True
    ):
        answer = tokens_of(pieces)
        told = np.asarray([value for piece in pieces for value in piece.log_probs])
        change = np.abs(told - whole_passes(model(), prompt, answer)[np.arange(len(answer)), answer])
        assert 1e-3 < change.max() < 1.0 and change.mean() < 0.4, change


def test_nothing_compiles_after_the_first_requests(caplog, monkeypatch):
    """Of several widths of a call's tokens and of its rows."""
    monkeypatch.setattr(engine_module, "LEAST", 16)
    monkeypatch.setattr(engine_module, "WIDTHS", (1, 4, 512))
    engine = Engine(model(), **SETTINGS)

    def some(seed, count):
        rng = np.random.default_rng(seed)
        for _ in range(count):
            prompt = rng.integers(0, 101, int(rng.integers(1, 90))).tolist()
            bias = {int(token): -3.0 for token in rng.integers(0, 101, int(rng.integers(0, 4)))}
            yield (
                prompt,
                GenerationOptions(
                    max_new_tokens=int(rng.integers(1, 30)),
                    temperature=float(rng.choice([0.0, 0.7])),
                    top_k=int(rng.integers(0, 9)) or None,
                    top_p=float(rng.uniform(0.5, 1)),
                    min_p=float(rng.choice([0.0, 0.1])),
                    repetition_penalty=float(rng.uniform(0.9, 1.2)),
                    frequency_penalty=float(rng.choice([0.0, 0.3])),
                    logit_bias=bias,
                    n=int(rng.integers(1, 4)),
                    stop_tokens=tuple(rng.integers(0, 101, int(rng.integers(0, 3))).tolist()),
                    top_logprobs=int(rng.integers(0, 4)) or None,
                ),
            )  # fmt: skip

    engine.warm_up()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        collected(engine, list(some(1, 30)))
    assert not [record.message for record in caplog.records if "Compiling" in record.message]
    for beside in (1, 3):  # rows, of a width each
        requests = [(prompt, GenerationOptions(max_new_tokens=6)) for prompt in prompts()[:beside]]
        for (prompt, _), (pieces,) in zip(requests, collected(engine, requests), strict=True):
            check_alone(prompt, tokens_of(pieces), 6)


def test_prompts_that_come_in_together_are_compiled_for_too(monkeypatch):
    """Eight prompts of 20 tokens are more than one answer may have."""
    monkeypatch.setattr(engine_module, "LEAST", 16)
    monkeypatch.setattr(engine_module, "CHUNK", 128)
    engine, widths = Engine(model(), rows=8, max_length=32), []

    class Program:
        def lower(self, decoder, state, *arrays, **static):
            widths.extend([arrays[0].tokens.shape[0]] if "packed" in static else [])
            return self

        def compile(self):
            return self

    monkeypatch.setattr(engine_module, "prefill", Program())
    monkeypatch.setattr(engine_module, "decode", Program())
    monkeypatch.setattr(engine, "_call", lambda program, *arrays, **static: (engine._state, None))
    engine.warm_up()
    assert widths == [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([1, 101], {}, "prompt token 1: expected an integer from 0 to 100, got 101"),
        ([-1], {}, "prompt token 0"),
        ([True], {}, "prompt token 0"),
        ([1.5], {}, "prompt token 0"),
        ([2**40], {}, "prompt token 0"),
        ([[1]], {}, "prompt token 0"),
        ([1, 2], {"max_new_tokens": 127}, "a prompt of 2 and max_new_tokens 127"),
        ([1, 2], {"stop_tokens": (101,)}, "stop_tokens"),
    ],
)
def test_what_is_refused_leaves_the_others_alone(prompt, options, message):
    engine = Engine(model(), **SETTINGS)
    number = engine.add(prompts()[0], GenerationOptions(max_new_tokens=4))
    with pytest.raises(ConfigError, match=message):
        engine.add(prompt, GenerationOptions(**options))
    (pieces,) = [[piece for piece in engine.run()]]  # noqa: C416
    assert {piece.request for piece in pieces} == {number}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows: expected an integer from 1 to 512, got 0"),
        ({"max_length": 129}, "max_length: expected an integer from 1 to 128, got 129"),
        ({"tokens": 100}, "tokens: expected room for one answer of max_length 128"),
        ({"cache_dtype": "int4"}, "cache_dtype"),
    ],
)
def test_an_engine_without_room_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model(), **settings)
