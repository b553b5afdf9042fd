"""Real text, packed and unpacked by the data pipeline, has the same loss and gradients."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastjax.data import Batches, load_tokenizer, prepare
from tests.support import steps, tiny
from tests.support.data import uncached

SHARED = Path(__file__).parents[4] / "shared" / "data"

pytestmark = [
    pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the data in {SHARED}"),
]

#: float32: sums over two thousand tokens in two orders.
TOLERANCE = 5e-6


@pytest.mark.exhaustive(
    by="tests/fastjax/training/test_step.py::test_packed_equals_unpacked_in_loss_and_every_gradient"
)
def test_packed_rows_train_as_unpacked_ones(tmp_path):
    lines = (SHARED / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:9]
    rows = [json.loads(line) for line in lines]
    chats = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    tokenizer = load_tokenizer(SHARED / "tokenizer_neox")
    packed, unpacked = (
        prepare(file, tokenizer, 512, uncached(chat_template="plain", packing=packing)).rows
        for packing in (True, False)
    )
    assert len(packed) < len(unpacked) == len(chats)
    # The few hundred tokens that occur, by new numbers: a model of the whole vocabulary is the most of the work.
    used = np.unique(packed.documents.tokens)
    for own in (packed, unpacked):
        own.documents.tokens[:] = np.searchsorted(used, own.documents.tokens)
    config = tiny.config(vocab_size=len(used), num_hidden_layers=2, max_position_embeddings=512)
    ours = tiny.adapted(tiny.model(tmp_path / "model", config, max_seq_length=512))
    found = [steps.gradients(ours, Batches(rows, len(rows), shuffle=False).batch(0)) for rows in (packed, unpacked)]
    (metrics, gradients), (expected_metrics, expected) = found
    assert metrics["num_targets"] == expected_metrics["num_targets"] > 300
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=TOLERANCE)
    steps.assert_close(gradients, expected, TOLERANCE)
