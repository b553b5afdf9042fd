"""Adapters chosen a row: each request's answer is that of its own adapter alone, whatever stands beside it."""

import functools
import gc
import logging

import jax
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.generation import engine as engine_module
from fastjax.generation import face, text
from fastjax.generation.bound import BoundDecoder
from fastjax.generation.engine import Engine
from fastjax.generation.engines import Engines
from fastjax.generation.options import GenerationOptions
from fastjax.generation.programs import decode, prefill
from fastjax.quantization.nf4 import NF4Weight
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES

#: Untied and with large weights: small random models repeat a token for ever. Without biases on attention, which keep
#: it from being one unit with its adapters.
CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3, "hidden_size": 64}
UNITED = {**CHANGES, "attention_bias": False, "mlp_bias": False}
#: Of other ranks, factors and modules; the second by other ranks on some, with dropout, and not on all.
KINDS = {
    "sums": {"seed": 1, "r": 4, "lora_alpha": 64},
    "Sums": {
        "seed": 2,
        "r": 2,
        "lora_alpha": 40,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 4, "up_proj": 1},
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "lora_dropout": 0.5,
    },
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Prompts and answers of many pages, and prompts of several pieces."""
    monkeypatch.setattr(engine_module, "PAGE", 16)
    monkeypatch.setattr(engine_module, "CHUNK", 32)
    monkeypatch.setattr(engine_module, "LEAST", 32)
    monkeypatch.setattr(engine_module, "WIDTHS", (8, 512))  # one width; more in test_windows.py


#: Of most engines, which so have the same programs, with three adapters.
SETTINGS = {"rows": 3, "steps": 3}


@functools.cache
def base(united=True, scan=True):
    changes = UNITED if united else CHANGES
    return tiny.model(
        tiny.shared_folder(**changes), tiny.config(**changes), layer_loop="scan" if scan else "unroll"
    ).value


@functools.cache
def adapter(name, united=True, scan=True):
    return tiny.adapted(base(united, scan), **KINDS[name])


@functools.cache
def prompts():
    return [prompt.tolist() for prompt in tiny.documents(tiny.config(), (9, 1, 33, 20, 70, 32), seed=4)]


def whole_passes(model, prompt, answer, width=128):
    """The log-probabilities of a row by one forward pass, of what stands in the place of each token of the answer."""
    padded, count = np.zeros((1, width), np.int32), len(prompt) + len(answer)
    padded[0, :count] = [*prompt, *answer]
    logits = tiny.logits(model, padded, segment_ids=(np.arange(width)[None] < count).astype(np.int32))
    return jax.nn.log_softmax(logits[0, len(prompt) - 1 : count - 1], axis=-1)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_32_bits_are_rounded_once_as_their_products_round_them(dora):
    """Logits in bfloat16 to the bit, by a factor that is no power of two; DoRA's stay as they are."""
    model = tiny.model(tiny.shared_folder(**UNITED), tiny.config(**UNITED), dtype="bfloat16").value
    model = tiny.adapted(model, seed=1, r=4, lora_alpha=12.4, use_dora=dora)
    bound = BoundDecoder.of(model)
    trainable, frozen = bound.trees
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(trainable)}
    assert dtypes == {"float32" if dora else "bfloat16"}
    rounded = model.replace(graphdef=bound.graphdef, trainable=trainable, frozen=frozen)
    tokens = np.asarray([prompts()[0]], np.int32)
    np.testing.assert_array_equal(tiny.logits(rounded, tokens), tiny.logits(model, tokens))


def test_nested_scales_are_decoded_once():
    model = tiny.model(tiny.shared_folder(**UNITED), tiny.config(**UNITED), load_in_4bit=True).value
    weights = [
        weight
        for frozen in (model.frozen, BoundDecoder.of(model).trees[1])
        for weight in jax.tree.leaves(frozen, is_leaf=lambda node: isinstance(node, NF4Weight))
        if isinstance(weight, NF4Weight)
    ]
    before, after = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    assert before and all(weight.nested_absmax is not None for weight in before)
    assert all(weight.nested_absmax is None and weight.absmax.dtype == np.float32 for weight in after)
    assert all(one.codes is other.codes for one, other in zip(before, after, strict=True)), "the codes are not copied"


def check(engine, models, requests):
    """The tokens of requests (prompt, adapter, n) that come two a step; each is that of its model's forward pass."""
    numbers, found = [], {}
    while len(numbers) < len(requests) or engine.busy:
        for prompt, name, n in requests[len(numbers) : len(numbers) + 2]:
            numbers.append(engine.add(prompt, GenerationOptions(max_new_tokens=10, n=n), adapter=name))
        for piece in engine.step():
            tokens, told = found.setdefault((piece.request, piece.choice), ([], []))
            tokens += piece.tokens
            told += piece.log_probs
    for number, (prompt, name, n) in zip(numbers, requests, strict=True):
        for choice in range(n):
            tokens, told = found[number, choice]
            whole = whole_passes(models[name], prompt, tokens)
            assert len(tokens) == 10 and tokens == whole.argmax(-1).tolist()
            np.testing.assert_allclose(told, whole[np.arange(10), tokens], rtol=0, atol=1e-4)
    return [found[number, 0][0] for number in numbers]


@pytest.mark.exhaustive("scan")
@pytest.mark.parametrize(("united", "scan"), [(True, True), (False, False)], ids=["scan", "unroll"])
def test_each_row_has_its_own_adapter_and_no_other(united, scan):
    """One prompt under every name, interleaved over reused rows, and others between; biases, and layers unrolled too.

    One model under two names is two adapters; the model's own is one of them; no mixture compiles anything.
    """
    sums, other = adapter("sums", united, scan), adapter("Sums", united, scan)
    models = {None: base(united, scan), "sums": sums, "Sums": other, "again": other}
    engine = Engine(models[None], adapters={name: models[name] for name in models if name}, **SETTINGS)
    names = [None, "Sums", "again", "sums", None, "sums"]
    requests = [(prompts()[4], name, 2 if name == "again" else 1) for name in names]
    requests += [(prompt, name, 1) for prompt, name in zip(prompts(), reversed(names), strict=True)]
    found = check(engine, models, requests)
    said = {name: found[place] for place, name in enumerate(names)}
    assert said["Sums"] == said["again"] and len({*map(str, said.values())}) == 3, "an adapter changes the answer"
    programs = prefill._cache_size(), decode._cache_size()
    check(engine, models, [(prompts()[0], "Sums", 1), (prompts()[4], None, 1), (prompts()[3], "Sums", 1)])
    beside = Engine(sums, adapters={"Sums": other, "again": other}, **SETTINGS)
    check(beside, {**models, None: sums}, [(prompts()[0], name, 1) for name in (None, "again", "Sums")])
    assert (prefill._cache_size(), decode._cache_size()) == programs


def answers_of(engine, requests):
    """The tokens of each request (prompt, adapter, n), of all its answers one after another."""
    options = [GenerationOptions(max_new_tokens=10, n=n) for _, _, n in requests]
    numbers = [engine.add(each[0], one, adapter=each[1]) for each, one in zip(requests, options, strict=True)]
    found = {number: [] for number in numbers}
    for piece in engine.run():
        found[piece.request] += piece.tokens
    return list(found.values())


def greedy(model, prompt, count=10):
    """The likeliest tokens, each by a forward pass of its own."""
    answer = []
    for _ in range(count):
        answer.append(int(whole_passes(model, prompt, [*answer, 0])[-1].argmax()))
    return answer


@pytest.mark.exhaustive("1")
@pytest.mark.parametrize("devices", [1, 2])
def test_adapters_come_and_go_while_rows_decode(devices, caplog):
    """Rows that use one that is dropped, or wait for it, end on it; nothing compiles, and memory stays as it is."""
    models = {None: base(), "sums": adapter("sums"), "Sums": adapter("Sums")}
    settings = {"adapter_slots": 3, "adapter_rank": 4, **SETTINGS}
    engine = Engines(base(), jax.devices()[:2], **settings) if devices == 2 else Engine(base(), **settings)
    engine.load_adapter("Sums", models["Sums"])
    engine.load_adapter("third", models["sums"])
    expected = {name: greedy(model, prompts()[0]) for name, model in models.items()}
    assert answers_of(engine, [(prompts()[0], name, 1) for name in ("Sums", None)]) == [
        expected["Sums"],
        expected[None],
    ]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engine.load_adapter("sums", models["sums"])
        numbers = [engine.add(prompts()[0], GenerationOptions(max_new_tokens=10, n=4), adapter="sums")]
        numbers += [engine.add(prompts()[0], GenerationOptions(max_new_tokens=10), adapter="Sums")]
        pieces = engine.step()
        engine.drop_adapter("sums")
        assert engine.adapter_names == ("Sums", "third")
        with pytest.raises(ConfigError, match="adapter: expected one of Sums, third, got 'sums'"):
            engine.add(prompts()[0], adapter="sums")
        with pytest.raises(
            ConfigError, match="free slot .* the adapters Sums, third; answers of dropped ones have not ended"
        ):
            engine.load_adapter("next", models["sums"])
        pieces += engine.run()
        answers = [[token for piece in pieces if piece.request == each for token in piece.tokens] for each in numbers]
        assert sorted(answers[0]) == sorted(expected["sums"] * 4) and answers[1] == expected["Sums"]
        engine.load_adapter("next", models["sums"])
        both = [(prompts()[0], "next", 1), (prompts()[0], "Sums", 1)]
        assert answers_of(engine, both) == [expected["sums"], expected["Sums"]]
        gc.collect()  # what other tests have left would be collected meanwhile
        held = sum(array.nbytes for array in jax.live_arrays())
        for number in range(20):
            engine.drop_adapter("next")
            engine.load_adapter("next", models["Sums" if number % 2 == 0 else "sums"])
        assert answers_of(engine, both) == [expected["sums"], expected["Sums"]], "nothing of another is left"
        gc.collect()
        assert sum(array.nbytes for array in jax.live_arrays()) == held
    assert not [record.message for record in caplog.records if "Compiling" in record.message]


def test_generate_takes_an_adapter_for_each_prompt():
    models = {None: base(), "sums": adapter("sums"), "Sums": adapter("Sums")}
    names = ["Sums", None, "sums", "Sums"]
    chosen = [models[name] if name else None for name in names]
    given = {"max_new_tokens": 10, "eos_token_id": []}
    found = face.generate(base(), [prompts()[0]] * 4, adapter=chosen, **given)[:, len(prompts()[0]) :].tolist()
    for name, answer in zip(names, found, strict=True):
        assert answer == whole_passes(models[name], prompts()[0], answer).argmax(-1).tolist()
    plain = base().replace(tokenizer=None)
    every = text.answers(plain, [prompts()[0]] * 4, GenerationOptions(max_new_tokens=10), adapter=models["sums"])
    assert [list(one.token_ids) for [one] in every] == [found[2]] * 4 and found[1] != found[2]
    for wrong, message in (
        (chosen[:2], "adapter: expected one for each of 4 prompts, got 2"),
        ("sums", "adapter: expected a model with an adapter, as FastLanguageModel.load_adapter gives it, got 'sums'"),
        (base(), "got one without; None chooses the base"),
    ):
        with pytest.raises(ConfigError, match=message):
            face.generate(base(), [prompts()[0]] * 4, adapter=wrong, **given)


def of_another_rank():
    return tiny.adapted(base(), r=5, target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("there", lambda: adapter("sums"), "'there': expected a name that no adapter has, got one of there; drop it"),
        ("", lambda: adapter("sums"), "expected a name of at least one character"),
        ("odd", base, "got one without; None chooses the base"),
        ("odd", of_another_rank, r"expected a rank of at most 4 \(adapter_rank\), got 5"),
        ("odd", lambda: adapter("sums", united=False), r"differs in biases, base \("),
    ],
)
def test_an_adapter_without_room_is_refused_by_name(name, other, message):
    engine = Engine(base(), adapters={"there": adapter("sums")}, adapter_slots=2, rows=2)
    with pytest.raises(ConfigError, match=message) as error:
        engine.load_adapter(name, other())
    assert str(error.value).startswith(f"adapters: {name!r}: expected") and engine.adapter_names == ("there",)


def test_slots_are_as_the_adapters_that_were_given():
    """Without a number of slots an adapter that was dropped makes room for one on the same modules, up to its rank."""
    few = tiny.adapted(base(), seed=3, r=2, target_modules=["q_proj"])
    engine = Engine(base(), adapters={"few": few}, rows=2)
    for other, message in ((adapter("sums"), "1 slots .* with the adapters few"),):
        with pytest.raises(ConfigError, match=message):
            engine.load_adapter("more", other)
    engine.drop_adapter("few")
    for changes, message in (({"r": 2, "target_modules": ["q_proj", "v_proj"]}, "on v_proj too"), ({"r": 3}, "got 3")):
        with pytest.raises(ConfigError, match=message):
            engine.load_adapter("more", tiny.adapted(base(), **{"target_modules": ["q_proj"], **changes}))
    with pytest.raises(ConfigError, match="adapter: expected None, since the engine has no adapters, got 'few'"):
        engine.drop_adapter("few")
    for settings, message in (
        ({"adapter_slots": 0}, "adapter_slots: expected an integer from 1 to 128, got 0"),
        ({"adapter_slots": 1, "adapter_rank": 1, "adapters": {"few": few}}, "expected a rank of at most 1"),
        ({"adapter_rank": 8}, "adapter_rank: expected adapter_slots beside it, got 8 alone"),
        ({"adapter_slots": 1, "adapters": {"few": few, "again": few}}, "1 slots"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(base(), rows=2, **settings)


def test_devices_that_answer_as_one_have_the_same_adapters():
    models = {None: base(), "sums": adapter("sums"), "Sums": adapter("Sums"), "again": adapter("Sums")}
    adapters = {name: model for name, model in models.items() if name}
    devices = Engines(base(), jax.devices()[:2], adapters=adapters, **SETTINGS)
    check(devices, models, [(prompts()[0], name, 1) for name in ("sums", "Sums", None, "sums")])


@pytest.mark.exhaustive("deepseek_v3")
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen2_moe", ["o_proj", "shared_expert.down_proj", "shared_expert.up_proj", "shared_expert_gate"]),
        ("deepseek_v3", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]),
    ],
    ids=["qwen2_moe", "deepseek_v3"],
)
def test_shared_experts_and_latents_take_several_adapters(family, modules, tmp_path):
    """And a prompt of two pieces, between which others decode."""
    config = {**MIXTURES[family], "initializer_range": 0.3}
    moe = tiny.model(tmp_path, config).value
    models = {seed: tiny.adapted(moe, int(seed), lora_alpha=64, target_modules=modules) for seed in ("1", "2")}
    engine = Engine(moe, adapters=models, rows=4, steps=4, prefill_tokens=32)
    short, long = (prompt.tolist() for prompt in tiny.documents(config, (12, 40)))
    check(engine, {**models, None: moe}, [(short, "1", 1), (long, None, 1), (short, None, 1), (short, "2", 1)])


@pytest.mark.parametrize("names", [["sums", "Sums"], []])
def test_a_name_that_no_adapter_has_is_refused_with_those_there_are(names):
    engine = Engine(base(), adapters={name: adapter(name) for name in names}, rows=2)
    there = "one of sums, Sums" if names else "None, since the engine has no adapters"
    for name in ("SUMS", "sum", "", 3, ["sums"]):
        with pytest.raises(ConfigError, match=f"adapter: expected {there}, got "):
            engine.add([1], adapter=name)
    assert not engine.busy
    if names:
        with pytest.raises(ConfigError, match="engine.model: expected the one with adapters"):
            engine.model = base()


def of_tables():
    return tiny.adapted(base(), use_dora=True, target_modules=["q_proj", "embed_tokens", "lm_head"])


def of_rows():
    return tiny.adapted(base(), target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[1, 2])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (base, "got one without; None chooses the base"),
        (of_tables, "of the layers alone, got a trained embed_tokens, use_dora, a trained lm_head; merge it"),
        (of_rows, "got trainable_token_indices, a trained lm_head; merge it"),
        (lambda: adapter("sums", united=False), r"differs in biases, base \("),
        (lambda: tiny.adapted(base(), target_modules=["q_proj"], layers_to_transform=[0]), "layers_to_transform"),
    ],
)
def test_what_does_not_join_is_refused_by_name(other, message):
    with pytest.raises(ConfigError, match=message) as error:
        Engine(base(), adapters={"sums": adapter("sums"), "odd": other()}, rows=2)
    assert str(error.value).startswith("adapters: 'odd': expected")
