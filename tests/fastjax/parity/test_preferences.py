"""Ten steps over preferences equal TRL's, from the names of its trainers: same rows, batches and adapter."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fastjax
from fastjax import FastLanguageModel
from fastjax.data import Batches, prepare
from fastjax.data.sources import given_rows

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl", minversion="1.16")
#: TRL's own: of its imports, and of its experimental trainers.
pytestmark = [pytest.mark.torch, pytest.mark.one_world, pytest.mark.filterwarnings("ignore")]

TINY = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
STEPS, BATCH = 10, 4
LOSS_TOLERANCE = 1e-4  # float32, losses of 0.3 to 6
ADAPTER_TOLERANCE = 1e-3  # relative, Frobenius, a tensor: Adam divides by gradients' roots, which amplifies rounding
SHARED = {
    "per_device_train_batch_size": BATCH,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "max_length": 60,
}
CASES = {
    "DPO": {"beta": 0.3},
    "ORPO": {"beta": 0.5},
    "KTO": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.2},
    "CPO": {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7},
}
NAMES = ("Ben", "Ann", "Tom", "Eva", "Max", "Ida", "Leo", "Zoe")


def pairs():
    """The last is longer than max_length."""
    return [
        {
            "prompt": f"Record: {name} bought {number + 2} red pens for {number} coins each.",
            "chosen": f" {name} has {number + 2} pens" + " and more" * (number // 3) * number,
            "rejected": " Nobody knows" + ", as far as I know" * (number % 3) + ".",
        }
        for number, name in enumerate(NAMES)
    ]


def answers():
    """One batch, so that TRL's rotation within a batch is the one over the data set."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 3 else "rejected"], "label": number % 3 > 0}
        for number, row in enumerate(pairs()[:BATCH])
    ]


@pytest.fixture(scope="module")
def base():
    return FastLanguageModel.from_pretrained(TINY, max_seq_length=120, load_in_4bit=False)


def theirs(kind, options, rows, start, folder, tokenizer):
    """The losses of TRL's steps over rows in this order; the trained adapter is in the folder."""
    from transformers import AutoModelForCausalLM
    from trl.experimental import cpo, orpo

    place = {"ORPO": orpo, "CPO": cpo}.get(kind, trl)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, start, is_trainable=True)
    args = getattr(place, f"{kind}Config")(
        output_dir=str(folder / "trl"),
        train_sampling_strategy="sequential",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        **SHARED,
        **options,
    )
    datasets = pytest.importorskip("datasets")
    trainer = getattr(place, f"{kind}Trainer")(
        model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    losses, compute = [], trainer.compute_loss

    def kept(*arguments, **named):
        found = compute(*arguments, **named)
        losses.append(float(found))
        return found

    trainer.compute_loss = kept
    trainer.train()
    model.save_pretrained(folder / "theirs", selected_adapters=["default"])
    return losses


@pytest.mark.parametrize("kind", CASES)
def test_ten_steps(kind, base, tmp_path):
    model, tokenizer = base
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    model.save_pretrained(tmp_path / "start")
    data, options = answers() if kind == "KTO" else pairs(), CASES[kind]
    args = getattr(fastjax, f"{kind}Config")(output_dir=str(tmp_path / "run"), **SHARED, **options)
    ours = getattr(fastjax, f"{kind}Trainer")(model, args=args, train_dataset=data, processing_class=tokenizer)
    ours.train()
    ours.save_model(tmp_path / "ours")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]

    order = np.tile(np.arange(BATCH), STEPS)
    if kind != "KTO":
        packed = prepare(given_rows(data, "rows"), tokenizer, 120, preferences=("paired", 60), packing=False).rows
        order = np.concatenate([Batches(packed, BATCH, seed=args.seed).row_numbers(n).ravel() for n in range(STEPS)])
    expected = theirs(kind, options, [data[n] for n in order], tmp_path / "start", tmp_path, tokenizer)

    assert len(expected) == STEPS and min(expected[-3:]) < expected[0] - 0.02, "nothing was learnt"
    np.testing.assert_allclose(losses, expected, atol=LOSS_TOLERANCE, rtol=0)
    files = (tmp_path / name / "adapter_model.safetensors" for name in ("start", "ours", "theirs"))
    before, found, right = map(load_file, files)
    assert set(found) == set(right)
    for name, tensor in right.items():
        moved = np.linalg.norm(tensor - before[name])
        assert moved > 0 and np.linalg.norm(found[name] - tensor) < ADAPTER_TOLERANCE * np.linalg.norm(tensor), name
    if kind == "KTO":
        assert max(row["kl"] for row in rows if "kl" in row) > 0.01
