"""float32 is float32 in every product; 16 bits accumulate in float32; named modules stay in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.execution.precision import dtype_name
from fastjax.language_model import FastLanguageModel
from fastjax.lora.export import export_adapters
from fastjax.models.decoder import lm_logits
from fastjax.quantization import NF4Weight
from fastjax.training.loss import loss_sums
from tests.support import tiny
from tests.support.hlo import equations

SHAPES = {"hidden_size": 64, "intermediate_size": 128}
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
#: (load options, adapter options; None: full fine-tuning)
MODELS = {
    "NF4, DoRA and dropout everywhere": (
        {"load_in_4bit": True},
        {"target_modules": EVERYTHING, "use_dora": True, "lora_dropout": 0.5},
    ),
    "LoRA and rows of tokens": ({}, {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [4]}}),
    "LoRA and whole tables": ({}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "full": ({"full_finetuning": True}, None),
}


def make(name, **options):
    config = tiny.config(**SHAPES, tie_word_embeddings=False)
    load, adapter = MODELS[name]
    model = tiny.model(tiny.shared_folder(**SHAPES, tie_word_embeddings=False), config, **{**load, **options})
    return model if adapter is None else tiny.adapted(model, **adapter)


def loss(model):
    """Loss of a packed batch as a function of the trained arrays, with dropout and noise."""
    tokens, targets, segments, positions = tiny.rows([tiny.documents(model.hf_config, (17, 20))], 40)

    def of(trainable):
        decoder = nnx.merge(model.graphdef, trainable, model.frozen)
        rows = Batch(*map(jnp.asarray, (tokens, targets, segments, positions)))
        sums = loss_sums(decoder, model.trainable_filter, rows, key=jax.random.key(0))
        return sums.loss_sum

    return of


def found(name, **options):
    model = make(name, **options)
    traced = jax.make_jaxpr(jax.value_and_grad(loss(model)))(model.trainable)
    every = [equation for equation in equations(traced) if equation.primitive.name == "dot_general"]
    assert len(every) > 20, "forward, backward and recomputation of a layer alone have more"
    return every


@pytest.mark.parametrize(
    ("name", "param_dtype"), [(name, "float32") for name in MODELS] + [("LoRA and whole tables", "bfloat16")]
)
def test_float32_reduces_nothing(name, param_dtype):
    for equation in found(name, dtype="float32", param_dtype=param_dtype):
        assert {var.aval.dtype for var in (*equation.invars, *equation.outvars)} == {jnp.dtype(jnp.float32)}
        assert set(equation.params["precision"]) == {jax.lax.Precision.HIGHEST}, equation
        assert equation.params["preferred_element_type"] in (None, jnp.float32)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "bfloat16") for name in MODELS] + [("LoRA and rows of tokens", "float16")]
)
def test_16_bits_multiply_16_bits_or_all_of_float32(name, dtype):
    """No product of float32 in 16-bit training is left to TF32; scores of attention come in float32."""
    every = found(name, dtype=dtype)
    scores = 0
    for equation in every:
        kinds = {str(var.aval.dtype) for var in equation.invars}
        assert kinds in ({dtype}, {"float32"}), equation
        if kinds == {"float32"}:
            assert set(equation.params["precision"]) == {jax.lax.Precision.HIGHEST}, equation
        scores += kinds == {dtype} and equation.params["preferred_element_type"] == jnp.float32
    assert scores >= 6, "two of attention forward, as many again for the recomputation, four backward"
    assert sum({str(v.aval.dtype) for v in e.invars} == {dtype} for e in every) > len(every) / 2


#: What 16 bits may do to logits: a rounding for each of about 30 results on the way through three layers, which add up
#: like a random walk, of the largest logit, with a margin of 3; measured: a third of it.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.exhaustive("bfloat16")
@pytest.mark.parametrize("dtype", ROUNDING)
def test_16_bits_give_the_logits_of_float32(dtype):
    """One precision of parameters, so that only the computation differs."""
    tokens, _, segments, positions = tiny.rows(
        [tiny.documents(tiny.CONFIG, (31, 9)), tiny.documents(tiny.CONFIG, (40,))], 40
    )
    folder = tiny.shared_folder()
    exact = tiny.logits(tiny.adapted(tiny.model(folder, tiny.CONFIG)), tokens, positions, segments)
    ours = tiny.logits(tiny.adapted(tiny.model(folder, tiny.CONFIG, dtype=dtype)), tokens, positions, segments)
    seen = segments > 0
    assert np.isfinite(ours).all()
    error = np.abs(ours - exact)[seen].max() / np.abs(exact[seen]).max()
    assert ROUNDING[dtype] / 8 < error < 3 * np.sqrt(30) * ROUNDING[dtype]


@pytest.mark.parametrize(("full", "param_dtype"), [(False, "float16"), (True, "float32"), (True, "bfloat16")])
def test_what_is_trained_has_the_parameter_dtype_and_the_rest_the_compute_dtype(full, param_dtype):
    name = "full" if full else "LoRA and whole tables"
    model = make(name, dtype="bfloat16", param_dtype=param_dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.trainable)} == {param_dtype}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.frozen)} <= {"bfloat16"}
    grads = jax.eval_shape(jax.grad(loss(model)), model.trainable)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(grads)} == {param_dtype}


def held(model, index):
    """dtype, or "nf4", of each weight of a layer."""
    runs = [[model.frozen["layers"][r][p] for p in range(run.period)] for r, run in enumerate(model.plan)]
    layer = tiny.layer_of(runs, model.plan, index)
    found = {}
    for name, block in layer.items():
        for group, tree in block.items() if name in ("self_attn", "mlp") else [("", block)]:
            weight = tree["weight"]
            parts = getattr(weight, "weights", (weight,))
            found[f"{name}.{group}".rstrip(".")] = [
                "nf4" if isinstance(part, NF4Weight) else str(part.dtype) for part in parts
            ]
    return found


def test_named_modules_are_held_in_float32_and_not_quantised():
    names = ["norm", "lm_head", "layers.1.mlp", "input_layernorm", "layers.0.self_attn.q_proj"]
    model = make("NF4, DoRA and dropout everywhere", dtype="bfloat16", float32_modules=names)
    frozen = model.frozen
    assert frozen["norm"]["weight"].dtype == frozen["lm_head"]["weight"].dtype == jnp.float32
    assert frozen["embed_tokens"]["weight"].dtype == jnp.bfloat16
    plain = {
        "input_layernorm": ["float32"],
        "self_attn.qkv": ["nf4"],
        "self_attn.o": ["nf4"],
        "post_attention_layernorm": ["bfloat16"],
        "mlp.gate_up": ["nf4"],
        "mlp.down": ["nf4"],
    }
    assert held(model, 0) == plain | {"self_attn.qkv": ["float32", "nf4", "nf4"]}
    assert held(model, 1) == plain | {"mlp.gate_up": ["float32"], "mlp.down": ["float32"]}
    assert held(model, 2) == plain
    jax.eval_shape(jax.grad(loss(model)), model.trainable)  # parts of three formats fit together


def test_a_model_all_in_float32_modules_multiplies_in_float32():
    every = found(
        "LoRA and whole tables", dtype="bfloat16", float32_modules=["layers", "norm", "lm_head", "embed_tokens"]
    )
    assert {str(var.aval.dtype) for equation in every for var in equation.invars} == {"float32"}
    assert {p for equation in every for p in equation.params["precision"]} == {jax.lax.Precision.HIGHEST}


def test_one_layer_in_float32_is_computed_in_float32():
    """The other two stay in 16 bits."""
    name = "LoRA and whole tables"
    plain, one = (found(name, dtype="bfloat16", float32_modules=names) for names in (None, ["layers.1"]))
    wide, all_wide = (sum(str(e.invars[0].aval.dtype) == "float32" for e in every) for every in (plain, one))
    assert wide == 0 and 0 < all_wide < len(one) / 2


def test_a_float32_head_gives_float32_logits():
    model = make("full", dtype="bfloat16", float32_modules=["lm_head"])
    decoder = model.module()
    hidden = jax.ShapeDtypeStruct((1, 4, 64), jnp.bfloat16)
    assert jax.eval_shape(lambda h: lm_logits(decoder.lm_head, h), hidden).dtype == jnp.float32
    plain = make("full", dtype="bfloat16").module()
    assert jax.eval_shape(lambda h: lm_logits(plain.lm_head, h), hidden).dtype == jnp.bfloat16


def test_full_fine_tuning_with_mixed_parameters_is_saved_whole(tmp_path):
    """float32 parts beside 16-bit ones in a group of projections come back as the tensors that they were."""
    names = ["layers.0.self_attn.v_proj", "norm"]
    model = make("full", dtype="bfloat16", param_dtype="bfloat16", float32_modules=names)
    model.save_pretrained(tmp_path / "saved")
    again = tiny.model(tmp_path / "saved", None, full_finetuning=True)
    original = make("full")
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(again.trainable), jax.tree.leaves(original.trainable), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2.0**-8, err_msg=jax.tree_util.keystr(path))
    assert np.array_equal(again.trainable["norm"]["weight"], original.trainable["norm"]["weight"])


def test_adapters_of_16_bits_are_written_as_they_are(tmp_path):
    model = make("LoRA and rows of tokens", param_dtype="bfloat16")
    model.save_pretrained(tmp_path / "adapter")
    base = tiny.model(model.folder, None, param_dtype="bfloat16")
    again = FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    first, second = (export_adapters(m.trainable, m.plan, False) for m in (model, again))
    assert first.keys() == second.keys()
    for path, array in first.items():
        assert str(array.dtype) == str(second[path].dtype) == "bfloat16" and np.array_equal(array, second[path])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"float32_modules": ["nothing"]}, "float32_modules: no module has the name 'nothing' .*'self_attn.q_proj'"),
        ({"float32_modules": ["layers.9.mlp"]}, "no module has the name 'layers.9.mlp' .*layers.0 to layers.2"),
    ],
)
def test_settings_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        tiny.model(tiny.shared_folder(), tiny.CONFIG, **options)


def test_dtypes_of_libraries_are_their_names():
    assert [dtype_name(given) for given in (jnp.bfloat16, np.float16, jnp.dtype("float32"), "bfloat16", None, 3)] == [
        *("bfloat16", "float16", "float32", "bfloat16", None, 3)
    ]
    torch_s = type("dtype", (), {"__module__": "torch", "__str__": lambda self: "torch.bfloat16"})
    assert dtype_name(torch_s()) == "bfloat16"
