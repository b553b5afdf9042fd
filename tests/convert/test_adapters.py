"""PEFT folders: round trips, contradictions, and PEFT itself on the other side."""

import json
import os

import numpy as np
import pytest

from convert import tensor_file
from convert.adapters import AdapterConfig, write_adapter
from convert.errors import ConvertError
from convert.tensor_file import write_tensor_file
from tests.support.folders import read_adapter

LAYER = "layers.1.self_attn.q_proj"


def arrays(rank=4):
    rng = np.random.default_rng(0)
    shapes = {
        f"{LAYER}.lora_A": (rank, 24),
        f"{LAYER}.lora_B": (20, rank),
        "embed_tokens.lora_embedding_A": (rank, 23),
        "embed_tokens.lora_embedding_B": (24, rank),
        "lm_head.modules_to_save.weight": (23, 24),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


CONFIG = AdapterConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])


def test_names_in_the_file_are_pefts(tmp_path):
    write_adapter(tmp_path / "adapter", CONFIG, arrays())
    header = tensor_file.read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    assert set(header) == {
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_embedding_B",
        "base_model.model.lm_head.weight",
    }
    config, back = read_adapter(tmp_path / "adapter")
    assert config.r == 4 and config.modules_to_save == ["lm_head"]
    assert set(back) == set(arrays())
    assert all(np.array_equal(back[name], array) for name, array in arrays().items())


def test_an_earlier_adapter_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.bin").write_bytes(b"old")
    (folder / "metrics.jsonl").write_text("kept")
    with pytest.raises(ConvertError, match=r"adapter_config\.json: no such file"):
        read_adapter(folder)
    write_adapter(folder, CONFIG, arrays())
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "metrics.jsonl",
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{LAYER}.lora_B": None}, rf"{LAYER} \(needs both A and B\)"),
        ({f"{LAYER}.lora_A": np.zeros((3, 24))}, rf"{LAYER} \(expected rank 4 from adapter_config.json, got shapes"),
        ({f"{LAYER}.lora_A": np.zeros(4)}, r"got shapes \[4\]"),
        ({f"{LAYER}.lora_magnitude_vector": np.zeros(20)}, r"must not have lora_magnitude_vector: use_dora is False"),
        ({"layers.1.mlp.up_proj.lora_A": np.zeros((4, 24))}, r"layers\.1\.mlp\.up_proj \(an adapter, but no target"),
        ({"norm.modules_to_save.weight": np.zeros(24)}, r"norm \(trained whole, but not in modules_to_save\)"),
        ({"lm_head.lora_A.weight": np.zeros((4, 24))}, r"lm_head\.lora_A\.weight \(no LoRA array has this ending\)"),
        ({"layers.1.router.lora_A": np.zeros((4, 24))}, r"layers\.1\.router: no such module in the table of llama"),
    ],
)
def test_contradictions_are_refused_and_nothing_is_left(tmp_path, changed, message):
    broken = {name: array for name, array in (arrays() | changed).items() if array is not None}
    with pytest.raises(ConvertError, match=message):
        write_adapter(tmp_path / "adapter", CONFIG, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_strange_names_lists_them_all(tmp_path):
    folder = tmp_path / "adapter"
    write_adapter(folder, CONFIG, arrays())
    file = folder / "adapter_model.safetensors"
    header = tensor_file.read_header(file)
    tensors = {name: tensor_file.read_tensor(name, info) for name, info in header.items()}
    strange = ["base_model.model.model.layers.0.mlp.gate.lora_A.weight", "lm_head.weight", "base_model.model.x"]
    write_tensor_file(file, tensors | {name: np.zeros(2) for name in strange})
    with pytest.raises(ConvertError) as caught:
        read_adapter(folder)
    assert str(file) in str(caught.value) and all(name in str(caught.value) for name in strange)


def test_missing_and_damaged_files_are_named(tmp_path):
    folder = tmp_path / "adapter"
    with pytest.raises(ConvertError, match="adapter: no such folder"):
        read_adapter(folder)
    write_adapter(folder, CONFIG, arrays())
    file = folder / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(ConvertError, match=r"adapter_model\.safetensors: size: .*is the file whole"):
        read_adapter(folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(ConvertError, match="pickles are never loaded"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConvertError, match=r"adapter_config\.json: contents: expected a JSON object"):
        read_adapter(folder)


# --- PEFT -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r".*\.1\.(self_attn|mlp)\.(q|k|down)_proj"},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 5}, "alpha_pattern": {"q_proj": 3}},
    "layers": {"layers_to_transform": [1]},
    "excluded": {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "not-zero": {"init_lora_weights": False},
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings-and-head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding-target": {"target_modules": ["q_proj", "embed_tokens"]},
    "head-target": {"target_modules": ["q_proj", "lm_head"]},
    "dora-embedding": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "tied-saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied-saved-head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tied-target": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.fixture(scope="module")
def torch():
    """torch on one thread: its threads wait for each other in a loop, which costs seconds on a busy machine."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def peft(torch):
    return pytest.importorskip("peft")


def base_model(torch, tied, dtype="float32"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def logits(torch, model):
    with torch.no_grad():
        return model(torch.arange(1, 9)[None]).logits.float().numpy()


def perturbed(torch, model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def raw(folder):
    header = tensor_file.read_header(folder / "adapter_model.safetensors")
    return {name: tensor_file.read_tensor(name, info) for name, info in header.items()}


quiet = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:.*save_embedding_layers:UserWarning",
    "ignore:.*tie_word_embeddings:UserWarning",
    "ignore:.*ensure_weight_tying:UserWarning",
)


@pytest.mark.torch
@quiet
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_what_peft_writes_is_read_and_what_is_written_peft_loads(tmp_path, torch, peft, option, tied):
    chosen = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    chosen |= OPTIONS[option]
    theirs = perturbed(torch, peft.get_peft_model(base_model(torch, tied), peft.LoraConfig(**chosen)))
    expected = logits(torch, theirs)
    theirs.save_pretrained(tmp_path / "theirs")

    config, found = read_adapter(tmp_path / "theirs")
    assert config.r == 4 and config.inference_mode
    write_adapter(tmp_path / "ours", config, found)
    before, after = raw(tmp_path / "theirs"), raw(tmp_path / "ours")
    assert {n: a.tobytes() for n, a in before.items()} == {n: a.tobytes() for n, a in after.items()}
    loaded = peft.PeftModel.from_pretrained(base_model(torch, tied), tmp_path / "ours").eval()
    assert np.array_equal(logits(torch, loaded), expected)
    assert np.abs(expected - logits(torch, base_model(torch, tied))).max() > 1e-2

    # PEFT does not need the frozen matrices that it saves beside adapters on embeddings and head.
    lean = {name: array for name, array in found.items() if not name.endswith(".base_layer.weight")}
    write_adapter(tmp_path / "lean", config, lean)
    loaded = peft.PeftModel.from_pretrained(base_model(torch, tied), tmp_path / "lean").eval()
    assert np.array_equal(logits(torch, loaded), expected)


@pytest.mark.torch
@quiet
def test_bfloat16_models_keep_their_dtypes(tmp_path, torch, peft):
    chosen = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = perturbed(torch, peft.get_peft_model(base_model(torch, False, "bfloat16"), chosen))
    model.save_pretrained(tmp_path / "theirs")
    config, found = read_adapter(tmp_path / "theirs")
    assert found["lm_head.modules_to_save.weight"].dtype.name == "bfloat16"
    assert found["layers.0.self_attn.q_proj.lora_A"].dtype.name == "float32"
    assert config.task_type is None  # given none, PEFT notes the model's class in auto_mapping instead


def test_the_written_settings_are_plain_json(tmp_path):
    write_adapter(tmp_path / "adapter", CONFIG, arrays())
    text = (tmp_path / "adapter" / "adapter_config.json").read_text()
    settings = json.loads(text)
    assert settings["peft_type"] == "LORA" and settings["target_modules"] == ["q_proj", "embed_tokens"]
    assert text == json.dumps(settings, indent=2, sort_keys=True) + "\n"
