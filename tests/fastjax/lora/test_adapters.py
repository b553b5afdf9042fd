"""Adapters: how they start, what a seed decides, and dropout's masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.lora.dropout import drop
from fastjax.lora.export import export_adapters
from fastjax.lora.initial import initial_arrays
from tests.support import steps, tiny

RANK, IN, OUT = 8, 3000, 2000


def moments(array):
    array = np.asarray(array, np.float64)
    return array.mean(), array.std(), np.abs(array).max()


def uniform(array, bound):
    """Of 16,000 draws and more: mean and deviation within four standard errors of theirs."""
    mean, std, largest = moments(array)
    assert largest <= bound and largest > 0.99 * bound
    assert abs(mean) < 4 * bound / np.sqrt(3 * array.size)
    assert abs(std / (bound / np.sqrt(3)) - 1) < 0.02
    quarters, _ = np.histogram(array, bins=4, range=(-bound, bound))
    assert np.abs(quarters / array.size - 0.25).max() < 0.015


def normal(array, deviation):
    mean, std, _ = moments(array)
    assert abs(mean) < 4 * deviation / np.sqrt(array.size)
    assert abs(std / deviation - 1) < 0.03
    assert abs((np.abs(array) < deviation).mean() - 0.6827) < 0.015


@pytest.mark.parametrize("method", [True, False, "gaussian"])
def test_starts_are_distributed_as_pefts(method):
    a, b = initial_arrays(jax.random.key(0), method, RANK, IN, OUT)
    assert a.shape == (RANK, IN) and b.shape == (OUT, RANK) and a.dtype == b.dtype == jnp.float32
    if method == "gaussian":
        normal(a, 1 / RANK)
    else:
        uniform(a, 1 / np.sqrt(IN))
    if method is False:
        uniform(b, 1 / np.sqrt(RANK))
        assert abs(np.corrcoef(np.asarray(a).ravel()[:OUT], np.asarray(b).ravel()[:OUT])[0, 1]) < 0.1
    else:
        assert not np.any(b)


@pytest.mark.parametrize("rank", [2, 8, 64])
def test_an_orthogonal_start_changes_nothing_and_has_the_scale_of_pefts(rank):
    a, b = (np.asarray(array, np.float64) for array in initial_arrays(jax.random.key(0), "orthogonal", rank, IN, OUT))
    assert a.shape == (rank, IN) and b.shape == (OUT, rank)
    # float32, sums of `rank` products of size 0.01
    assert np.abs(b @ a).max() < 1e-7 * np.sqrt(rank)
    # A is a random [R/2, in] normal matrix times half of an orthogonal one, over ten: so its squares sum to in·R/2/100
    for array, size in ((a, IN), (b, OUT)):
        assert abs((array**2).sum() / (size * rank / 2 / 100) - 1) < 0.1
        assert np.linalg.matrix_rank(array, tol=1e-4) == rank // 2


@pytest.fixture(scope="module")
def base():
    return tiny.model(tiny.shared_folder(), tiny.CONFIG)


def start(base, **options):
    model = FastLanguageModel.get_peft_model(base, **{"r": 4, **options})
    return export_adapters(model.trainable, model.plan, False)


def test_the_seed_decides_the_start(base):
    first, again, other = (start(base, random_state=seed) for seed in (1, 1, 2))
    steps.assert_same(again, first)
    for name, array in first.items():
        if "lora_A" in name:
            assert not np.any(array == other[name]), name


def test_no_two_modules_start_alike(base):
    arrays = [array for name, array in start(base).items() if "lora_A" in name]
    assert len(arrays) == 7 * 3
    firsts = {array.ravel()[0].tobytes() for array in arrays}
    assert len(firsts) == len(arrays)


def test_a_modules_start_depends_neither_on_the_loop_nor_on_the_other_modules(base):
    """So that an experiment with fewer target modules compares like with like."""
    unrolled = tiny.model(tiny.shared_folder(), tiny.CONFIG, layer_loop="unroll")
    everything = start(base)
    steps.assert_same(start(unrolled), everything)
    for name, array in start(base, target_modules=["k_proj"], layers_to_transform=[1]).items():
        assert np.array_equal(array, everything[name])


@pytest.mark.exhaustive("options1", "options2")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"init_lora_weights": "orthogonal"}, {"use_rslora": True}])
def test_a_fresh_adapter_changes_nothing(base, options):
    tokens = np.stack(tiny.documents(tiny.CONFIG, (20, 20)))
    model = FastLanguageModel.get_peft_model(
        base, r=4, target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"], **options
    )
    # DoRA divides by a norm that it has just multiplied with: float32
    np.testing.assert_allclose(tiny.logits(model, tokens), tiny.logits(base, tokens), rtol=0, atol=2e-5)


def test_an_embeddings_start(base):
    arrays = start(base, target_modules=["embed_tokens"], r=64)
    assert not np.any(arrays["embed_tokens.lora_embedding_A"])
    normal(arrays["embed_tokens.lora_embedding_B"], 1.0)
    arrays = start(base, target_modules=["embed_tokens"], r=64, init_lora_weights=False)
    normal(arrays["embed_tokens.lora_embedding_A"], 1.0)


def test_dropout_is_inverted_and_of_the_given_rate():
    x = jnp.ones((4, 100, 100))
    dropped = np.asarray(drop(x, jax.random.key(0), "q_proj", 0.2))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / np.float32(0.8))}
    assert abs((dropped == 0).mean() - 0.2) < 0.01
    assert drop(x, None, "q_proj", 0.2) is x and drop(x, jax.random.key(0), "q_proj", 0.0) is x


def test_every_projection_draws_masks_of_its_own():
    x = jnp.ones((1, 100, 100))
    masks = [
        np.asarray(drop(x, jax.random.key(key), name, 0.5)) > 0
        for key in (0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert abs((mask == other).mean() - 0.5) < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["nothing"]}, "matches no module"),
        ({"modules_to_save": ["norm"]}, "modules_to_save: expected some of"),
        ({"bias": "all"}, "bias: expected 'none', got 'all'"),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "even rank"),
    ],
)
def test_what_is_refused(base, options, message):
    with pytest.raises(ConfigError, match=message):
        FastLanguageModel.get_peft_model(base, **options)


def test_adapters_on_a_table_are_told(base, capsys):
    FastLanguageModel.get_peft_model(base, r=2, target_modules=["q_proj"])
    assert capsys.readouterr().err == ""
    FastLanguageModel.get_peft_model(base, r=2, target_modules=["q_proj", "embed_tokens"])
    assert capsys.readouterr().err.startswith("note: target_modules: low-rank adapters on embed_tokens, as in PEFT")


def test_an_adapter_that_does_not_fit_is_refused_with_every_misfit(base, tmp_path):
    (tmp_path / "wide").mkdir()
    wide = tiny.model(tmp_path / "wide", tiny.config(hidden_size=40, num_hidden_layers=4))
    FastLanguageModel.get_peft_model(wide, r=4, target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError) as error:
        FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    assert "layers.0.self_attn.q_proj.lora_A: expected [4, 48], got [4, 40]" in str(error.value)
    assert "layers.3.self_attn.q_proj.lora_A: no module of this model takes it" in str(error.value)
