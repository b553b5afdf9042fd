"""Every family equals transformers' and PEFT's: its logits, and steps of LoRA."""

import functools

import jax
import numpy as np
import pytest

from convert.adapter_config import EXPERT_PARAMETERS
from convert.formats.nf4 import decode
from convert.quantize import quantize
from convert.weights import open_weights
from fastjax.language_model import FastLanguageModel
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step
from tests.support import tiny
from tests.support.families import BESIDE, CONFIGS
from tests.support.family_mixtures import MIXTURES
from tests.support.family_variants import MIXTURE_VARIANTS, SPELLINGS, VARIANTS

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
torch_family = pytest.importorskip("tests.support.torch_family")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    *torch_llama.NOTES_OF_PEFT,
    # PEFT counts modules alone.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
]

#: float32 through up to seven layers, logits of a few units.
TOLERANCE = 1e-4
#: Families whose blocks round differently in bfloat16: biases and heads' norms under a scaled RoPE, norms of 1 + w and
#: soft caps, multipliers, norms behind the blocks, LayerNorm with attention and MLP side by side, experts with biases.
ROUNDED = ("qwen3", "gemma2", "granite", "olmo2", "cohere", "gpt_oss")
#: Families whose matrices lie differently in a 4-bit folder: apart and biased, fused, rows in pairs, other names.
PACKED = ("qwen2", "phi3", "cohere", "glm4", "phi", "apertus")
#: LoRA steps: ten where the blocks' gradients differ. Where only the layers' plan or the names do, three, which reach
#: every array: A has no gradient until B has moved. Gemma 3's blocks are those beside the vision tower.
STEPS = {
    **dict.fromkeys(("qwen3", "gemma2", "phi3", "granite", "olmo2", "cohere", "qwen3_5_text", "olmo_hybrid"), 10),
    **dict.fromkeys(("starcoder2", "olmo"), 10),
    **dict.fromkeys(("glm4", "ernie4_5", "apertus", "cohere2", "nemotron", "phi"), 10),
    **dict.fromkeys(("qwen2", "smollm3", "helium", "granite_swa", *BESIDE), 3),
    **dict.fromkeys(MIXTURES, 10),
}
#: Of these mixtures PEFT takes linear modules at their word; of the others it reads "all-linear" as attention, router
#: and experts, with twice the rank for gate and up together, and passes over dense layers and shared experts.
APART = ("qwen2_moe", "gpt_oss", "qwen3_5_moe_text", "hy_v3")
#: Shorter and longer than the lengths and windows of the configs.
LENGTHS = (45, 1, 15)


EVERY = VARIANTS | SPELLINGS | MIXTURE_VARIANTS
#: Variants that say in other fields what the family's own config does; families that are DeepSeek-V3 in other fields.
SPELLED = (
    *("qwen2, windows by number", "qwen3, windows by number", "gemma2, windows by turns", "phi3, old spelling"),
    *("gemma3_text, old spelling", "gemma3_text, flat", "smollm3, by interval", "mistral, layer_types"),
    *("qwen3_next, mixtures everywhere", "hunyuan_v1_dense, as published", "gemma, gelu_python"),
    *("deepseek_v3, as published", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
)
#: Families and variants whose layers are made of the parts of others here.
ALIKE = (
    *("ernie4_5", "cohere2", "helium", "arcee", "arcee, relu2", "starcoder2", "hunyuan_v1_dense", "olmo3", "exaone4"),
    *("mistral", "mistral, no window", "ministral", "ministral, windows everywhere", "ministral3, unscaled"),
    *("gemma", "gemma, tied", "gemma2, tied", "phi3, every pair turns", "qwen2, no windows", "smollm3, no windows"),
    *("cohere, no norm of queries", "olmo_hybrid", "qwen3_5_text, as published", "qwen3_5_moe_text"),
    *("qwen2_moe, mixtures everywhere", "qwen3_moe, mixtures everywhere", "olmoe", "solar_open", "hy_v3"),
)
#: Mixtures whose logits, or losses and gradients, equal transformers' in test_mixtures.py.
MIXED = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe", "afmoe")
AS_WRITTEN = "tests/fastjax/models/test_families.py::test_a_config_as_transformers_writes_it"
IN_MIXTURES = (
    "tests/fastjax/parity/test_mixtures.py::test_peft_loads_what_we_write_and_transformers_what_is_merged, "
    "tests/fastjax/parity/test_mixtures.py::test_peft_finds_exactly_the_trained_modules, "
    "tests/fastjax/parity/test_mixtures.py::test_gradients_of_every_weight"
)


def marked(variant):
    faster = IN_MIXTURES if variant in MIXED else AS_WRITTEN if variant in (*SPELLED, *ALIKE) else None
    return pytest.param(variant, marks=[] if faster is None else pytest.mark.exhaustive(by=faster))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, arrays, float32 logits by transformers of each document) of a variant, once a process."""

    @functools.cache
    def make(variant):
        _, config = EVERY[variant]
        arrays = tiny.arrays(config, seed=len(variant))
        folder = tiny.write_folder(tmp_path_factory.mktemp("family") / "model", config, arrays)
        reference = torch_family.build(config, arrays)
        expected = [torch_family.logits(reference, document) for document in tiny.documents(config, LENGTHS)]
        return folder, arrays, np.concatenate(expected)

    return make


@pytest.mark.parametrize("variant", [marked(variant) for variant in EVERY])
def test_logits(variant, made):
    """Documents packed into a row, each as transformers has it by itself."""
    _, config = EVERY[variant]
    folder, _, expected = made(variant)
    assert expected.std() > 0.5
    tokens, _, segments, positions = tiny.rows([tiny.documents(config, LENGTHS)], sum(LENGTHS) + 3)
    found = tiny.logits(tiny.model(folder, None, max_seq_length=64), tokens, positions, segments)[0]
    found = found[: sum(LENGTHS)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.exhaustive("gemma2", "olmo2", "gpt_oss")
@pytest.mark.parametrize("variant", ROUNDED)
def test_bfloat16_is_as_exact_as_transformers(variant, made):
    """In bfloat16 the logits are no farther from those in float32 than transformers' are."""
    _, config = EVERY[variant]
    folder, arrays, exact = made(variant)
    documents = tiny.documents(config, LENGTHS)
    reference = torch_family.build(config, arrays).bfloat16()
    theirs = np.concatenate([torch_family.logits(reference, document) for document in documents])
    tokens, _, segments, positions = tiny.rows([documents], sum(LENGTHS))
    model = tiny.model(folder, None, max_seq_length=64, dtype="bfloat16")
    ours = np.asarray(tiny.logits(model, tokens, positions, segments)[0], np.float32)
    error, allowed = (np.linalg.norm(found - exact) / np.linalg.norm(exact) for found in (ours, theirs))
    assert 1e-4 < error < 1.25 * allowed  # two ways to round, compared over 61 tokens


@pytest.mark.exhaustive("phi3")
@pytest.mark.parametrize("family", PACKED)
def test_a_four_bit_folder_has_the_logits_of_what_it_decodes_to(family, tmp_path):
    config = CONFIGS[family]
    arrays = tiny.arrays(config)
    tiny.write_folder(tmp_path / "plain", config, arrays)
    quantize(tmp_path / "plain", tmp_path / "packed")
    weights = open_weights(tmp_path / "packed")
    packed = [path for path in weights.specs if weights.format(path) == "nf4-nested"]
    assert len(packed) >= 4 * config["num_hidden_layers"]
    decoded = arrays | {weights.specs[path].name: decode(weights.read(path), np.float32) for path in packed}
    reference = torch_family.build(config, decoded)
    (document,) = tiny.documents(config, (40,))
    expected = torch_family.logits(reference, document)
    model = tiny.model(tmp_path / "packed", None, max_seq_length=64)
    np.testing.assert_allclose(tiny.logits(model, document[None])[0], expected, rtol=0, atol=TOLERANCE)


# The others' blocks are made of the same parts; their plans and names show in the logits.
@pytest.mark.exhaustive("phi3", "gpt_oss")
@pytest.mark.parametrize("family", STEPS)
def test_lora_steps(family, tmp_path):
    """AdamW on adapters of every projection, of routers and experts, which PEFT names and starts."""
    config = (CONFIGS | MIXTURES | BESIDE)[family]
    arrays = tiny.arrays(config)
    torch.manual_seed(7)
    reference = peft.get_peft_model(
        torch_family.build(config, arrays),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=8,
            target_modules=r".*language_model.*_proj(_\w+)?" if family in BESIDE else "all-linear",
            exclude_modules=r".*\.indexer\..*" if "index_topk" in config else None,  # no token needs it here
            target_parameters=[f"experts.{part}" for part in EXPERT_PARAMETERS] if family in APART else None,
        ),
    ).train()
    reference.save_pretrained(tmp_path / "start")
    options = {"max_seq_length": 64, "use_gradient_checkpointing": "none"}
    model = FastLanguageModel.load_adapter(tiny.model(tmp_path, config, **options), tmp_path / "start")

    settings = OptimizerConfig(learning_rate=5e-3, lr_scheduler_type="constant", max_grad_norm=0.0)
    optimizer = make_optimizer(settings, 10)
    state = init_state(model.trainable, optimizer, jax.random.key(11))
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter)
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    update = torch.optim.AdamW(
        trained,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=0.0,
    )
    losses = []
    for number, batch in enumerate(STEPS[family] * tiny.batches(tiny.text_config(config), 1)):
        expected = torch_family.backward(reference, batch)
        update.step()
        update.zero_grad()
        state, metrics = step(state, model.frozen, batch)
        # float32, losses of 4 to 6
        assert abs(float(metrics["loss"]) - expected) < TOLERANCE, f"step {number}"
        losses.append(expected)
    assert min(losses[-3:]) < losses[0] - 0.05, "nothing was learnt: the comparison would prove little"

    model.replace(trainable=state.trainable).save_pretrained(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    start, ours, theirs = (_tensors(tmp_path / name) for name in ("start", "ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        size = np.linalg.norm(expected)
        # relative, Frobenius: Adam divides by gradients' roots, which amplifies rounding
        assert np.linalg.norm(ours[name] - expected) < 1e-3 * size, name
        assert np.linalg.norm(start[name] - expected) > 2e-3 * size, f"{name} has not moved"


@pytest.mark.exhaustive("gemma3", "muse_glimmer")
@pytest.mark.parametrize("kind", BESIDE)
def test_a_text_model_beside_a_vision_tower(tmp_path, kind):
    """Logits with an adapter, in files and with names as transformers and PEFT have them."""
    torch.manual_seed(7)
    config = BESIDE[kind]
    reference = torch_family.build(config, tiny.arrays(config))
    reference.save_pretrained(tmp_path / "base")
    tiny.write_tokenizer(tmp_path / "base", tiny.text_config(config))
    (document,) = tiny.documents(tiny.text_config(config), (30,))
    base = tiny.model(tmp_path / "base", None, max_seq_length=64)
    expected = torch_family.logits(reference, document)
    np.testing.assert_allclose(tiny.logits(base, document[None])[0], expected, rtol=0, atol=TOLERANCE)

    options = {"r": 4, "target_modules": r".*language_model.*_proj(_\w+)?", "init_lora_weights": False}
    theirs = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = FastLanguageModel.load_adapter(base, tmp_path / "theirs")
    changed = torch_family.logits(theirs, document)
    np.testing.assert_allclose(tiny.logits(ours, document[None])[0], changed, rtol=0, atol=TOLERANCE)
    assert np.abs(changed - expected).max() > 1000 * TOLERANCE
    ours.save_pretrained(tmp_path / "ours")
    first, second = (_tensors(tmp_path / name) for name in ("theirs", "ours"))
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def _tensors(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")
