"""Faults of other engines, sought in one engine whose rows come and go, beside a fresh one for each answer."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.generation import engine as engine_module
from fastjax.generation import face, text
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions
from fastjax.parallel import make_mesh
from tests.support import tiny
from tests.support.generation import whole_logits, whole_passes
from tests.support.sampling import distribution

#: Untied and with large weights: small random models repeat a token for ever.
CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3, "num_hidden_layers": 2}
CONFIG = tiny.config(**CHANGES)
ROWS, ROOM = 8, 22


@pytest.fixture(scope="module", autouse=True)
def small():
    """Pages of 16 tokens, prompts in pieces of 32, and one width of the programs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PAGE": 16, "CHUNK": 32, "LEAST": 32, "WIDTHS": (ROWS,)}.items():
            patch.setattr(engine_module, name, value)
        yield


@functools.cache
def model():
    return tiny.model(tiny.shared_folder(**CHANGES), CONFIG, load_in_4bit=False)


def fresh():
    """An engine with room for fewer answers than it has rows, if they are long."""
    return Engine(model(), rows=ROWS, tokens=ROOM * 16, steps=4)


@pytest.fixture(scope="module")
def engine():
    return fresh()


@functools.cache
def prompt(length, seed=0):
    return tiny.documents(CONFIG, (length,), seed=seed)[0].tolist()


def collected(engine, requests, after=0):
    """Answers [request][choice]: tokens, log-probabilities, likeliest, reason; some are asked after one step."""
    numbers, pieces = [], {}
    for place, (tokens, options) in enumerate(requests):
        if place == after > 0:
            for piece in engine.step():
                pieces.setdefault((piece.request, piece.choice), []).append(piece)
        numbers.append(engine.add(tokens, options))
    for piece in engine.run():
        pieces.setdefault((piece.request, piece.choice), []).append(piece)
    assert engine._pages.free == ROOM and len(engine._free) == ROWS and {key[0] for key in pieces} == {*numbers}

    def answer(parts):
        joined = [sum((getattr(part, name) for part in parts), ()) for name in ("tokens", "log_probs", "likeliest")]
        assert [part.finish_reason is None for part in parts] == [True] * (len(parts) - 1) + [False]
        return (*joined, parts[-1].finish_reason)

    return [
        [answer(pieces[number, choice]) for choice in range(options.n)]
        for number, (_, options) in zip(numbers, requests, strict=True)
    ]


def alone(tokens, options):
    [answers] = collected(fresh(), [(tokens, options)])
    return answers


def test_temperature_0_takes_the_likeliest_token_in_every_row(engine):
    beside = {"top_p": 0.3, "top_k": 7, "min_p": 0.1, "seed": 5, "max_new_tokens": 6}
    found = collected(engine, [(prompt(9), GenerationOptions(n=4, **beside))] * 25)
    answers = {one for request in found for one in request}
    [(tokens, _, _, reason)] = answers
    assert list(tokens) == whole_passes(model(), prompt(9), tokens).argmax(-1).tolist() and reason == "length"


def test_what_is_off_changes_no_bit(engine):
    plain = {"max_new_tokens": 8, "temperature": 0.8, "seed": 3}
    off = [{"top_k": 0}, {"top_k": -1}, {"top_k": CONFIG["vocab_size"]}, {"top_k": 2**31}, {"top_p": 1}, {"min_p": 0}]
    off += [{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}, {"logit_bias": {4: 0}}, {}]
    found = collected(engine, [(prompt(9), GenerationOptions(**plain, **more)) for more in off])
    assert {one[:2] for [one] in found} == {found[-1][0][:2]}


def test_penalties_of_a_row_are_its_own(engine):
    """Repetition counts prompt and answer, the others the answer, from the first token on."""
    settings = [
        {"repetition_penalty": 4.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 0.5, "frequency_penalty": 1.0, "logit_bias": {5: 2.0}},
        {},
    ]
    requests = [
        (prompt(length, seed), GenerationOptions(max_new_tokens=10, **more))
        for seed, length in enumerate((3, 24))
        for more in settings
    ]
    for (tokens, options), [(answer, *_)] in zip(requests, collected(engine, requests, after=3), strict=True):
        logits = whole_logits(model(), tokens, answer)
        expected = [distribution(row, options, tokens, answer[:n]).argmax() for n, row in enumerate(logits)]
        assert list(answer) == expected, options


def test_a_seed_and_penalties_give_the_answers_that_they_give_alone(engine):
    """In a full cache, in other orders, among rows without a seed; four choices are four answers, twice the same."""
    options = GenerationOptions(
        max_new_tokens=40, temperature=1.0, top_p=0.95, seed=11, n=4, repetition_penalty=1.2, frequency_penalty=0.3
    )
    expected = alone(prompt(33), options)
    assert len({one[0] for one in expected}) == 4 and alone(prompt(33), options) == expected
    others = [
        (prompt(50, 2), GenerationOptions(max_new_tokens=20, temperature=2.0, seed=n)) for n in range(6)
    ]  # 5 pages each of 22: they wait for each other
    for place, after in ((0, 0), (3, 2), (6, 6)):
        found = collected(engine, [*others[:place], (prompt(33), options), *others[place:]], after)[place]
        assert [one[0] for one in found] == [one[0] for one in expected]
        np.testing.assert_allclose([one[1] for one in found], [one[1] for one in expected], rtol=0, atol=1e-4)


def test_a_greedy_answer_among_45_others_is_the_one_alone(engine):
    draw = np.random.default_rng(0)
    options = GenerationOptions(max_new_tokens=30)
    others = [
        (prompt(int(length), seed), GenerationOptions(max_new_tokens=int(draw.integers(1, 12)), temperature=seed % 2))
        for seed, length in enumerate(draw.integers(1, 60, 45))
    ]
    found = collected(engine, [(prompt(20), options), *others], after=1)
    [(answer, *_)] = alone(prompt(20), options)
    assert found[0][0][0] == answer and len(answer) == 30
    assert [len(one[0]) for [one] in found[1:]] == [options.max_new_tokens for _, options in others]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0},
        {"temperature": 1.0, "top_k": 2, "logit_bias": {3: -100, 7: -100, 9: 5.0}},
    ],
    ids=["greedy", "sampled", "banned"],
)
def test_log_probabilities_are_the_models_own_in_every_place(settings, engine):
    """Before bias, penalties, temperature and filters, also of a token that was banned; all of them are numbers."""
    options = GenerationOptions(max_new_tokens=40, top_logprobs=5, seed=2, **settings)
    plain = GenerationOptions(max_new_tokens=40, temperature=1.0)
    found = collected(engine, [(prompt(12), options), (prompt(7), plain)])
    tokens, log_probs, likeliest, _ = found[0][0]
    expected = np.asarray(whole_passes(model(), prompt(12), tokens))
    np.testing.assert_allclose(log_probs, expected[np.arange(40), tokens], rtol=0, atol=1e-4)
    for row, pairs in zip(expected, likeliest, strict=True):
        assert len(pairs) == len({token for token, _ in pairs}) == 5
        np.testing.assert_allclose([value for _, value in pairs], np.sort(row)[:-6:-1], rtol=0, atol=1e-4)
        np.testing.assert_allclose([row[token] for token, _ in pairs], [v for _, v in pairs], rtol=0, atol=1e-4)
    json.dumps([log_probs, likeliest], allow_nan=False)
    assert found[1][0][2] == () and not {*settings.get("logit_bias", {})} - {9} & {*tokens}


@pytest.mark.parametrize(("going", "waiting", "calls"), [(0, 1, 1), (2, 1, 1), (6, 1, 3), (6, 2, 2), (5, 3, 1)])
def test_prompts_wait_until_they_are_worth_that_the_others_stand_still(going, waiting, calls):
    """Free rows that a prompt waits for stand idle, and those that go on do while it comes in."""
    engine = Engine(model(), rows=ROWS, tokens=ROOM * 16, steps=1)
    for seed in range(going):
        engine.add(prompt(5, seed), GenerationOptions(max_new_tokens=40))
    engine.step()
    numbers = [engine.add(prompt(5, seed), GenerationOptions(max_new_tokens=2)) for seed in range(waiting)]
    steps = [{piece.request for piece in engine.step()} for _ in range(calls)]
    assert [bool(each & {*numbers}) for each in steps] == [False] * (calls - 1) + [True]
    assert steps[-1] >= {*numbers}


def test_a_prompt_waits_four_steps_and_no_more(monkeypatch):
    """However many go on; and one that finds no pages comes in as soon as there are some."""
    monkeypatch.setattr(engine_module, "_IDLE", 100)
    engine = Engine(model(), rows=4, tokens=8 * 16, max_length=64, steps=1)
    long, _ = (engine.add(prompt(5), GenerationOptions(max_new_tokens=new)) for new in (41, 58))  # seven of eight pages
    engine.step()
    late = engine.add(prompt(5, 1), GenerationOptions(max_new_tokens=2))
    whole = engine.add(prompt(30, 2), GenerationOptions(max_new_tokens=30))  # four, which are there when the first ends
    came = []
    while engine.busy:
        came.append({piece.request for piece in engine.step()})
    assert [late in each for each in came[:5]] == [False, False, False, True, True]
    [end] = [place for place, each in enumerate(came) if long in each][-1:]
    assert [place for place, each in enumerate(came) if whole in each][0] == end + 1


def test_an_end_is_told_behind_an_error():
    """The step after a cancelled answer is refused, and the next one tells its end."""
    engine = fresh()
    engine.add(prompt(5), GenerationOptions(max_new_tokens=9))
    number = engine.add(prompt(5, 1), GenerationOptions(max_new_tokens=9))
    engine.step()
    engine.cancel(number)
    with jax.set_mesh(make_mesh(fsdp=2)), pytest.raises(ConfigError, match="no mesh of several devices"):
        engine.step()
    assert [piece.finish_reason for piece in engine.run() if piece.request == number] == ["cancelled"]


def scored(engine, requests):
    """The first piece of each answer, by request."""
    numbers = [engine.add(tokens, options) for tokens, options in requests]
    found = {number: {} for number in numbers}
    for piece in engine.run():
        told = found[piece.request].setdefault(piece.choice, piece)
        assert told is piece or piece.prompt_log_probs == piece.prompt_likeliest == ()
    return [list(found[number].values()) for number in numbers]


def check_scored(piece, tokens, wanted):
    expected = np.asarray(whole_passes(model(), tokens[:1], tokens[1:]))
    assert piece.prompt_log_probs[0] is None and len(piece.prompt_log_probs) == len(tokens)
    told = np.asarray(piece.prompt_log_probs[1:], float)
    np.testing.assert_allclose(told, expected[np.arange(len(tokens) - 1), tokens[1:]], rtol=0, atol=1e-4)
    assert len(piece.prompt_likeliest) == (len(tokens) if wanted else 0)
    for row, pairs in zip(expected, piece.prompt_likeliest[1:], strict=bool(wanted)):
        np.testing.assert_allclose([value for _, value in pairs], np.sort(row)[: -wanted - 1 : -1], rtol=0, atol=1e-4)
        np.testing.assert_allclose([row[token] for token, _ in pairs], [v for _, v in pairs], rtol=0, atol=1e-4)


def test_a_prompts_log_probabilities_are_alike_in_every_order(engine):
    """First, repeated, after half of it, in pieces, shared by answers, beside prompts that ask for nothing."""
    whole = prompt(110)
    lengths = (55, 110, 31, 1, 2, 110, 33)
    wanted = (2, 3, 0, 5, 20, None, 1)
    requests = [
        (whole[:length], GenerationOptions(max_new_tokens=3, prompt_logprobs=count, n=1 + (length == 33)))
        for length, count in zip(lengths, wanted, strict=True)
    ]
    for order in (slice(None), slice(None, None, -1)):
        for (tokens, options), pieces in zip(requests[order], scored(engine, requests[order]), strict=True):
            assert len(pieces) == options.n
            for piece in pieces:
                assert piece.tokens
                if options.prompt_logprobs is None:
                    assert piece.prompt_log_probs == piece.prompt_likeliest == ()
                else:
                    check_scored(piece, tokens, options.prompt_logprobs)


def test_a_prompt_is_scored_and_no_token_made(engine):
    """Also where the likeliest token would have ended the answer; neighbours get theirs."""
    stop = whole_passes(model(), prompt(40), [0])[0].argmax().item()
    only = GenerationOptions(max_new_tokens=0, prompt_logprobs=0, n=2, stop_tokens=(stop,))
    full = GenerationOptions(max_new_tokens=88)
    found = scored(engine, [(prompt(40), only), (prompt(128), GenerationOptions(max_new_tokens=0, prompt_logprobs=1))])
    for piece in found[0]:
        assert (piece.tokens, piece.log_probs, piece.finish_reason, piece.stop_token) == ((), (), "length", None)
        check_scored(piece, prompt(40), 0)
    check_scored(found[1][0], prompt(128), 1)
    beside = collected(engine, [(prompt(40), only), (prompt(40), full)])
    assert [one[0] for one in beside[0]] == [(), ()] and beside[1] == alone(prompt(40), full)
    [[answer]] = text.answers(model().replace(tokenizer=None), [prompt(40)], dataclasses.replace(only, n=1))
    assert (answer.token_ids, answer.finish_reason, len(answer.prompt_log_probs)) == ((), "length", 40)


def test_rows_that_are_used_again_keep_nothing(engine):
    """One prompt three times in a row, then two of one beginning by turns; requests that are open at once."""
    options = GenerationOptions(max_new_tokens=12)
    first, second = [*prompt(20), *prompt(9, 1)], [*prompt(20), *prompt(9, 2)]
    expected = {tuple(tokens): alone(tokens, options)[0] for tokens in (first, second)}
    found = [collected(engine, [(first, options)])[0][0] for _ in range(3)]
    found += [each[0] for each in collected(engine, [(first, options), (second, options)] * 6)]
    for tokens, one in zip([first] * 3 + [first, second] * 6, found, strict=True):
        assert one[0] == expected[tuple(tokens)][0] and len(one[0]) == 12
        np.testing.assert_allclose(one[1], expected[tuple(tokens)][1], rtol=0, atol=1e-4)
    assert expected[tuple(first)][0] != expected[tuple(second)][0]


@pytest.mark.exhaustive("32")
@pytest.mark.parametrize("chunk", [16, 32])
def test_a_long_prompt_holds_up_no_row_and_changes_no_answer(chunk, monkeypatch):
    """A step takes in one call's worth of a long prompt, or of many; rows get their tokens meanwhile."""
    monkeypatch.setattr(engine_module, "LEAST", chunk)
    engine = Engine(model(), rows=ROWS, tokens=ROOM * 16, steps=4, prefill_tokens=chunk)
    requests = [(prompt(10), GenerationOptions(max_new_tokens=40)), (prompt(110), GenerationOptions(max_new_tokens=8))]
    requests += [(prompt(15, seed), GenerationOptions(max_new_tokens=4)) for seed in range(3)]
    numbers, steps = [engine.add(*requests[0])], [engine.step()]
    numbers += [engine.add(*request) for request in requests[1:]]
    while engine.busy:
        steps.append(engine.step())
    came = [{number: [p for p in step if p.request == number] for number in numbers} for step in steps]
    counts = [[sum(len(piece.tokens) for piece in step[number]) for step in came] for number in numbers]
    pieces = -(-110 // chunk)
    assert counts[0][:11] == [1, *[4] * 9, 3] and counts[1][: pieces + 3] == [0] * pieces + [1, 4, 3]
    begins = [next(place for place, count in enumerate(each) if count) for each in counts[2:]]
    assert begins == [pieces + 1 + place // (chunk // 15) for place in range(3)]
    for number, (tokens, _) in zip(numbers, requests, strict=True):
        answer = [token for step in came for piece in step[number] for token in piece.tokens]
        assert answer == whole_passes(model(), tokens, answer).argmax(-1).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_several_lengths_padded_on_either_side(side, engine, monkeypatch):
    monkeypatch.setattr("fastjax.generation.text.engine_for", lambda *arguments: engine)
    prompts = [prompt(length) for length in (3, 50, 100)]
    ids, mask = np.zeros((2, 3, 100), int)
    for row, tokens in enumerate(prompts):
        here = slice(100 - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, here], mask[row, here] = tokens, 1
    found = face.generate(model(), input_ids=ids, attention_mask=mask, max_new_tokens=9, eos_token_id=[])
    assert (found[:, :100] == ids).all()
    for tokens, answer in zip(prompts, found[:, 100:].tolist(), strict=True):
        assert answer == whole_passes(model(), tokens, answer).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        ([1, -1], {}, "prompt token 1: expected an integer from 0 to 100, got -1"),
        ([2**40], {}, "prompt token 0: expected an integer from 0 to 100, got 1099511627776"),
        ([[-1]], {}, r"prompt token 0: expected an integer from 0 to 100, got \[-1\]"),
        ([1] * 129, {"max_new_tokens": 1}, "at most 128 together .* a prompt of 129 and max_new_tokens 1"),
        ([1] * 100, {"max_new_tokens": 29}, "at most 128 together .* a prompt of 100 and max_new_tokens 29"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: expected an integer from 1, or 0 with prompt_logprobs, got 0"),
        ([1] * 129, {"max_new_tokens": 0, "prompt_logprobs": 0}, "a prompt of 129 and max_new_tokens 0"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs: expected an integer from 0 to 20 or null, got 21"),
        ([1], {"temperature": -1}, "temperature: expected a number from 0"),
        ([1], {"logit_bias": {101: 1.0}}, "logit_bias: expected token ids from 0 to 100, got 101"),
        ([1], {"logit_bias": {5: float("nan")}}, "logit_bias: expected a value that is finite"),
        ([1], {"top_logprobs": 101}, "top_logprobs: expected an integer from 0 to 20 or null, got 101"),
        ([1], {"n": 10_000}, "n: expected an integer from 1 to 128, got 10000"),
    ],
)
def test_what_is_refused_is_named_before_anything_is_made(tokens, settings, message, engine):
    with pytest.raises(ConfigError, match=message):
        engine.add(tokens, GenerationOptions(**settings))
    assert not engine.busy


def test_after_what_was_refused_the_next_request_is_answered(engine):
    """One token is "length"; a bias of -100 bans the likeliest token, and 100 forces one."""
    one = {"max_new_tokens": 1}
    [[free]] = collected(engine, [(prompt(9), GenerationOptions(**one))])
    assert len(free[0]) == 1 and free[3] == "length"
    best = free[0][0]
    biases = [{best: -100}, {11: 100}, {11: 99, 12: 100}]
    found = collected(engine, [(prompt(9), GenerationOptions(**one, logit_bias=bias)) for bias in biases])
    order = np.argsort(np.asarray(whole_passes(model(), prompt(9), [0]))[0])[::-1].tolist()
    assert order[0] == best and [tokens for [(tokens, *_)] in found] == [(order[1],), (11,), (12,)]
