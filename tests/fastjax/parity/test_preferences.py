"""Ten steps over preferences equal TRL's, from the names of its trainers: same rows, batches and adapter.

And reward models that are written are transformers' classifiers, and PEFT's adapters on them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fastjax
from fastjax import FastLanguageModel
from fastjax.data import Batches, prepare
from fastjax.data.sources import given_rows
from fastjax.language_model.rewards import with_score_head
from tests.support.data import uncached

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl", minversion="1.16")
#: TRL's own: of its imports, and of its experimental trainers.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TINY = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
STEPS, BATCH = 10, 4
LOSS_TOLERANCE = 1e-4  # float32, losses of 0.3 to 6
ADAPTER_TOLERANCE = 1e-4  # float32; relative, Frobenius, a tensor
SHARED = {
    "per_device_train_batch_size": BATCH,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-4,  # with less of it Adam makes whole steps of gradients that are rounding alone
    "save_strategy": "no",
    "max_length": 60,
}
CASES = {
    "DPO": {"beta": 0.3},
    "ORPO": {"beta": 0.5},
    "KTO": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.2},
    "CPO": {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7},
    "Reward": {"center_rewards_coefficient": 0.05},
}
REWARDS_TOLERANCE = 1e-4  # float32, rewards of order one
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


def ranked():
    """The last two are longer than max_length and left out; so many others as two batches hold."""
    first = {"prompt": "Nothing was bought.", "chosen": " So nobody has pens.", "rejected": " Ben has 3 pens."}
    found = [first, {**first, "prompt": "Who has pens?"}, *pairs()]
    return [{**row, "margin": 0.2 * number} for number, row in enumerate(found)]


def answers():
    """One batch, so that TRL's rotation within a batch is the one over the data set."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 3 else "rejected"], "label": number % 3 > 0}
        for number, row in enumerate(pairs()[:BATCH])
    ]


@pytest.fixture(scope="module")
def base():
    """A value, which no run changes, and its tokenizer."""
    model, tokenizer = FastLanguageModel.from_pretrained(TINY, max_seq_length=120, load_in_4bit=False)
    return model.value, tokenizer


def causal(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def classifier(folder, **options):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **options)


def theirs(kind, options, rows, start, folder, tokenizer):
    """The losses of TRL's steps over rows in this order; the trained adapter is in the folder."""
    from trl.experimental import cpo, orpo

    place = {"ORPO": orpo, "CPO": cpo}.get(kind, trl)
    model = classifier(TINY, num_labels=1) if kind == "Reward" else causal(TINY)
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


# Answers alone, beside a base. IPO is in training/preferences/test_objectives.py, the loss of rewards, with its margins
# and centre, in test_reward.py there.
@pytest.mark.exhaustive("KTO")
@pytest.mark.parametrize("kind", CASES)
def test_ten_steps(kind, base, tmp_path):
    model, tokenizer = base
    model = with_score_head(model) if kind == "Reward" else model
    # DPO begins with an adapter that is not the base: as there the reference is a copy of it.
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, init_lora_weights=kind != "DPO")
    model.save_pretrained(tmp_path / "start")
    data, options = {"KTO": answers, "Reward": ranked}.get(kind, pairs)(), CASES[kind]
    args = getattr(fastjax, f"{kind}Config")(output_dir=str(tmp_path / "run"), **SHARED, **options)
    ours = getattr(fastjax, f"{kind}Trainer")(model, args=args, train_dataset=data, processing_class=tokenizer)
    ours.train()
    ours.save_model(tmp_path / "ours")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]

    order = np.tile(np.arange(BATCH), STEPS)
    if kind != "KTO":
        pairing, too_long = ("ranked", "drop") if kind == "Reward" else ("paired", "truncate")
        settings = uncached(packing=False, too_long=too_long)
        packed = prepare(given_rows(data, "rows"), tokenizer, 120, settings, preferences=(pairing, 60)).rows
        order = np.concatenate([Batches(packed, BATCH, seed=args.seed).row_numbers(n).ravel() for n in range(STEPS)])
        assert len(packed) == 8 and packed.documents.examples[packed.order].tolist() == np.repeat(range(8), 2).tolist()
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


def test_reward_models_in_files(base, tmp_path):
    """Adapter, merged folder, whole model: rewards of texts in a padded batch, and all of it read back."""
    model, tokenizer = base
    model = with_score_head(model, 2)
    ours = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights=False)
    texts = [row["prompt"] + row["chosen"] for row in pairs()]
    ended = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True)
    assert len({int(length) for length in ended["attention_mask"].sum(1)}) > 3

    def rewards(theirs):
        theirs.config.pad_token_id = tokenizer.pad_token_id
        with torch.no_grad():
            return theirs(input_ids=ended["input_ids"], attention_mask=ended["attention_mask"]).logits[:, 0].numpy()

    def same(found, expected):
        assert np.ptp(expected) > 0.05
        np.testing.assert_allclose(found, expected, atol=REWARDS_TOLERANCE, rtol=0)

    expected = ours.rewards(texts)
    ours.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(classifier(TINY, num_labels=1), tmp_path / "adapter")
    same(rewards(theirs), expected)
    theirs.save_pretrained(tmp_path / "theirs")  # with PEFT's own settings of such a task
    same(FastLanguageModel.load_adapter(base[0], tmp_path / "theirs").rewards(texts), expected)

    ours.save_pretrained_merged(tmp_path / "merged", dtype="float32")
    merged = classifier(tmp_path / "merged")
    assert merged.config.num_labels == 1 and type(merged).__name__ == "LlamaForSequenceClassification"
    assert merged.config.pad_token_id == tokenizer.pad_token_id
    same(rewards(merged), expected)
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "merged", max_seq_length=120, load_in_4bit=False)
    same(again.rewards(texts), expected)

    whole = FastLanguageModel.from_pretrained(TINY, max_seq_length=120, load_in_4bit=False, full_finetuning=True)[0]
    whole.with_score_head(2).save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert stored["score.weight"].shape == (1, 192) and stored["score.weight"].dtype.name == "bfloat16"
    assert "lm_head.weight" not in stored
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "whole", max_seq_length=120, load_in_4bit=False)
    same(again.rewards(texts), rewards(classifier(tmp_path / "whole")))
