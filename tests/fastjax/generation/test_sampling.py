"""Sampling on the device against exact distributions in float64, and a row's independence of its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.generation.filters import kept
from fastjax.generation.options import GenerationOptions
from fastjax.generation.sampling import host_arrays, pick
from tests.support.hlo import equations
from tests.support.sampling import distribution, log_softmax

WORDS = 301  # more than two blocks of the search for the likeliest, the last of them filled up
PROMPT, ANSWER = (0, 3), (3, 7, 7)
picked = jax.jit(pick)


def run(logits, options, *, prompt=(), answer=(), numbers=None, choices=None):
    """The tokens of rows, all with the same tokens before, and what is told of them."""
    rows, words = logits.shape
    seen = np.zeros(words, np.int32)
    seen[list(prompt)] = 1
    np.add.at(seen, list(answer), 2)
    found = picked(
        jnp.asarray(logits),
        host_arrays([one.checked(words) for one in options], [0] * rows if choices is None else choices, words),
        jnp.tile(seen, (rows, 1)),
        jnp.asarray(np.arange(rows) if numbers is None else numbers, jnp.int32),
    )
    return jax.tree.map(np.asarray, found)


def random_logits(rows, words=WORDS, dtype=np.float32):
    """Logits with one masked word and two that are level."""
    logits = (np.random.default_rng(words).normal(size=(rows, words)) * 3).astype(np.float32)
    logits[:, 4], logits[:, 6] = -np.inf, logits[:, 5]
    return np.asarray(jnp.asarray(logits, dtype))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.7},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": -0.5, "logit_bias": {3: 2.5, 1: -100}},
        {"temperature": 1.0, "logit_bias": {2: 100, 5: 100}, "frequency_penalty": 2.0},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(settings):
    """By χ² of 8,192 tokens of an answer, and of the pairs of one and the next."""
    rows, options = 8192, GenerationOptions(**settings, seed=5)
    logits = random_logits(1, 12)[0] / 2
    found = run(np.tile(logits, (rows, 1)), [options] * rows, prompt=PROMPT, answer=ANSWER)
    expected = distribution(logits, options, PROMPT, ANSWER)
    counts = np.bincount(found.tokens, minlength=12)
    assert not counts[expected == 0].any()
    pairs = np.bincount(found.tokens[:-1] * 12 + found.tokens[1:], minlength=144)
    for count, probability in ((counts, expected), (pairs, np.outer(expected, expected).ravel())):
        likely = count.sum() * probability > 3
        squares = (count - count.sum() * probability)[likely] ** 2 / (count.sum() * probability)[likely]
        free = likely.sum() - 1
        assert squares.sum() < free + 4 * np.sqrt(2 * free) + 8, "the chance is below 1e-4"
    np.testing.assert_allclose(found.log_probs, log_softmax(logits)[found.tokens], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_filters_leave_what_they_say(dtype):
    """Random settings of 256 rows in float64, for each dtype with its number of passes."""
    draw, rows = np.random.default_rng(0), 256
    logits = random_logits(rows, dtype=dtype)
    options = [
        GenerationOptions(
            temperature=float(draw.uniform(0.1, 3)),
            top_k=draw.choice([None, 0, -1, 1, 2, 40, WORDS - 1, WORDS, 2**31 - 1]),
            top_p=draw.choice([None, 0.0, 1e-9, 0.3, 0.9, 0.999, 1.0]),
            min_p=draw.choice([None, 0.0, 1e-4, 0.1, 1.0]),
        )
        for _ in range(rows)
    ]
    arrays = host_arrays(options, [0] * rows, WORDS)
    top, temperature = (np.float32(column)[:, None] for column in (logits.max(-1), arrays.temperature))
    found = jax.jit(lambda x, *own: kept(x, lambda wide: (wide - top) / temperature, *own))(
        jnp.asarray(logits), arrays.top_k, arrays.top_p, arrays.min_p
    )
    expected = np.asarray([distribution(*row) > 0 for row in zip(logits, options, strict=True)])
    # A masked word, which is -inf, is drawn never: whether a filter "keeps" it is all the same.
    assert ((np.asarray(found) & np.isfinite(logits)) == expected).all()
    assert {1, WORDS - 1} < set(expected.sum(-1).tolist())


def test_what_is_off_changes_no_bit():
    """Also beside rows that ask for everything, and beside a token of the prompt."""
    off = [
        *({"top_k": k} for k in (None, 0, -1, WORDS, WORDS + 1, 2**32 - 1)),
        *(
            {"top_p": 1.0},
            {"min_p": 0.0},
            {"min_p": None},
            {"repetition_penalty": 1.0},
            {"logit_bias": {7: 0.0, 8: 1e-60}},
        ),
        *({"presence_penalty": 0.0, "frequency_penalty": -0.0}, {"top_logprobs": 0}),
    ]
    everything = {
        **{"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "top_logprobs": 20},
        **{"presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {3: 5.0, 8: -100, 9: 100}},
    }
    logits = np.tile(random_logits(1), (64, 1))
    for temperature in (0.0, 1.5):
        plain = run(logits, [GenerationOptions(temperature=temperature)] * 64, prompt=PROMPT, answer=ANSWER)
        for settings in off:
            options = [GenerationOptions(temperature=temperature, **settings)] * 64
            found = run(logits, options, prompt=PROMPT, answer=ANSWER)
            assert (found.tokens == plain.tokens).all() and (found.log_probs == plain.log_probs).all(), settings
        mixed = [GenerationOptions(temperature=temperature), GenerationOptions(**everything)] * 32
        found = run(logits, mixed, prompt=PROMPT, answer=ANSWER)
        assert (found.tokens == plain.tokens)[::2].all() and (found.tokens == 9)[1::2].all()
        assert (found.log_probs == plain.log_probs)[::2].all()
    assert len(set(plain.tokens.tolist())) > 5, "nothing is drawn"


def test_no_temperature_takes_the_likeliest_token():
    logits = random_logits(64)
    beside = {"top_k": 3, "top_p": 0.2, "min_p": 0.9, "seed": 7, "n": 4}
    for temperature in (0.0, 1e-46, 1e-39, 1e-38):  # the second is 0 in float32, the third on a GPU
        found = run(logits, [GenerationOptions(temperature=temperature, **beside)] * 64, choices=[1, 2, 3, 0] * 16)
        assert (found.tokens == logits.argmax(-1)).all(), temperature
        assert np.isfinite(found.log_probs).all()
    drawn = run(logits, [GenerationOptions(temperature=2.0, top_p=0.0), GenerationOptions(temperature=9.0)] * 32)
    assert (drawn.tokens == logits.argmax(-1))[::2].all() and not (drawn.tokens == logits.argmax(-1))[1::2].all()


def test_greedy_tokens_have_the_rows_biases_and_penalties():
    """Repetition counts prompt and answer, the others the answer: random rows in one batch."""
    draw, rows = np.random.default_rng(3), 64
    logits = random_logits(rows) / 4
    logits[:, [0, 3, 7, 11]] += 2
    options = [
        GenerationOptions(
            repetition_penalty=float(draw.choice([1, 0.7, 3])),
            presence_penalty=float(draw.choice([0, -2, 0.9])),
            frequency_penalty=float(draw.choice([0, -1, 1.1])),
            logit_bias={} if draw.random() < 0.3 else {3: float(draw.choice([-100, 0.5])), 7: 1.0, 11: -1.0},
        )
        for _ in range(rows)
    ]
    found = run(logits, options, prompt=PROMPT, answer=ANSWER)
    rows_of = zip(logits, options, strict=True)
    expected = [distribution(row, option, PROMPT, ANSWER).argmax() for row, option in rows_of]
    assert found.tokens.tolist() == expected
    assert (found.tokens != logits.argmax(-1)).mean() > 0.2
    np.testing.assert_allclose(found.log_probs, log_softmax(logits)[np.arange(rows), found.tokens], atol=1e-5)


def test_a_bias_bans_and_forces():
    """Also what the model masks, whatever is beside it."""
    logits = random_logits(64)
    best = int(logits[0].argmax())
    banned = run(logits[:1].repeat(64, 0), [GenerationOptions(temperature=0.3, logit_bias={best: -100})] * 64)
    assert best not in banned.tokens and len(set(banned.tokens.tolist())) > 1
    forced = GenerationOptions(temperature=50.0, logit_bias={4: 100, 5: 99}, repetition_penalty=50.0)
    found = run(logits, [forced] * 64, prompt=(4,))
    assert (found.tokens == 4).all() and (found.log_probs == -np.inf).all()


def test_a_rows_tokens_depend_on_nothing_beside_it():
    """A row draws its tokens alone, in other orders, and among more rows that ask for more."""
    rows, numbers = 64, np.arange(64) % 5
    logits, draw = random_logits(rows), np.random.default_rng(1)
    options = [
        GenerationOptions(temperature=1.5, seed=row % 3, **settings)
        for row, settings in zip(range(rows), [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05}] * 16, strict=True)
    ]
    together = run(logits, options, numbers=numbers).tokens
    for others in (draw.permutation(rows), np.array([5]), np.array([62])):
        found = run(logits[others], [options[row] for row in others], numbers=numbers[others])
        assert (found.tokens == together[others]).all()


def test_seed_choice_and_number_draw_tokens_of_their_own():
    logits = random_logits(1).repeat(64, 0) / 4
    seeded = [GenerationOptions(temperature=1.0, seed=seed) for seed in (0, 2**32 - 1)]

    def tokens(option, choice, numbers=None):
        return tuple(run(logits, [option] * 64, choices=[choice] * 64, numbers=numbers).tokens.tolist())

    found = [tokens(option, choice) for option in seeded for choice in range(4)]
    assert len(set(found)) == 8
    assert [tokens(option, choice) for option in seeded for choice in range(4)] == found
    assert len(set(tokens(seeded[0], 0, [9] * 64))) == 1


@pytest.mark.parametrize("words", [WORDS, 12])
def test_the_likeliest_are_sorted_and_have_the_models_log_probabilities(words):
    """Beside a temperature, filters, a penalty and a bias; masked words are none of them."""
    logits = random_logits(8, words, jnp.bfloat16)  # with many tokens that are level
    settings = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": {3: -100}, "top_k": 2}
    options = [GenerationOptions(**settings, top_logprobs=wanted) for wanted in (None, 5) * 4]
    found = run(logits, options, answer=ANSWER)
    expected = log_softmax(logits)
    for row in range(8):
        order = [token for token in np.argsort(-expected[row], kind="stable") if expected[row][token] > -np.inf]
        order = (order[:20] + [-1] * 20)[:20]
        assert found.likeliest_ids[row].tolist() == order
        values = np.where(np.asarray(order) < 0, -np.inf, expected[row][order])
        np.testing.assert_allclose(found.likeliest[row], values, atol=1e-5)
        assert abs(found.log_probs[row] - expected[row, found.tokens[row]]) < 1e-5
    assert not run(logits, [GenerationOptions()] * 8).likeliest.any()


def test_nothing_compiles_again_and_nothing_is_computed_unasked():
    """Without a question passes over the logits are those of log-softmax; the rest stands in branches."""
    logits, none = random_logits(64), host_arrays([GenerationOptions()] * 64, [0] * 64, WORDS)
    run(logits, [GenerationOptions()] * 64)
    count = picked._cache_size()
    run(logits, [GenerationOptions(temperature=1.0, top_k=3, top_logprobs=4, logit_bias={1: 2.0}, seed=9)] * 64)
    assert picked._cache_size() == count
    program = jax.make_jaxpr(pick)(logits, none, jnp.zeros((64, WORDS), jnp.int32), jnp.zeros(64, jnp.int32))
    made = [one for one in program.eqns if any(WORDS in var.aval.shape for var in (*one.invars, *one.outvars))]
    sums = {"argmax", "exp", "sub", "reduce_sum"}
    assert {one.primitive.name for one in made} == sums | {"cond", "jit"}  # a jit: take_along_axis
    zeros = picked(
        logits, jax.tree.map(np.zeros_like, none), jnp.ones((64, WORDS), jnp.int32), jnp.zeros(64, jnp.int32)
    )
    assert (zeros.tokens == logits.argmax(-1)).all() and np.isfinite(zeros.log_probs).all()


def test_unchanged_logits_are_read_in_their_dtype():
    """No loop or branch takes them as an array in float32, which would be written first."""
    logits, none = random_logits(4, dtype=jnp.bfloat16), host_arrays([GenerationOptions()] * 4, [0] * 4, WORDS)
    program = jax.make_jaxpr(pick)(logits, none, jnp.zeros((4, WORDS), jnp.int32), jnp.zeros(4, jnp.int32)).jaxpr
    _, by_settings = next(one for one in program.eqns if one.primitive.name == "cond").params["branches"]
    unchanged, changed = next(one for one in by_settings.eqns if one.primitive.name == "cond").params["branches"]

    def taken(branch):
        inner = [one for one in equations(branch) if one.primitive.name in ("cond", "while", "scan")]
        return {str(var.aval.dtype) for one in inner for var in one.invars if var.aval.shape == (4, WORDS)}

    assert taken(unchanged) == {"bfloat16"}
    assert taken(changed) == {"float32", "int32"}
