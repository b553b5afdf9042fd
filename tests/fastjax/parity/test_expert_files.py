"""Mixtures' folders and PEFT's adapters on experts: read and written as transformers and PEFT do."""

import json

import numpy as np
import pytest

from convert.adapters import write_adapter
from convert.families import family_for
from convert.formats import mxfp4
from convert.merge import merge
from convert.tensor_file import write_tensor_file
from convert.verify import compare
from convert.weights import open_weights
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES
from tests.support.folders import read_adapter

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
torch_family = pytest.importorskip("tests.support.torch_family")
torch_llama = pytest.importorskip("tests.support.torch_llama")
pytestmark = [
    pytest.mark.torch,
    *torch_llama.NOTES_OF_PEFT,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),  # it counts modules
]

transformers = pytest.importorskip("transformers")

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_what_peft_writes_and_merges(family, tmp_path):
    """PEFT's adapter on attention, experts, router and a shared expert, merged by PEFT and here."""
    config = MIXTURES[family]
    tiny.write_folder(tmp_path / "model", config, tiny.arrays(config))
    weights = open_weights(tmp_path / "model")
    torch.manual_seed(7)
    settings = {"r": 3, "lora_alpha": 7, "rank_pattern": {"experts.down_proj": 2}, "init_lora_weights": False}
    targets = ["q_proj", "shared_expert_gate"] if family == "qwen2_moe" else ["q_proj"]
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    settings["target_parameters"] = [GATE_UP, DOWN, router]
    settings["alpha_pattern"] = {router.removesuffix(".weight"): 90, router: 20}  # a router's is found by the weight
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **settings)
    theirs = peft.get_peft_model(torch_family.build(config, tiny.arrays(config)), lora)
    theirs.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    merged = theirs.merge_and_unload().state_dict()
    after = open_weights(tmp_path / "merged")
    stored = {name: after.checkpoint.read(name) for name in after.checkpoint.names}
    names = dict(torch_family.in_memory(family_for(config), config, stored))
    changed = 0
    for name, array in names.items():
        # float32 sums of up to three products of a few units
        np.testing.assert_allclose(array, merged[name].numpy(), rtol=0, atol=2e-5, err_msg=name)
        changed += "experts." in name and "proj" in name and "bias" not in name
    assert changed >= 2
    path = next(path for path in after.specs if path.endswith("experts.up_proj.weight"))
    assert np.abs(after.read(path) - weights.read(path)).max() > 0.1
    saved = read_adapter(tmp_path / "adapter", family=weights.family, specs=weights.specs.values())
    write_adapter(tmp_path / "ours", *saved, family=weights.family)
    again = peft.PeftModel.from_pretrained(torch_family.build(config, tiny.arrays(config)), tmp_path / "ours")
    for name, tensor in again.merge_and_unload().state_dict().items():
        assert torch.equal(tensor, merged[name]), name


def test_a_file_with_experts_one_by_one(tmp_path):
    """PEFT makes one adapter of them too."""
    config = MIXTURES["mixtral"]
    tiny.write_folder(tmp_path / "model", config, tiny.arrays(config))
    weights, rng, tensors = open_weights(tmp_path / "model"), np.random.default_rng(0), {}
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for layer in range(config["num_hidden_layers"]):
        block = f"base_model.model.model.layers.{layer}.block_sparse_moe"
        router = weights.specs[f"layers.{layer}.mlp.router.weight"].shape
        shapes = {f"{block}.gate": router}
        for part, own in parts.items():
            experts, *shape = weights.specs[f"layers.{layer}.mlp.experts.{part}.weight"].shape
            shapes |= {f"{block}.experts.{number}.{own}": shape for number in range(experts)}
        for name, (rows, columns) in shapes.items():
            tensors[f"{name}.lora_A.weight"] = rng.random((2, columns), np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.random((rows, 2), np.float32)
    (tmp_path / "adapter").mkdir()
    write_tensor_file(tmp_path / "adapter" / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3}
    settings["target_modules"] = [*parts.values(), "gate"]
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    base = torch_family.build(config, tiny.arrays(config))
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    after = open_weights(tmp_path / "merged").checkpoint
    stored = {name: after.read(name) for name in after.names}
    for name, array in torch_family.in_memory(family_for(config), config, stored):
        # float32 sums of up to three products of a few units
        np.testing.assert_allclose(array, merged[name].numpy(), rtol=0, atol=2e-5, err_msg=name)


# An indexer is no part of a model here, and of no folder that a test makes.
@pytest.mark.parametrize("family", [name for name, config in MIXTURES.items() if "index_topk" not in config])
def test_folders_of_transformers(family, tmp_path):
    """A folder with a tensor an expert is what its classes load, and what they save is that folder again."""
    config = MIXTURES[family]
    tensors = tiny.arrays(config)
    tiny.write_folder(tmp_path / "ours", config, tensors)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    expected = torch_family.build(config, tensors).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.state_dict().items())
    theirs.save_pretrained(tmp_path / "theirs")
    result = compare(tmp_path / "ours", tmp_path / "theirs")
    assert result.fits and result.largest == 0


def test_mxfp4_decodes_as_in_transformers():
    """Every code with every scale whose products float32 holds."""
    mxfp4_of_transformers = pytest.importorskip("transformers.integrations.mxfp4")
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(253, axis=1)
    scales = np.arange(253, dtype=np.uint8)[None, :, None].repeat(16, axis=2)
    ours = mxfp4.MXFP4.decode(mxfp4.MXFP4Tensor(codes, scales, "float32"))
    theirs = mxfp4_of_transformers.convert_moe_packed_tensors(
        torch.from_numpy(codes), torch.from_numpy(scales), dtype=torch.float32
    )
    assert np.array_equal(ours.swapaxes(1, 2), theirs.numpy())
