"""A whole train step on the card: loss and every gradient, against float32 on the CPU from the same weights.

`pytest -m gpu -rP` shows the worst leaf of each step. On a machine without a card `--gpu-tests-anywhere` runs the same
steps on its CPU.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from convert.families.mapping import read_config
from fastjax.data.batches import Batch
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.variants import with_checkpointing
from fastjax.parallel import make_mesh
from fastjax.training.compiled import reproducible
from fastjax.training.step import init_state, make_train_step
from pallas_kernels import dispatch
from tests.support import device_steps, families, steps, tiny

pytestmark = pytest.mark.gpu

BF16, F16, F32 = "bfloat16", "float16", "float32"

#: Sizes that every kernel takes, and biases everywhere.
KERNELS = tiny.config(
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    head_dim=64,
    hidden_act="silu",
    initializer_range=0.06,
    tie_word_embeddings=False,
)
#: Without biases, as most families have them: then the ways to queries, keys and values and to the gated block are
#: units with their norms.
PLAIN = KERNELS | {"attention_bias": False, "mlp_bias": False}
#: A layer of Llama 3's 8 billion parameters.
LARGE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
#: Experts of sizes that every kernel takes. Every token goes to all of them: of fewer, rounding would choose others.
EXPERTS = {name: value for name, value in KERNELS.items() if name != "mlp_bias"} | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
EXPERT_MATRICES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FP8_BLOCK = (64, 128)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        dtypes: in which the card computes it, one after another.
        adapter: of `get_peft_model`; None: every weight is trained.
        config: of the model.
        base: "nf4", "fp8" or "plain".
        rows: a key of `ROWS`.
        loop: of the layers.
        remat: the checkpointing policy.
        gated: which implementation computes the gated block's inside in 16 bits on Hopper, or None where the block is
            not one unit with its adapters.
        accumulation: microbatches.
        float32_modules: modules in float32.
        base_compute: dtype of the frozen matrices' products, or None.
        autotuned: whether XLA tries its GEMMs out.
    """

    dtypes: Sequence[str]
    adapter: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=lambda: KERNELS)
    base: str = "nf4"
    rows: str = "packed"
    loop: str = "scan"
    remat: str = "full"
    gated: str | None = "triton"
    accumulation: int = 1
    float32_modules: Sequence[str] | None = None
    base_compute: str | None = None
    autotuned: bool = False


#: Lengths of the documents of each row, and tokens a row. Ragged rows are no whole tiles: their gated blocks are XLA's.
ROWS = {
    "packed": ([(70, 40), (50, 9, 1, 37)], 128),
    "full": ([(128,), (128,)], 128),
    "ragged": ([(60, 33), (100,)], 100),
    "short": ([(33, 7, 12), (55,)], 55),
}
TABLES = ["embed_tokens", "lm_head"]
DROPOUT = {"lora_dropout": 0.3}
CASES = {
    "r 16": Case([BF16, F16, F32], {"r": 16}, autotuned=True),
    "r 4, full rows, projections": Case([BF16], {"r": 4}, rows="full", remat="projections"),
    "r 64, unrolled, none": Case([BF16], {"r": 64}, loop="unroll", remat="none"),
    "r 7, unrolled, projections": Case([F16], {"r": 7}, loop="unroll", remat="projections"),
    "r 16, gated by XLA": Case([BF16, F16], {"r": 16}, rows="ragged", gated="xla"),
    "dropout": Case([BF16, F32], {"r": 16, **DROPOUT}, remat="projections"),
    "DoRA": Case([BF16], {"r": 16, "use_dora": True}, gated=None),
    "DoRA, dropout, unrolled, none": Case(
        [F16, F32], {"r": 7, "use_dora": True, **DROPOUT}, loop="unroll", remat="none", gated=None
    ),
    "16-bit base": Case([BF16, F16], {"r": 64}, base="plain", autotuned=True),
    "16-bit base, full rows, DoRA": Case(
        [BF16], {"r": 4, "use_dora": True}, base="plain", rows="full", remat="none", gated=None
    ),
    "16-bit base, ragged rows, dropout": Case(
        [BF16], {"r": 7, **DROPOUT}, base="plain", rows="ragged", loop="unroll", gated="xla"
    ),
    "FP8 base": Case([BF16, F16, F32], {"r": 16}, base="fp8", autotuned=True),
    "FP8 base, full rows, unrolled": Case(
        [BF16], {"r": 64, **DROPOUT}, base="fp8", rows="full", loop="unroll", remat="projections"
    ),
    "FP8 base, DoRA": Case([F16], {"r": 4, "use_dora": True}, base="fp8", remat="none", gated=None),
    "every weight": Case([BF16, F16, F32], None, base="plain", autotuned=True),
    "every weight, tied, full rows, none": Case(
        [BF16],
        None,
        KERNELS | {"tie_word_embeddings": True},
        base="plain",
        rows="full",
        loop="unroll",
        remat="none",
        accumulation=2,
    ),
    "dropout, trained tables, mixed ranks": Case(
        [BF16], {"r": 16, "rank_pattern": {r"layers\.1\..*": 4}, "modules_to_save": TABLES, **DROPOUT}, accumulation=2
    ),
    "adapted tables": Case(
        [BF16],
        {"r": 16, "target_modules": ["q_proj", "v_proj", "up_proj", *TABLES], **DROPOUT},
        remat="projections",
    ),
    "trained tokens": Case([F16], {"r": 4, "trainable_token_indices": [5, 9, 17]}, rows="full"),
    "experts": Case([BF16], {"r": 16, "target_parameters": EXPERT_MATRICES}, EXPERTS, gated=None, autotuned=True),
    "experts, 16-bit base, unrolled, projections": Case(
        [BF16, F16],
        {"r": 7, "target_modules": ["q_proj", "v_proj"], "target_parameters": [*EXPERT_MATRICES, "mlp.gate.weight"]},
        EXPERTS,
        base="plain",
        rows="full",
        loop="unroll",
        remat="projections",
        gated=None,
    ),
    "experts, every weight": Case([BF16], None, EXPERTS, base="plain", rows="ragged", gated=None),
    "modules in float32": Case([BF16], {"r": 16}, float32_modules=["norm", "lm_head", "layers.0.self_attn"]),
    # One layer: through more of them its rounding alone makes another gradient.
    "float8": Case([BF16], {"r": 16}, KERNELS | {"num_hidden_layers": 1}, base_compute="float8", autotuned=True),
    "float8, gradients alone": Case(
        [BF16], {"r": 16}, KERNELS | {"num_hidden_layers": 1}, base_compute="float8_backward"
    ),
    # The way to queries, keys and values is one unit with the norm where there is no bias.
    "float8, without biases": Case(
        [BF16],
        {"r": 16},
        PLAIN | {"num_hidden_layers": 1},
        rows="full",
        loop="unroll",
        remat="projections",
        base_compute="float8",
    ),
    "8B's width": Case([BF16, F16], {"r": 16}, LARGE, autotuned=True),
    "8B's width, 16-bit base": Case(
        [BF16], {"r": 64}, LARGE, base="plain", rows="full", loop="unroll", remat="projections"
    ),
}
# Of a family one dtype for adapters and the other for every weight: how dtypes differ, the cases above show.
for _family, _config in {"llama": tiny.CONFIG, **families.CONFIGS}.items():
    if "clip_qkv" in _config:  # an element that rounding brings over the edge has no gradient
        _config = _config | {"clip_qkv": 100.0}
    CASES[f"{_family}, adapters"] = Case([BF16], {"target_modules": "all-linear"}, _config, rows="short", gated="xla")
    CASES[f"{_family}, every weight"] = Case(
        [F16], None, _config, base="plain", rows="short", remat="projections", gated="xla"
    )


def made(case, tmp_path):
    """The case's model in bfloat16, its arrays on the CPU; all trained arrays are random."""
    options = {
        "dtype": BF16,
        "load_in_4bit": case.base == "nf4",
        "layer_loop": case.loop,
        "use_gradient_checkpointing": case.remat,
        "full_finetuning": case.adapter is None,
        "float32_modules": case.float32_modules,
        "base_compute": case.base_compute,
    }
    with jax.default_device(device_steps.cpu()), device_steps.quick_compilation():
        if case.config is LARGE:
            base = FastLanguageModel.from_config(LARGE, **options)
        else:
            if case.base == "fp8":
                tiny.write_fp8_folder(tmp_path, case.config, FP8_BLOCK)
            else:
                tiny.write_folder(tmp_path, case.config, calm(case.config))
            base = tiny.model(tmp_path, case.config, **options)
        return base if case.adapter is None else tiny.adapted(base, **case.adapter)


def calm(config):
    """`tiny.arrays` with norms that scale by about one: where one is added to them they would double, seven layers in
    turn, and rounding errors with them."""
    tensors, offset = tiny.arrays(config), read_config(config).norm_offset
    return {name: array - np.float32(offset) if "norm" in name else array for name, array in tensors.items()}


def rows_of(case):
    """A batch of random documents; some of their tokens are no targets."""
    lengths, width = ROWS[case.rows]
    config = tiny.text_config(case.config)
    parts = []
    for number in range(case.accumulation):
        inside = [tiny.documents(config, row, seed=10 * number + index) for index, row in enumerate(lengths)]
        skipped = 4 - 2 * number  # microbatches of very different numbers of targets
        parts.append(tiny.rows(inside, width, learnt=lambda row, _, place, every=skipped: (place + row) % every > 0))
    batch = Batch(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))
    return batch._replace(segment_ids=None) if case.rows == "full" else batch


#: XLA tries its GEMMs out, as it does for users.
TUNED = {"xla_gpu_autotune_level": 4}


@functools.cache
def card():
    """The device that is judged."""
    return jax.devices()[0]


def reference(model, batch):
    """The outcome in float32 on the CPU, and by how much bfloat16 there is off."""
    model = with_checkpointing(model, "none")  # the same numbers of a smaller program
    wide = device_steps.in_dtype(model, F32)
    exact = device_steps.step_on(device_steps.cpu(), wide, batch, compiler_options=device_steps.QUICK)
    plain = device_steps.step_on(device_steps.cpu(), model, batch, compiler_options=device_steps.ROUNDED)
    assert {chosen for _, chosen in exact.chosen | plain.chosen} <= {"xla", "decode_first"}  # of experts in 4 bits
    return exact, device_steps.errors(plain, exact)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient(name, tmp_path):
    case = CASES[name]
    model, batch = made(case, tmp_path), rows_of(case)
    exact, yardstick = reference(model, batch)
    for dtype in case.dtypes:
        found = device_steps.step_on(
            card(), device_steps.in_dtype(model, dtype), batch, compiler_options=TUNED if case.autotuned else None
        )
        device_steps.assert_within(found, exact, device_steps.allowed(yardstick, dtype), f"{name}, {dtype}")
        gated = {chosen for op, chosen in found.chosen if op == "glu.lora"}
        if (dispatch.target().compute_capability or (0, 0)) >= (9, 0):
            none = case.gated is None or not model.config.gated
            none |= case.adapter is None and "mlp.gate_up" in model.config.biases
            assert gated == (set() if none else {"xla" if dtype == F32 else case.gated})


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("axis", "config"),
    [
        *((axis, PLAIN) for axis in ("data", "fsdp", "context", "tensor")),
        ("expert", EXPERTS),
        *((axis, LARGE) for axis in ("fsdp", "tensor")),
    ],
    ids=["data", "fsdp", "context", "tensor", "expert", "fsdp, 8B's width", "tensor, 8B's width"],
)
def test_two_cards(axis, config, tmp_path):
    """As on one: what they hold, compute and exchange changes no more than rounding does."""
    case = Case([BF16], {"r": 16}, config, rows="full", remat="projections")
    model, batch = made(case, tmp_path), rows_of(case)
    exact, yardstick = reference(model, batch)
    found = device_steps.step_on(card(), model, batch, mesh=make_mesh(**{axis: 2}))
    device_steps.assert_within(found, exact, device_steps.allowed(yardstick, BF16), f"{axis}, BF16")


@pytest.fixture
def compiled_anew():
    """Programs come from the compiler, not from the tests' cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("name", ["dropout, trained tables, mixed ranks", "DoRA", "every weight", "FP8 base"])
def test_a_deterministic_step_is_the_same_bit_for_bit(name, tmp_path):
    """Twenty times, and compiled again from the kernels that the first compilation chose."""
    case = CASES[name]
    model, batch = made(case, tmp_path / "model"), rows_of(case)
    trainable, frozen = jax.device_put((model.trainable, model.frozen), card())
    expected = None
    for repeats in (20, 1):
        step = make_train_step(
            model.graphdef,
            steps.RECORDER,
            model.trainable_filter,
            donate=False,
            compiler_options={**reproducible(True, tmp_path / "run"), **TUNED},
        )
        for _ in range(repeats):
            state, metrics = step(init_state(trainable, steps.RECORDER, jax.random.key(0)), frozen, batch)
            found = jax.device_get((state.opt_state, metrics))
            expected = found if expected is None else expected
            assert metrics["finite"]
            steps.assert_same(found, expected)
