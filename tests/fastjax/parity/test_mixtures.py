"""Adapters on experts cross over: PEFT loads ours with our logits, and transformers the merged folder. Gradients of all
weights equal torch's."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from convert.checkpoint import open_checkpoint
from convert.families import family_for
from fastjax.language_model import FastLanguageModel
from fastjax.training.loss import loss_sums
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
torch_family = pytest.importorskip("tests.support.torch_family")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    *torch_llama.NOTES_OF_PEFT,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),  # it counts modules
]

#: float32, logits of a few units
TOLERANCE = 1e-4
#: family -> settings besides r and the experts' names
CASES = {
    "qwen3_moe": {"target_modules": ["q_proj"], "rank_pattern": {"experts.down_proj": 2}},
    "qwen2_moe": {"target_modules": "all-linear", "alpha_pattern": {"experts.gate_up_proj": 3.5}},
    "gpt_oss": {"target_modules": ["v_proj"], "use_rslora": True},
    "glm4_moe": {
        "target_modules": ["o_proj"],
        "target_parameters": ["gate.weight", "mlp.experts.down_proj"],
        "rank_pattern": {"mlp.gate.weight": 3},
        "alpha_pattern": {r"gate\.weight": 20},
    },
    "mixtral": {"target_modules": ["k_proj"], "target_parameters": ["gate_up_proj"]},
    "minimax_m2": {"target_modules": ["v_proj"], "target_parameters": ["gate.weight", "gate_up_proj"]},
    "hy_v3": {"target_modules": ["up_proj"], "target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj"]},
    "exaone_moe": {"target_modules": ["o_proj"], "alpha_pattern": {"experts.down_proj": 2.5}},
    "afmoe": {"target_modules": ["gate_proj", "q_proj"], "target_parameters": ["gate.weight"]},
    "olmoe": {"target_modules": ["q_proj"], "alpha_pattern": {"experts.down_proj": 2.5}},
}


@pytest.mark.exhaustive("qwen2_moe", "gpt_oss", "glm4_moe")  # the next one has mixtral's adapters, unmerged
@pytest.mark.parametrize("family", CASES)
def test_peft_loads_what_we_write_and_transformers_what_is_merged(family, tmp_path):
    config = MIXTURES[family]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    base = tiny.model(tmp_path / "base", config)
    ours = tiny.adapted(base, **{"r": 4, "lora_alpha": 9, "target_parameters": experts, **CASES[family]})
    tokens = tiny.documents(config, (40,))[0]
    found, before = (tiny.logits(model, tokens[None])[0] for model in (ours, base))
    assert np.abs(found - before).max() > 1000 * TOLERANCE, "the adapter does nothing"

    ours.save_pretrained(tmp_path / "adapter")
    reference = torch_family.build(config, tiny.arrays(config))
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    np.testing.assert_allclose(torch_family.logits(theirs, tokens), found, rtol=0, atol=TOLERANCE)

    ours.save_pretrained_merged(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    np.testing.assert_allclose(torch_family.logits(merged.eval(), tokens), found, rtol=0, atol=TOLERANCE)
    again = tiny.logits(tiny.model(tmp_path / "merged", None), tokens[None])[0]
    np.testing.assert_allclose(again, found, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (
            "glm4_moe",
            {"lora_dropout": 0.1, "rank_pattern": {"gate_proj": 2}, "alpha_pattern": {"layers.1.*up_proj": 3.5}},
        ),
        ("qwen3_moe", {"layers_to_transform": [1, 2], "target_parameters": ["mlp.experts.down_proj", "gate.weight"]}),
        ("mixtral", {"target_modules": "all-linear", "target_parameters": ["gate_up_proj"]}),
    ],
)
def test_peft_finds_exactly_the_trained_modules(family, options, tmp_path):
    """Dense layers and shared experts too, whose projections PEFT takes in `target_modules` for the experts."""
    config = MIXTURES[family]
    base = tiny.model(tmp_path / "base", config)
    ours = tiny.adapted(base, **{"r": 4, "lora_alpha": 9, **options})
    tokens = tiny.documents(config, (40,))[0]
    found = tiny.logits(ours, tokens[None])[0]
    ours.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(
        torch_family.build(config, tiny.arrays(config)), tmp_path / "adapter"
    ).eval()
    np.testing.assert_allclose(torch_family.logits(theirs, tokens), found, rtol=0, atol=TOLERANCE)
    written = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert {name.replace(".default", "") for name in theirs.state_dict() if ".lora_" in name} == written

    again = FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    np.testing.assert_array_equal(tiny.logits(again, tokens[None])[0], found)
    first = (tmp_path / "adapter" / "adapter_config.json").read_text()
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_config.json").read_text() == first


@pytest.mark.parametrize("family", ["gpt_oss", "afmoe", "qwen2_moe"])
def test_gradients_of_every_weight(family, tmp_path):
    """Routers, biases, attention sinks and gates, shared experts and theirs; but not a router's bias for the choice."""
    config = MIXTURES[family]
    model = tiny.model(tmp_path / "model", config, full_finetuning=True)
    (batch,) = tiny.batches(config, 1)
    reference = torch_family.build(config, tiny.arrays(config)).train()
    expected = torch_family.backward(reference, batch)

    @jax.jit
    def gradients(trainable, rows):
        def loss(trainable):
            sums = loss_sums(nnx.merge(model.graphdef, trainable, model.frozen), model.trainable_filter, rows, key=None)
            return sums.loss_sum / sums.metrics["num_targets"].astype(sums.loss_sum.dtype)

        return jax.value_and_grad(loss)(trainable)

    found, trained = gradients(model.trainable, jax.tree.map(lambda array: array[0], batch))
    assert abs(float(found) - expected) < TOLERANCE
    model.replace(trainable=trained).save_pretrained(tmp_path / "gradients")  # in the names and layout of weights
    checkpoint = open_checkpoint(tmp_path / "gradients")
    arrays = {name: checkpoint.read(name) for name in checkpoint.names}
    ours = dict(torch_family.in_memory(family_for(config), config, arrays))
    for name, parameter in reference.named_parameters():
        if not parameter.requires_grad:
            continue
        theirs = parameter.grad.numpy()
        # float32: sums over layers and tokens in another order
        np.testing.assert_allclose(ours[name], theirs, rtol=0, atol=2e-5 * np.abs(theirs).max(), err_msg=name)
        assert np.abs(theirs).max() > 0, name
