"""The result of two processes that share the weights is the one that their checkpoint holds."""

import yaml
from rich.console import Console

from fastjax.runs.adapter_export import export_checkpoint
from tests.support import chat
from tests.support.runs import ONE_DEVICE, Process, config, contents, rows


def test_the_result_is_gathered_from_both(tmp_path):
    data, output = str(chat.write_chats(tmp_path / "chats.jsonl")), tmp_path / "run"
    sections = {
        "model": {
            "model_name": str(chat.write_model(tmp_path / "model")),
            "max_seq_length": 48,
            "dtype": "float32",
            "load_in_4bit": False,
            "full_finetuning": True,
        },
        "data": {"train": data, "cache_dir": None},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2},
        "output": {"output_dir": str(output), "save_steps": 2},
        "parallel": {"fsdp": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    both = Process(["launch", "-n", "2", "--", "train", "--config", str(tmp_path / "run.yaml")], tmp_path / "compiled")
    assert both.status() == 0, both.output
    checkpoints = {path.name: path for path in (output / "checkpoints" / "2" / "state").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= set(checkpoints)  # which both have written
    tokens = [row["num_tokens"] for row in rows(output) if "num_tokens" in row]
    assert min(tokens) > 2 * 48  # of the rows of both
    sections["parallel"] = ONE_DEVICE
    assert export_checkpoint(config(**sections), tmp_path / "exported", console=Console(quiet=True)) == 2
    assert contents(output / "model") == contents(tmp_path / "exported")
