"""Log-probabilities of the reference that are computed before a run: its losses, its file, a resumed run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

import fastjax
from fastjax.cli import main
from fastjax.data import Batches, Dataset
from fastjax.data.preferences import Answer, Role, pack_preferences
from fastjax.runs.datasets import RunData
from fastjax.runs.references import with_references
from tests.support.runs import metrics

ASSETS = Path(fastjax.__file__).parent / "assets"
TOLERANCE = 1e-6  # float32, losses near log 2: the same sums in another program


@pytest.fixture
def run(tmp_path, capsys):
    """Runs `fastjax train` by `run.content`; gives what it says."""
    lines = (ASSETS / "tiny-chat" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:14]
    chats = [json.loads(line)["messages"] for line in lines]
    rows = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
        for chat, other in zip(chats, chats[1:] + chats[:1], strict=True)
    ]
    for name, found in (("train", rows[:10]), ("eval", rows[10:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    content = {
        "model": {
            "model_name": str(ASSETS / "tiny-llama"),
            "max_seq_length": 256,
            "use_gradient_checkpointing": "full",
            "load_in_4bit": False,
        },
        "data": {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")},
        "lora": {"r": 4},
        "training": {"per_device_train_batch_size": 2, "max_steps": 4, "eval_steps": 4},
        "optimizer": {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0},
        "parallel": {"data": 1, "fsdp": 1},
        "preferences": {"loss": "dpo", "beta": 0.2},
        "output": {"output_dir": str(tmp_path / "within"), "save_steps": 2},
    }
    content["data"]["cache_dir"] = str(tmp_path / "cache")

    def run(*options, status=0):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
        assert main(["train", "--config", str(tmp_path / "run.yaml"), *options]) == status
        return " ".join("".join(capsys.readouterr()).split())

    run.content = content
    return run


@pytest.mark.exhaustive(
    by="test_what_is_kept, "
    "tests/fastjax/training/preferences/test_losses.py::test_a_reference_that_was_computed_before, "
    "tests/fastjax/cli/test_import_preferences.py::test_an_imported_run_over_preferences_trains"
)
def test_losses_are_those_of_a_reference_in_the_step(run, tmp_path):
    content = run.content
    assert "log-probabilities" not in run()
    content["preferences"]["precompute_ref_log_probs"] = True
    content["output"]["output_dir"] = str(tmp_path / "before")
    content["training"] |= {"max_steps": 2, "eval_steps": 2}
    said = run()
    assert all(f"{name}: log-probabilities of the reference computed" in said for name in ("train", "held out"))
    content["training"] |= {"max_steps": 4, "eval_steps": 4}
    said = run("--resume")
    assert all(f"{name}: log-probabilities of the reference from" in said for name in ("train", "held out"))
    assert len(list((tmp_path / "cache" / "references").iterdir())) == 2
    within, before = (
        {(row["step"], "loss" in row): row for row in metrics(tmp_path / name)} for name in ("within", "before")
    )
    assert set(within) == {(1, True), (2, True), (3, True), (4, True), (4, False)} < set(before)
    assert within[1, True]["loss"] == pytest.approx(math.log(2)) and within[1, True]["rewards/margins"] == 0
    assert abs(within[4, True]["loss"] - within[1, True]["loss"]) > 0.1  # the policy has left the reference
    for place, row in within.items():
        names = [name for name in row if name.removeprefix("eval_").startswith(("loss", "rewards", "logps"))]
        assert len(names) > 6
        ours, theirs = ([each[name] for name in names] for each in (before[place], row))
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("within", "before")]
    assert len({adapter.stat().st_size for adapter in adapters}) == 1


def test_what_is_kept(tmp_path):
    """Each document's number in its place; a damaged file, or one of other rows, is made again."""
    rng, roles = np.random.default_rng(0), (Role.CHOSEN, Role.REJECTED)
    groups = [
        [Answer([number], rng.integers(1, 9, size).tolist(), role) for size, role in zip((3, 2), roles, strict=True)]
        for number in range(5)
    ]
    rows = pack_preferences(groups, 16)
    calls, said = [], []

    def program(batch):
        """A document's number is minus its first token, the prompt, and a half where it is rejected."""
        calls.append(batch.tokens.shape)
        first = (batch.positions == 0) & (batch.segment_ids > 0)
        found = np.zeros(batch.extra["roles"].shape, np.float32)
        for place in np.argwhere(first):
            found[(*place[:2], batch.segment_ids[tuple(place)] - 1)] = -batch.tokens[tuple(place)] - 1
        return found - (batch.extra["roles"] == Role.REJECTED) / np.float32(2)

    def batched(rows):
        return Batches(rows, 2, shuffle=False)

    file = tmp_path / "references" / "one.npz"
    data = RunData(Dataset(rows, None, "rows", 9), None, Batches(rows, 2), 1)
    for expected in (1, 1, 2, 3):
        made = with_references(data, program, batched, lambda dataset: file, said.append)
        assert len(calls) == expected and made.batches.rows is made.train.rows
        numbers = made.train.rows.fields["reference_log_probs"]
        np.testing.assert_array_equal(numbers.reshape(5, 2), -np.arange(1, 6)[:, None] - np.float32([0, 0.5]))
        content = bytearray(file.read_bytes())
        if len(said) == 2:  # a bit has flipped
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        elif len(said) == 3:
            file.write_bytes(content[:-9])
    assert [" computed" in line for line in said] == [True, False, True, True]
    with_references(data, program, batched, None, said.append)
    assert len(calls) == 4
