"""TRL's and Unsloth's names: a run as their notebooks write it, what their settings become, what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import fastjax
from fastjax import (
    FastLanguageModel,
    OptimizerConfig,
    SFTConfig,
    SFTTrainer,
    train_on_responses_only,
)
from fastjax.errors import ConfigError, DataError

ASSETS = Path(fastjax.__file__).parent / "assets"


def rows(count=24):
    lines = (ASSETS / "tiny-chat" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=ASSETS / "tiny-llama", max_seq_length=256, dtype=None, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=4,
        target_modules=["q_proj", "v_proj"],
        lora_alpha=8,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    return model, tokenizer


def test_a_notebook_s_cells(loaded, tmp_path, capsys):
    """Unsloth's and TRL's names of a run, and the settings that they become."""
    model, tokenizer = loaded
    model.print_trainable_parameters()
    trained, every = model.num_parameters()
    said = f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}\n"
    assert capsys.readouterr().out == said
    args = {"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 2e-4, "embedding_learning_rate": 1e-5}
    args = SFTConfig(output_dir=str(tmp_path / "out"), optim="adamw_8bit", **args)
    data = {"train_dataset": rows(), "max_seq_length": 128, "dataset_num_proc": 2, "packing": True}
    trainer = SFTTrainer(model=model, tokenizer=tokenizer, args=args, **data)
    whole = trainer._trainer.config
    trainer = train_on_responses_only(trainer, instruction_part="<|user|>", response_part="<|assistant|>")
    answers = trainer._trainer.config
    assert (whole.data.loss_on, answers.data.loss_on, whole.data.packing) == ("all", "responses", True)
    assert (answers.model.max_seq_length, answers.model.use_gradient_checkpointing) == (128, "offload")
    expected = OptimizerConfig(
        name="adamw_8bit",
        learning_rate=2e-4,
        embedding_learning_rate=1e-5,
        lr_scheduler_type="linear",
        warmup_ratio=0.0,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    assert answers.optimizer == expected and (answers.training.max_steps, answers.output.save_steps) == (2, 500)


def test_what_is_saved_by_their_methods(loaded, tmp_path):
    loaded[0].save_pretrained_merged(str(tmp_path), loaded[1], save_method="lora")
    for method in ("merged_16bit", "merged_4bit"):
        folder = loaded[0].save_pretrained_merged(str(tmp_path / method), loaded[1], save_method=method)
        assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    again, _ = FastLanguageModel.from_pretrained(tmp_path, 128)  # and the base that it names
    assert again.lora is not None and again.lora.r == 4 and again.folder == ASSETS / "tiny-llama"
    jax.tree.map(np.testing.assert_array_equal, again.trainable, loaded[0].trainable)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match=r"base_model_name_or_path: expected the base's folder or name, got none"):
        FastLanguageModel.from_pretrained(tmp_path, 128)


def test_answers_alone_of_rows_of_text(loaded, tmp_path):
    """Texts are learnt as their conversations are; a part that no row has is refused."""
    model, tokenizer = loaded
    texts = [{"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)} for row in rows(8)]
    parts = {
        "instruction_part": "<|start_header_id|>user<|end_header_id|>\n",
        "response_part": "<|start_header_id|>assistant<|end_header_id|>\n",
    }
    learnt = []
    for name, given in (("texts", texts), ("conversations", rows(8))):
        trainer = SFTTrainer(model, SFTConfig(output_dir=str(tmp_path / name)), given, tokenizer=tokenizer)
        with pytest.raises(ConfigError, match="expected instruction_part, response_part and num_proc, got return_func"):
            train_on_responses_only(trainer, return_function=True)
        if name == "texts":
            with pytest.raises(DataError, match="none of the 8 examples has a token to learn: no text behind '<none>'"):
                train_on_responses_only(trainer, instruction_part="<u>", response_part="<none>").train()
        train_on_responses_only(trainer)  # which finds the parts in the chat template
        assert trainer._parts == (parts if name == "texts" else None)
        labels = trainer.train_dataset["labels"]
        learnt.append([[label for label in row if label != -100] for row in labels])
    said = [message["content"] for message in rows(8)[5]["messages"] if message["role"] == "assistant"]
    assert tokenizer.decode(learnt[0][5]) == "".join(f"{text}<|eot_id|>" for text in said)
    assert learnt[0] == learnt[1] and train_on_responses_only(trainer, **parts).args.assistant_only_loss


def test_rows_of_token_ids(loaded):
    """Their labels say what is learnt; no text is left to search."""
    trainer = SFTTrainer(loaded[0], SFTConfig(output_dir="nowhere"), [{"input_ids": [5, 6], "labels": [-100, 6]}])
    assert trainer._trainer.config.data.loss_on == "responses"
    with pytest.raises(ConfigError, match=r"expected rows of conversations or texts, got token ids \(input_ids\)"):
        train_on_responses_only(trainer, instruction_part="<|user|>", response_part="<|assistant|>")


@pytest.mark.parametrize(
    ("given", "section", "expected"),
    [
        ({"warmup_steps": 0.1}, 2, {"warmup_steps": 0, "warmup_ratio": 0.1}),
        ({"warmup_steps": 7.0, "warmup_ratio": 0.5}, 2, {"warmup_steps": 7, "warmup_ratio": 0.0}),
        ({"warmup_ratio": 0.5}, 2, {"warmup_steps": 0, "warmup_ratio": 0.5}),
        ({"warmup_steps": 7, "lr_scheduler_type": "constant"}, 2, {"warmup_steps": 0, "warmup_ratio": 0.0}),
        ({"warmup_steps": 7, "lr_scheduler_type": "constant_with_warmup"}, 2, {"warmup_steps": 7}),
        ({"train_sampling_strategy": "group_by_length"}, 1, {"group_by_length": True}),
        (
            {"full_determinism": True, "router_aux_loss_coef": 0.1},
            1,
            {"deterministic": True, "router_aux_loss_coef": 0.1},
        ),
        ({"run_name": "r", "gradient_checkpointing": True, "logging_strategy": "steps"}, 0, {"run_name": "r"}),
    ],
)
def test_what_names_become(loaded, given, section, expected):
    """As transformers means them: below 1 warmup_steps are a share, and "constant" has no warm-up."""
    settings = SFTConfig(**given).settings(loaded[0])
    found = (settings.output, settings.training, settings.optimizer)[section]
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_every_name_of_theirs_is_known(loaded):
    """A default of theirs is what is done here, but for CPO, of which SimPO alone is, and the order of KTO's rows; of
    other values those that are not taken are refused in words."""
    trl = pytest.importorskip("trl", minversion="1.16", reason="TRL is in the environment with torch")
    from trl.experimental import cpo, orpo

    taken = refused = 0
    for kind, place in {"SFT": trl, "DPO": trl, "KTO": trl, "Reward": trl, "ORPO": orpo, "CPO": cpo}.items():
        ours, theirs = getattr(fastjax, f"{kind}Config"), getattr(place, f"{kind}Config")
        served = {"CPO": {"loss_type": "simpo", "cpo_alpha": 0.0}, "KTO": {"train_sampling_strategy": "random"}}
        served = served.get(kind, {})
        for field in dataclasses.fields(theirs):
            value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            if field.init and field.name not in served:
                ours(**served | {field.name: value})
            for value in (None, 3, "x", object()) if field.init else ():
                try:
                    ours(**served | {field.name: value}).settings(loaded[0])
                    taken += 1
                except ConfigError:
                    refused += 1
    assert taken > 500 < refused


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_their_settings_and_callbacks(loaded, tmp_path):
    """TrainingArguments, TRL's own config and callbacks of transformers, as their users hold them."""
    transformers, trl = pytest.importorskip("transformers"), pytest.importorskip("trl")
    names = {"max_steps": 6, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    names |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "per_device_train_batch_size": 1}
    theirs = transformers.TrainingArguments(str(tmp_path), **names, lr_scheduler_type="cosine", report_to="none")
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    data = {"train_dataset": rows(4), "eval_dataset": rows(1), "callbacks": [stopping, transformers.PrinterCallback]}
    stats = SFTTrainer(loaded[0], args=theirs, **data).train()
    assert 2 <= stats.global_step <= 3 and stats.config.optimizer.learning_rate == 5e-5
    own = SFTTrainer(loaded[0], args=trl.SFTConfig(str(tmp_path), bf16=False, packing=True), train_dataset=rows(1)).args
    assert (own.packing, own.learning_rate, own.bf16) == (True, 2e-5, False)
    refused = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match="use_cpu: expected none, got True"):
        SFTTrainer(loaded[0], args=refused, train_dataset=rows(1))


def test_evaluations_and_saves(loaded):
    by_epoch = SFTConfig(eval_strategy="epoch", save_strategy="steps", save_steps=0.2).settings(loaded[0], True)
    assert (by_epoch.training.eval_steps, by_epoch.output.save_steps) == ("epoch", 0.2)


def test_a_gguf_file(loaded, tmp_path):
    gguf = pytest.importorskip("gguf")
    file = loaded[0].save_pretrained_gguf(
        tmp_path / "gguf", loaded[1], quantization_method="q8_0", pre_tokenizer="llama-bpe"
    )
    card = tmp_path / "gguf" / "README.md"
    assert file.read_bytes()[:4] == b"GGUF" and file.name == "gguf-q8_0.gguf"
    assert {*(tmp_path / "gguf").iterdir()} == {file, file.with_suffix(".Modelfile"), card}
    assert "\nllama-server -m gguf-q8_0.gguf --jinja\n" in card.read_text(encoding="utf-8")
    skipping = {"quantization_method": ["Q8_0"], "pre_tokenizer": "llama-bpe", "skip": ["down_proj"]}
    (other,) = loaded[0].save_pretrained_gguf(tmp_path / "other", loaded[1], **skipping)
    kept = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(other).tensors}
    assert kept["blk.0.ffn_down.weight"] != "Q8_0" == kept["blk.0.ffn_up.weight"]
    with pytest.raises(ConfigError, match="quantization_method: expected one of f32, .* got q4_k_m; .* llama-quantize"):
        loaded[0].save_pretrained_gguf(tmp_path / "gguf", quantization_method="q4_k_m")


@pytest.mark.parametrize(
    ("given", "loss_on", "expected"),
    [
        ({}, "all", "messages"),
        ({"assistant_only_loss": True}, "responses", "messages"),
        ({}, "responses", "prompt"),
        ({"completion_only_loss": False}, "all", "prompt"),
        ({"dataset_text_field": "story"}, "responses", "story"),
    ],
)
def test_what_is_learnt_is_what_it_is_there(loaded, given, loss_on, expected):
    """Of conversations all unless it is said, of completions these unless it is said."""
    data = {
        "messages": rows(2),
        "prompt": [{"prompt": "a", "completion": "b"}],
        "story": [{"story": "once"}],
    }[expected]
    trainer = SFTTrainer(loaded[0], SFTConfig(output_dir="nowhere", **given), iter(data))
    assert trainer._trainer.config.data.loss_on == loss_on


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"peft_config": object()}, "peft_config: expected none, .* use FastLanguageModel.get_peft_model"),
        (
            {"train_sampling_strategy": "sequential"},
            "train_sampling_strategy: expected one of random, group_by_length, got 'sequential'",
        ),
        (
            {"packing_strategy": "wrapped"},
            r"packing_strategy: expected none or 'bfd', .* use TrainerSettings\(too_long",
        ),
        ({"bogus": 1}, "SFTConfig: bogus: expected a name of SFTConfig, got an unknown one"),
        ({"max_steps": "ten"}, "SFTConfig: max_steps: expected a number, got 'ten'"),
        ({"optim": "sgd"}, "SFTConfig: optim: expected one of adamw_torch, .* got 'sgd'"),
        ({"save_strategy": "best"}, "SFTConfig: save_strategy: expected one of no, steps, epoch, got 'best'"),
        (
            {"fp16": True},
            "SFTConfig: fp16: expected none over a model that computes in .*; load it with dtype='float16'",
        ),
    ],
)
def test_names_that_are_not_served(loaded, others, message):
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(loaded[0], train_dataset=rows(1), **others)
    with pytest.raises(ConfigError, match=message):
        SFTConfig(**others).settings(loaded[0], True)
    with pytest.raises(ConfigError, match="trainer: expected a SFTTrainer, got a ModelHandle"):
        train_on_responses_only(loaded[0])
    with pytest.raises(ConfigError, match="save_method: expected one of merged_16bit, .*, lora, got merged_8bit"):
        loaded[0].save_pretrained_merged("nowhere", save_method="merged_8bit")
