"""Rows for supervised fine-tuning have the targets of TRL's own preparation, cut ones and token ids included."""

import types
from pathlib import Path

import pytest

import fastjax
from fastjax.data import load_tokenizer, prepare
from tests.support.data import uncached

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl", minversion="1.16", reason="TRL is in the environment with torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TEXT = "Record: Ben bought 9 red pens for 2 coins each."
LONGEST = 12


def theirs(tokenizer, row, max_length):
    """Place -> target of the row, as TRL prepares it and its model shifts the labels; None: it leaves the row out."""
    completion_only = "completion" in row or "completion_mask" in row
    trainer = types.SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=completion_only)
    args = trl.SFTConfig(output_dir="nowhere", max_length=max_length, bf16=False, use_cpu=True, report_to="none")
    found = trl.SFTTrainer._prepare_dataset(
        trainer, datasets.Dataset.from_list([row]), tokenizer, args, False, None, "train"
    )
    return [{n: label for n, label in enumerate(one["labels"][1:]) if label != -100} for one in found]


@pytest.mark.parametrize("kind", ["text", "completion", "labels", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize("cut", [False, True])
def test_targets(kind, cut):
    """The last of max_seq_length inputs has a target too, the token behind it; TRL counts that one as well."""
    tokenizer = load_tokenizer(Path(fastjax.__file__).parent / "assets" / "tiny-llama")
    ids = tokenizer(TEXT)["input_ids"]
    half = [int(place > 2) for place in range(len(ids))]
    row = {
        "text": {"text": TEXT},
        "completion": {"prompt": TEXT[:7], "completion": TEXT[7:]},
        "labels": {
            "input_ids": ids,
            "labels": [one if learnt else -100 for one, learnt in zip(ids, half, strict=True)],
        },
    }.get(kind, {"input_ids": ids, kind: half})
    assert len(ids) > LONGEST + 2
    length = LONGEST if cut else 128
    rows = prepare([row], tokenizer, length, uncached(packing=False))
    (targets,) = rows.rows.rows([0]).targets.tolist()
    ours = {place: target for place, target in enumerate(targets) if target != -100}
    assert [ours] == theirs(tokenizer, row, length + 1) and rows.statistics.truncated == cut
    if cut:
        (shorter,) = theirs(tokenizer, row, length)
        assert shorter == {place: target for place, target in ours.items() if place < length - 1} != ours
