"""Two processes that share the weights: a full disk and a kill end in the result that their checkpoint holds."""

import resource
import signal

import yaml
from rich.console import Console

from fastjax.runs.adapter_export import export_checkpoint
from tests.support import chat
from tests.support.runs import ONE_DEVICE, Process, assert_gone, config, contents, figures, rows

STEPS = 40


def test_a_full_disk_and_a_kill_and_the_result_is_gathered_from_both(tmp_path):
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
        "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1},
        "output": {"output_dir": str(output), "save_steps": 2},
        "parallel": {"fsdp": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    train = ["launch", "-n", "2", "--", "train", "--config", str(tmp_path / "run.yaml"), "--resume"]

    killed = Process(train, tmp_path / "compiled")
    assert killed.until(lambda: "checkpoint of step 2 saved" in killed.output), killed.output
    ranks = killed.children()
    resource.prlimit(ranks[1], resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # its disk takes no more
    told = f"could not be written to {output / 'checkpoints'} by rank 1: File too large\n"
    assert killed.until(lambda: told in killed.output, 60), killed.output
    resource.prlimit(ranks[1], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert killed.until(lambda: " saved\n" in killed.output.rpartition(told)[2], 60), killed.output
    killed.send(signal.SIGKILL)  # `launch` itself
    assert killed.status() == -signal.SIGKILL
    assert_gone(ranks)
    before = figures(output)

    both = Process(train, tmp_path / "compiled")
    assert both.status() == 0, both.output
    *_, resumed = (row for row in rows(output) if row.get("event") == "resumed")
    assert 2 < resumed["step"] < STEPS
    assert figures(output)[: len(before)] == before  # to the bit, what the killed run did behind its checkpoint too
    checkpoints = {path.name: path for path in (output / "checkpoints" / str(STEPS) / "state").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= set(checkpoints)  # which both have written
    tokens = [row["num_tokens"] for row in rows(output) if "num_tokens" in row]
    assert min(tokens) > 2 * 48  # of the rows of both
    sections["parallel"] = ONE_DEVICE
    assert export_checkpoint(config(**sections), tmp_path / "exported" / "model", console=Console(quiet=True)) == STEPS
    found, exported = contents(output / "model"), contents(tmp_path / "exported" / "model")
    assert b"fsdp: 2" in found.pop("README.md") and b"fsdp: 1" in exported.pop("README.md")  # the settings of each
    assert found == exported
