"""TRL's trainers as notebooks hold them: state, metrics, callbacks, rows to look at, settings by every way in."""

import dataclasses
import enum
import json
from pathlib import Path

import numpy as np
import pytest

import fastjax
from fastjax import DPOTrainer, FastLanguageModel, ORPOConfig, SFTConfig, SFTTrainer
from fastjax.errors import ConfigError

ASSETS = Path(fastjax.__file__).parent / "assets"


@pytest.fixture(scope="module")
def loaded():
    base, tokenizer = FastLanguageModel.from_pretrained(ASSETS / "tiny-llama", 64)
    return FastLanguageModel.get_peft_model(base, r=2, target_modules=["q_proj"]), tokenizer


class TrainerCallback:
    """Transformers' base class, as far as it matters: its methods do nothing."""

    def on_train_begin(self, args, state, control, **given): ...
    def on_step_begin(self, args, state, control, **given): ...


class Heard(TrainerCallback):
    def __init__(self):
        self.told = []

    def on_train_begin(self, args, state, control, **given):
        assert args.learning_rate == 1e-3 and args.torch_compile is None and given["processing_class"] is not None
        self.told.append(("begin", state.max_steps))

    def on_log(self, args, state, control, logs=None, **given):
        self.told.append(("log", state.global_step, *logs))

    def on_evaluate(self, args, state, control, metrics, **given):
        self.told.append(("evaluate", state.global_step, state.best_metric is None))

    def on_step_end(self, args, state, control, **given):
        if state.global_step == 3:
            control.should_training_stop = True
        return control

    def on_train_end(self, args, state, control, **given):
        self.told.append(("end", state.global_step))


def test_a_run_as_transformers_tells_it(loaded, tmp_path):
    """State, history, metrics and callbacks; a second run replaces the first, and the model goes on."""
    model, tokenizer = loaded
    texts = [{"text": "w" * (n + 3), "instruction": "a", "output": "b"} for n in range(9)]
    args = {"output_dir": tmp_path / "outputs", "max_steps": 8, "logging_steps": 2, "eval_strategy": "steps"}
    args |= {"eval_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    heard, events = Heard(), []
    trainer = SFTTrainer(model, args=args, train_dataset=texts, eval_dataset=texts[:2], callbacks=[heard])
    trainer.add_callback(lambda event: events.append(event.name))
    stats = trainer.train()
    assert 3 <= stats.global_step == trainer.state.global_step <= 4 and trainer.state.epoch > 0
    assert {"train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second"} <= stats.metrics.keys()
    steps = [json.loads(line) for line in (tmp_path / "outputs" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in steps if "loss" in row]
    assert stats.training_loss == pytest.approx(np.mean(losses)) == stats.metrics["train_loss"]
    history = trainer.state.log_history
    assert history[0]["loss"] == pytest.approx(np.mean(losses[:2])) and "train_runtime" in history[-1]
    assert heard.told[0] == ("begin", 8) and heard.told[-1] == ("end", stats.global_step)
    assert ("log", 2, "loss", "grad_norm", "learning_rate", "epoch") in heard.told
    assert ("evaluate", 2, True) in heard.told and trainer.state.best_metric == min(
        row["eval_loss"] for row in history if "eval_loss" in row
    )
    assert "step" in events and "evaluation" in events
    evaluated = [row for row in history if "eval_loss" in row][-1]
    now = trainer.evaluate()
    assert history[-1] == {**now, "step": stats.global_step} and now["eval_loss"] == evaluated["eval_loss"]
    other = trainer.evaluate(texts[:5], metric_key_prefix="test")
    assert other["test_samples_per_second"] > 0 and other["test_num_targets"] > now["eval_num_targets"]
    trainer.remove_callback(Heard)
    again = trainer.train()
    assert again.folder == stats.folder and again.training_loss < stats.training_loss
    with pytest.raises(ConfigError, match="resume_from_checkpoint: expected true, or the newest checkpoint of"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))


def test_evaluation_without_a_strategy(loaded, capsys):
    """A model is its own reference before training; the run says that it leaves the held-out rows alone."""
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c d"}] * 3
    trainer = DPOTrainer(loaded[0], train_dataset=pairs, eval_dataset=pairs)
    measured = trainer.evaluate()
    assert measured["eval_loss"] == pytest.approx(np.log(2)) and "held out: 6 documents" in capsys.readouterr().out
    [line] = trainer._unused()
    assert line.startswith('eval_dataset: not used while training, since eval_strategy is "no"')
    short = SFTTrainer(loaded[0], SFTConfig(max_length=4096), [{"text": "a"}])
    assert next(short._unused()).startswith("max_length: 4096, but the model was loaded for rows of 64")


@pytest.mark.parametrize(
    ("args", "rows", "message"),
    [
        ({"assistant_only_loss": True}, [{"text": "a"}], "assistant_only_loss: expected false over rows of texts"),
        ({"completion_only_loss": True}, [{"text": "a"}], "got true; use train_on_responses_only"),
        ({"eval_strategy": "epoch"}, [{"text": "a"}], "eval_strategy: expected an eval_dataset with it"),
        (
            {"eval_dataset": {"a": []}},
            [{"text": "a"}],
            "expected one data set, got a mapping of a; give one, or",
        ),
        ({"learning_rat": 1}, [{"text": "a"}], "got an unknown one; did you mean learning_rate[?]"),
        ({"tokenizer": "gpt2"}, [{"text": "a"}], "tokenizer: expected the one that .* got a str"),
    ],
)
def test_refused_with_a_way_out(loaded, args, rows, message):
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(loaded[0], train_dataset=rows, **args)


def test_clipping_that_is_off(loaded):
    trainer = SFTTrainer(loaded[0], SFTConfig(max_grad_norm=None), [{"text": "a"}])
    assert trainer._trainer.config.optimizer.max_grad_norm == 0


def test_rows_to_look_at(loaded):
    """The text column wins over others; formatting_func makes one, of a row or of a batch."""
    model, tokenizer = loaded
    rows = [{"text": "one", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}] * 3
    by_column = SFTTrainer(model, SFTConfig(), rows).train_dataset
    assert len(by_column) == 3 and tokenizer.decode(by_column[1]["input_ids"]).endswith("one<|eot_id|>")
    assert by_column["labels"][0][1:] == by_column[0]["input_ids"][1:] and by_column.column_names[0] == "input_ids"
    asked = [{"q": "who", "a": "me"}]
    for function in (lambda row: f"{row['q']}: {row['a']}", lambda rows: [f"{q}: {rows['a'][0]}" for q in rows["q"]]):
        made = SFTTrainer(model, SFTConfig(), asked, formatting_func=function).train_dataset
        assert "who: me" in tokenizer.decode(made[0]["input_ids"])


class _Strategy(enum.StrEnum):
    EPOCH = "epoch"


@dataclasses.dataclass
class TrainingArguments:
    """Transformers' settings in small."""

    output_dir: str = ""
    learning_rate: float = 5e-5
    save_strategy: str = "steps"
    dataloader_num_workers: int = 0
    use_cpu: bool = False
    accelerator_config: dict = dataclasses.field(default_factory=lambda: {"split_batches": False})


@pytest.mark.parametrize("way", ["config", "keywords", "mapping", "theirs"])
def test_every_way_in(loaded, way):
    given = {"output_dir": "nowhere", "save_strategy": _Strategy.EPOCH, "dataloader_num_workers": 2}
    refused = {**given, "use_cpu": True}

    def trainer(named):
        made = {"config": SFTConfig, "mapping": dict, "theirs": TrainingArguments}.get(way)
        given = named if made is None else {"args": made(**named)}
        return SFTTrainer(loaded[0], train_dataset=[{"text": "a"}], **given)

    args = trainer(given).args
    assert (args.save_strategy, args.dataloader_num_workers) == ("epoch", 2)
    assert args.learning_rate == (5e-5 if way == "theirs" else 2e-5)
    with pytest.raises(ConfigError, match="SFTConfig: use_cpu: expected none, got True; use the environment's JAX_PLA"):
        trainer(refused)


def test_names_of_notebooks(loaded):
    """Unsloth's names, and what is not built, each with a sentence; a callback that would never be called."""
    from fastjax.trainer import PatchDPOTrainer, UnslothTrainer, UnslothTrainingArguments, is_bfloat16_supported

    assert PatchDPOTrainer() is None and fastjax.is_bf16_supported() is is_bfloat16_supported() is True
    args = UnslothTrainingArguments(embedding_learning_rate=1e-5, bf16=True, evaluation_strategy="no")
    collator = type("DataCollatorForSeq2Seq", (), {})()
    trainer = UnslothTrainer(loaded[0], args=args, train_dataset=[{"text": "a"}], data_collator=collator)
    assert trainer._trainer.config.optimizer.embedding_learning_rate == 1e-5 and trainer.tokenizer is not None
    for name in ("GRPOTrainer", "FastVisionModel", "execute_with_time_limit", "TrlParser"):
        with pytest.raises(ImportError, match=f"^{name}: .*; use|^{name}: use"):
            getattr(fastjax, name)
    with pytest.raises(AttributeError, match="DPOTrainer has no predict; use model.generate"):
        pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
        DPOTrainer(loaded[0], args=ORPOConfig().others, train_dataset=pairs).predict()
    with pytest.raises(ConfigError, match="data_collator: expected none, or one that pads .* got Heard"):
        SFTTrainer(loaded[0], train_dataset=[{"text": "a"}], data_collator=Heard())
    wanting = type("Mine", (TrainerCallback,), {"on_log": lambda self, args, state, control, model, **_: None})()
    untold = type("Mine", (TrainerCallback,), {"on_step_begin": lambda *_, **__: None, "on_log": None})()
    wants = (wanting, "Mine.on_log: expected no argument model")
    never = (untold, "Mine: expected none of .*got on_step_begin")
    for callback, message in (wants, never, (3, "expected transformers'")):
        with pytest.raises(ConfigError, match=f"callbacks: {message}"):
            SFTTrainer(loaded[0], train_dataset=[{"text": "a"}], callbacks=[callback])
