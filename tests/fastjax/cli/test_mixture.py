"""A mixture of experts from files to files: fine-tuned in NF4 with adapters on experts, and gone on from."""

import json

import numpy as np
import pytest
import yaml

from convert.families import family_for
from convert.families.mapping import read_config
from fastjax.cli import main
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.runs.adapter_import import import_adapter
from fastjax.runs.opening import open_model
from fastjax.training.config import DataSection, ModelSection, OutputSection, TrainConfig, TrainingSection
from tests.support import chat
from tests.support.family_mixtures import MIXTURES
from tests.support.folders import read_adapter

CONFIG = MIXTURES["qwen3_moe"] | {"num_hidden_layers": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1}
CONFIG |= {"hidden_size": 64, "moe_intermediate_size": 64}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The settings' file, and the folder of a whole run."""
    folder = tmp_path_factory.mktemp("mixture")
    model = str(chat.write_model(folder / "model", CONFIG))
    content = {
        "model": {"model_name": model, "max_seq_length": 64, "dtype": "float32"},
        "lora": {"r": 4, "target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
        "data": {"train": str(chat.write_chats(folder / "chats.jsonl")), "cache_dir": None},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
        "parallel": {"data": 1, "fsdp": 1},
        "training": {"max_steps": 6, "router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001},
        "output": {"output_dir": str(folder / "run"), "save_steps": 3},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    assert main(["train", "--config", str(file)]) == 0
    return file, folder / "run"


def test_what_is_learnt_and_said(run, capsys):
    file, folder = run
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 6 and steps[-1]["loss"] < steps[0]["loss"]
    for row in steps:
        assert 0.25 <= row["router_largest_share"] <= 1 / 3 + 1e-6 and 0.9 < row["router_entropy"] <= 1 + 1e-6
        assert 2.9 < row["router_load_balancing_loss"] < 4
    assert "Choice of experts: entropy" in (folder / "report.html").read_text()
    family, specs = family_for(CONFIG), read_config(CONFIG).specs
    adapter, arrays = read_adapter(folder / "adapter", family=family, specs=specs)
    assert adapter.target_parameters == [*EXPERTS, "mlp.gate.weight"]
    shapes = {path: array.shape for path, array in arrays.items() if path.startswith("layers.1.mlp")}
    assert shapes == {
        "layers.1.mlp.router.lora_A": (4, 64),
        "layers.1.mlp.router.lora_B": (4, 4),
        "layers.1.mlp.experts.gate_up_proj.lora_A": (4, 4, 64),
        "layers.1.mlp.experts.gate_up_proj.lora_B": (4, 128, 4),
        "layers.1.mlp.experts.down_proj.lora_A": (4, 4, 64),
        "layers.1.mlp.experts.down_proj.lora_B": (4, 64, 4),
    }
    assert all(np.any(array != 0) for path, array in arrays.items() if path.endswith("lora_B"))
    model = str(folder.parent / "model")
    generate = ["generate", "--model", model, "--load_in_4bit", "--max_new_tokens", "5", "--prompt", "abc", "--json"]
    assert main([*generate, "--adapter", str(folder / "adapter")]) == 0


@pytest.mark.exhaustive(
    by="test_what_is_learnt_and_said, "
    "tests/fastjax/cli/test_run_import.py::test_training_goes_on_from_it_as_from_the_folder"
)
def test_trained_on_from_its_adapter(run, tmp_path):
    """By `lora.adapter`, and as the first checkpoint of a run."""
    file, folder = run
    content = yaml.safe_load(file.read_text())
    content["lora"] = {"adapter": str(folder / "adapter")}
    content["training"]["max_steps"] = 1
    content["output"] = {"output_dir": str(tmp_path / "run")}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "--config", str(tmp_path / "more.yaml")]) == 0
    last, first = (
        [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
        for run in (folder, tmp_path / "run")
    )
    assert abs(first[0] - last[-1]) < abs(first[0] - last[0])
    command = ["--config", str(file), "--output.output_dir", str(tmp_path / "imported")]
    import_adapter(parse_train_config(command), folder / "adapter")
    assert len(list((tmp_path / "imported" / "checkpoints").iterdir())) == 1


def test_routers_losses_need_a_mixture(chat_folder, chats):
    config = TrainConfig(
        model=ModelSection(model_name=str(chat_folder), max_seq_length=64),
        data=DataSection(train=str(chats)),
        output=OutputSection(output_dir="o"),
        training=TrainingSection(router_z_loss_coef=0.5),
    )
    with pytest.raises(ConfigError, match=r"router_z_loss_coef: expected 0, since .* no mixture of experts, got 0.5"):
        open_model(config)
