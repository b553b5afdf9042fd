"""`fastjax import-config`: settings of Axolotl, LLaMA-Factory and torchtune, to files that `fastjax train` takes."""

import dataclasses
import json
import operator
import subprocess
import sys

import pytest
import yaml

from fastjax.cli import main
from fastjax.commands.import_config import written
from fastjax.config_import import TOOLS, Job
from tests.support.folders import read_adapter
from tests.support.other_runs import RUNS
from tests.support.other_tools import (
    AXOLOTL,
    LLAMA_FACTORY,
    TORCHTUNE,
    lists,
)


def test_axolotl(imported, tmp_path):
    config, out = imported(AXOLOTL)
    model, lora, optimizer = config.model, config.lora, config.optimizer
    training, output = config.training, config.output
    assert (model.model_name, model.max_seq_length) == ("org/base-1b", 4096)
    assert (model.dtype, model.load_in_4bit) == ("bfloat16", True)
    assert (model.param_dtype, model.full_finetuning, model.new_tokens) == ("float32", False, ["<tool>"])
    assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.target_modules) == (32, 64, 0.05, None)
    assert lora.modules_to_save == ["embed_tokens"]
    assert (optimizer.name, optimizer.learning_rate, optimizer.warmup_steps) == ("adamw_8bit", 2e-4, 10)
    assert (optimizer.weight_decay, optimizer.max_grad_norm, optimizer.adam_beta2) == (0.01, 0.5, 0.95)
    assert (optimizer.lr_scheduler_type, optimizer.min_lr_ratio) == ("cosine", pytest.approx(0.1))
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert (training.num_train_epochs, training.eval_steps, training.early_stopping_patience) == (2, 50, 3)
    assert (training.neftune_noise_alpha, training.seed, training.logging_steps) == (5, 7, 5)
    assert (output.output_dir, output.report_to, output.run_name) == ("./outputs/talks", ["wandb"], "first")
    assert (output.project, output.entity) == ("talks", None)
    assert (config.data.chat_template, config.data.loss_on, config.data.packing) == ("llama3", "responses", True)
    assert config.data.too_long == "drop"  # Axolotl's default
    assert config.parallel.fsdp == 2
    first, second = config.data.sources("train")
    assert (first.path, first.split, first.columns) == ("org/talks", "train[:20%]", {"conversations": "conversations"})
    assert (second.path, second.split, second.columns) == (
        "org/more",
        None,
        {"conversations": "conversations"},
    )
    assert (config.data.val_set_size, config.data.eval) == (0.05, None)
    shown = lists(out)
    assert {"flash_attention", "liger_rope", "deepspeed", "tf32", "gradient_checkpointing"} <= set(shown["not needed"])
    assert {"load_in_8bit", "wandb_entity", "lora_target_linear", "model_type"} <= set(shown["not needed"])
    assert shown["not carried over"] == ["my_own_key"] and model.special_tokens_map == {"eos_token": "</s>"}
    needed = " ".join(out.partition("\nneeded (2)\n")[2].split())
    assert "base_model no folder here: it comes from the hub, over the network, as the run begins" in needed
    assert (
        "datasets no file here: `datasets` fetches over the network, as the run begins: org/talks, org/more" in needed
    )
    assert output.save_steps == 0.25  # twice in each of two epochs
    assert "its state is not paged" in out
    comments = (tmp_path / "run.yaml").read_text().partition("model:")[0]
    assert all(f"#   {key}: " in comments for key in shown["not carried over"])
    given = yaml.safe_load(AXOLOTL)
    inside = {"special_tokens": "special_tokens.eos_token", "lr_scheduler_kwargs": "lr_scheduler_kwargs.min_lr"}
    everywhere = [key for keys in shown.values() for key in keys]
    missing = {key for key in given if inside.get(key, key) not in everywhere}  # nothing is dropped in silence
    assert missing == {"plugins"} and "plugins: liger.LigerPlugin" in out


def test_no_setting_is_left_out_of_the_file(tmp_path):
    job = Job(TOOLS["axolotl"], tmp_path / "qlora.yml", {})
    job.carry("a", "training.seed", 3)
    job.carry("b", "model.model_name", "m")
    assert written(job).endswith("model:\n  model_name: m\ntraining:\n  seed: 3\n")
    job.carry("c", "lora.no_such_key", 1)
    with pytest.raises(ValueError, match="lora.no_such_key"):
        written(job)


def test_llama_factory(imported):
    config, out = imported(LLAMA_FACTORY)
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.load_in_4bit, model.dtype, model.param_dtype) == (True, "bfloat16", "bfloat16")
    assert (config.lora.r, config.lora.lora_alpha, config.lora.target_modules) == (8, 16, ["q_proj", "v_proj"])
    assert (optimizer.learning_rate, optimizer.warmup_ratio) == (1e-4, 0.1)
    assert (training.num_train_epochs, training.eval_steps, training.label_smoothing_factor) == (3.0, 100, 0.1)
    assert (config.output.save_steps, config.output.report_to) == (500, ["tensorboard"])  # transformers' default
    assert (config.data.chat_template, config.data.loss_on, config.data.packing) == ("qwen-2.5", "last_response", True)
    own, talks = config.data.sources("train")
    assert (own.path, own.split, own.columns) == (
        "own.json",
        "train[:500]",
        {"instruction": "question", "input": "input", "output": "answer"},
    )
    assert (talks.path, talks.name, talks.columns) == (
        "org/talks",
        "en",
        {"messages": "messages", "tools": "functions"},
    )
    assert config.data.val_set_size == 0.1
    shown = lists(out)
    assert set(shown["not carried over"]) == {"report_to:", "mlflow"}
    assert {"do_train", "stage", "plot_loss", "resume_from_checkpoint"} <= set(shown["not needed"])


def test_torchtune(imported):
    config, out = imported(TORCHTUNE)
    optimizer, training = config.optimizer, config.training
    assert (config.model.model_name, config.model.max_seq_length) == ("/models/3b", 2048)
    assert (config.model.load_in_4bit, config.model.dtype, config.model.param_dtype) == (False, "bfloat16", "float32")
    assert config.lora.target_modules == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (config.lora.r, config.lora.lora_alpha) == (64, 128)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.max_grad_norm) == (
        3e-4,
        0.01,
        0.0,
    )  # its defaults
    assert (optimizer.warmup_steps, optimizer.adam_beta2) == (100, 0.95)
    assert (training.num_train_epochs, training.max_steps, training.per_device_eval_batch_size) == (2, 60, None)
    assert (config.data.packing, config.data.loss_on) == (True, "responses")
    assert (config.output.report_to, config.output.project, config.output.tags) == (["wandb"], "own", ["a", "b"])
    chats, pairs = config.data.sources("train")
    assert (chats.path, chats.columns) == ("chats.json", {"messages": "talk"})
    assert (pairs.path, pairs.split, pairs.columns) == ("org/pairs", "train[:50%]", {"prompt": "q", "completion": "a"})
    shown = lists(out)
    assert shown["not carried over"] == ["shuffle"]
    assert {"batch_size_val", "optimizer.fused", "tokenizer.path", "checkpointer.checkpoint_files"} <= set(
        shown["not needed"]
    )


def test_quantisation_aware_training(imported):
    """Inputs in int8 are said to be symmetric here."""
    axolotl = f"{AXOLOTL}\nqat:\n  weight_dtype: int4\n  group_size: 32\n"
    quantizer = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
    torchtune = f"{TORCHTUNE}\nquantizer:\n  _component_: {quantizer}\n  groupsize: 32\n"
    for text, activations in ((axolotl, None), (f"{axolotl}  activation_dtype: int8\n", "int8"), (torchtune, "int8")):
        config, out = imported(text, "--force")
        assert (config.training.qat.weights, config.training.qat.activations) == ("int4-32", activations)
        said = "torchao's fake quantiser has a zero point besides" in " ".join(out.split())
        assert said == (activations is not None)


def test_full_fine_tuning_has_no_adapter(imported):
    base = {"base_model": "m", "datasets": [{"path": "a.json", "type": "completion", "field": "body"}], "bf16": "auto"}
    config, out = imported(base | {"micro_batch_size": 1, "learning_rate": 1e-5, "lora_r": 8, "eval_steps": 5})
    assert config.model.full_finetuning and not config.model.load_in_4bit
    assert (config.model.param_dtype, config.lora.r) == ("bfloat16", 16)
    assert (config.data.sources("train")[0].columns, config.data.too_long) == ({"text": "body"}, "split")
    assert (config.optimizer.warmup_ratio, config.model.max_seq_length) == (0.03, 512)  # Axolotl's defaults
    assert {"eval_steps", "lora_r"} <= set(lists(out)["not needed"])  # there is nothing to evaluate, nor an adapter


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, "epoch")),  # Axolotl's default
        ({"save_strategy": "no", "eval_strategy": "epoch"}, ("epoch", None)),
        ({"evals_per_epoch": 1, "saves_per_epoch": 1, "num_epochs": 3}, ("epoch", "epoch")),
        ({"evals_per_epoch": 1, "saves_per_epoch": 2, "max_steps": 90, "num_epochs": 3}, (1 / 3, 1 / 6)),
        ({"eval_steps": 0.05, "save_steps": 100, "saves_per_epoch": 2}, (0.05, 100)),
    ],
)
def test_evaluations_and_saves_of_axolotl(imported, given, expected):
    given = {"auto_resume_from_checkpoints": True, "group_by_length": True, **given}
    config, out = imported(ALPACA | {"val_set_size": 0.1, **given})
    assert config.output.resume and config.training.group_by_length  # Axolotl's default is no packing
    assert (config.training.eval_steps, config.output.save_steps) == expected
    assert "not carried over" not in lists(out)


def test_newer_spellings_of_transformers(imported):
    given = {"train_sampling_strategy": "group_by_length", "neat_packing": False, "warmup_steps": 0.2}
    config, _ = imported({**yaml.safe_load(LLAMA_FACTORY), **given})
    assert config.training.group_by_length and config.optimizer.warmup_ratio == 0.2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, ("epoch", "epoch")),
        ({"eval_strategy": "steps", "eval_steps": 0.2, "save_steps": 0.5}, (0.2, 0.5)),
    ],
)
def test_evaluations_and_saves_of_llama_factory(imported, tmp_path, given, expected):
    config, _ = imported({**yaml.safe_load(LLAMA_FACTORY), "use_muon": True, "group_by_length": True, **given})
    assert config.optimizer.name == "muon" and not config.training.group_by_length  # rows are packed
    assert (config.training.eval_steps, config.output.save_steps) == expected


def test_roles_of_axolotl(imported, refused):
    chat = {"path": "a.jsonl", "type": "chat_template", "roles_to_train": ["tool", "gpt"]}
    base = {"base_model": "m", "learning_rate": 1e-5, "datasets": [chat, {"path": "b", "type": "completion"}]}
    other = [*base["datasets"], {"path": "c.jsonl", "type": "chat_template"}]
    assert "datasets[].roles_to_train: data.loss_on holds for all data sets" in refused(base | {"datasets": other})
    assert imported(base)[0].data.loss_on == ["assistant", "tool"]


ALPACA = {"base_model": "m", "datasets": [{"path": "a.json", "type": "alpaca"}], "learning_rate": 1e-5}
TUNE = yaml.safe_load(TORCHTUNE)


CHAT = {"base_model": "org/Qwen3-8B", "learning_rate": 1e-5, "datasets": [{"path": "a.json", "type": "chat_template"}]}
THOUGHTS = {"field_thinking": "thinking", "template_thinking_key": "thinking"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ALPACA | {"dataset_exact_deduplication": True}, {"data.deduplicate": True}),
        (
            ALPACA | {"cosine_min_lr_ratio": 1.0},
            {"optimizer.lr_scheduler_type": "constant", "optimizer.min_lr_ratio": 0},
        ),
        (ALPACA | {"adapter": "lora", "load_in_8bit": True, "load_in_4bit": False}, {"model.load_in_4bit": False}),
        (
            ALPACA | {"special_tokens": {"bos_token": "<s>", "unk_token": "<unk>"}},
            {"model.special_tokens_map": {"bos_token": "<s>"}},
        ),
        (ALPACA | {"model_config": {"output_router_logits": True}}, {"training.router_aux_loss_coef": 0.001}),
        (ALPACA | {"unfrozen_parameters": ["^model.language_model.*", "lm_head"]}, {"model.unfrozen_parameters": None}),
        (
            ALPACA | {"unfrozen_parameters": ["lm_head", "model.layers.4[4-9]+.mlp"]},
            {"model.unfrozen_parameters": ["lm_head", "model.layers.4[4-9]+.mlp"], "model.full_finetuning": True},
        ),
        (CHAT | {"chat_template": "chatml"}, {"data.chat_template": "chatml"}),
        (CHAT | {"chat_template": "some_7"}, {"data.chat_template": None}),
        (CHAT | {"datasets": [CHAT["datasets"][0] | THOUGHTS]}, {"data.chat_template": None}),
        (CHAT | {"streaming": True, "max_steps": 9, "val_set_size": 0}, {"training.max_steps": 9}),
        (
            CHAT
            | {
                "reward_model": True,
                "num_labels": 1,
                "datasets": [{"path": "a", "type": "bradley_terry.chat_template"}],
            },
            {"preferences.loss": "reward", "preferences.beta": None},
        ),
        (
            CHAT | {"rl": "dpo", "adapter": None, "datasets": [{"path": "a", "type": "chatml.intel"}]},
            {"preferences.precompute_ref_log_probs": True, "model.full_finetuning": True},
        ),
    ],
)
def test_what_axolotl_s_keys_become(imported, given, expected):
    config, out = imported(given)
    found = {name: operator.attrgetter(name)(config) for name in expected}
    assert found == expected
    assert ("not carried over" in out) == (given.get("chat_template") == "some_7")


def test_files_of_axolotl(imported):
    """Each by itself where the path is their kind; else files of a folder, or of a data set on the hub."""
    given = [{"path": "json", "data_files": ["b.json", "c.json"]}, {"path": "org/all", "data_files": "d.json"}]
    config, _ = imported(CHAT | {"datasets": [one | {"type": None} for one in given]})
    found = [(source.path, source.data_files, source.columns) for source in config.data.sources("train")]
    ids = {"input_ids": "input_ids"}
    assert found == [("b.json", None, ids), ("c.json", None, ids), ("org/all", ["d.json"], ids)]


V1 = """
model: org/Qwen3-4B
model_class: llm
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
quant_config: {name: bnb, quantization_bit: 4}
kernel_config: {name: auto}
dist_config: {name: fsdp2, dcp_path: null}
optim_config: {name: muon, momentum: 0.9, nesterov: true, adamw_betas: [0.8, 0.9]}
train_dataset: sets.yaml
batching_strategy: padding_free
micro_batch_size: 2
global_batch_size: 8
cutoff_len: 1024
learning_rate: 1.0e-4
max_steps: 10
cp_size: 2
output_dir: outputs/one
sample_backend: hf
"""


@pytest.mark.parametrize("converter", ["alpaca", "pair", None])
def test_llama_factory_s_v1_form(imported, tmp_path, converter):
    """The data, described in YAML, say whether preferences are learnt."""
    described = {
        "one": {"path": "one.json", "source": "local", "converter": converter, "size": 9},
        "two": {"path": "org/two"},
    }
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump(described))
    text = V1.replace("name: lora, r: 16, lora_alpha: 32, target_modules: all", "name: freeze") if not converter else V1
    text = text.replace("quant_config", "other") if not converter else text
    config, out = imported(text, "--force")
    training, optimizer, first = config.training, config.optimizer, config.data.sources("train")[0]
    assert (config.model.full_finetuning, config.model.load_in_4bit) == ((False, True) if converter else (True, False))
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps, training.max_steps) == (
        2,
        4,
        10,
    )
    assert (optimizer.name, optimizer.muon_momentum, optimizer.adam_beta1, optimizer.weight_decay) == (
        "muon",
        0.9,
        0.8,
        0.1,
    )
    assert (optimizer.lr_scheduler_type, config.data.packing, config.parallel.context) == ("constant", False, 2)
    assert (first.path, first.split) == ("one.json", "train[:9]")
    kinds = {"alpaca": "instruction", "pair": "chosen", None: "messages"}
    assert kinds[converter] in first.columns and (config.preferences.loss == "dpo") == (converter == "pair")
    assert config.model.max_seq_length == (2048 if converter == "pair" else 1024)
    if converter:
        assert (config.lora.r, config.lora.lora_alpha, config.lora.lora_dropout) == (16, 32, 0.05)
    else:
        assert config.model.unfrozen_parameters == ["model.layers.-2.", "model.layers.-1."]
    assert {"kernel_config", "sample_backend", "model_class"} <= set(lists(out)["not needed"])


def test_what_a_run_needs_is_said_before_it_runs(imported, tmp_path):
    """A family, by config.json or else by the name; the network."""
    given = {"base_model": "tiiuae/Falcon-H1-1.5B-Base", "datasets": [{"path": "theirs.yml", "type": "alpaca"}]}
    _, out = imported(given | {"learning_rate": 1e-5})
    assert (
        "by its name of a kind that is not supported, falcon_h1; there are llama," in out
        and "datasets" not in lists(out)["needed"]
    )
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"model_type": "mamba"}')
    _, out = imported(given | {"base_model": "here", "learning_rate": 1e-5}, "--force")
    assert "not supported: here/config.json: model_type: expected one of llama," in out and "network" not in out
    assert "# Needed:\n#   base_model: not supported" in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ALPACA | {"rl": "grpo", "gptq": True},
            "rl: grpo: there is no PPO or GRPO; preferences.loss has dpo, ipo, kto, orpo and simpo; datasets[0].type",
        ),
        (ALPACA | {"optimizer": "muon"}, "optimizer: its updates have a spectral norm of the learning rate there"),
        (ALPACA | {"optimizer": "sgd"}, "optimizer: there is no sgd; adamw,"),
        (ALPACA | {"processor_type": "AutoProcessor"}, "processor_type: models of text only"),
        (ALPACA | {"learning_rate": "fast"}, "learning_rate: expected a number, got 'fast'"),
        (
            ALPACA | {"warmup_ratio": 2},
            "warmup_ratio: becomes optimizer.warmup_ratio: expected a number in [0, 1), got 2",
        ),
        (ALPACA | {"micro_batch_size": 2.5}, "micro_batch_size: expected an integer, got 2.5"),
        (ALPACA | {"datasets": 3}, "datasets: expected a list, got 3"),
        (ALPACA | {"datasets": [{"path": "a", "type": "jeopardy"}]}, "datasets[0].type: jeopardy is not supported"),
        (
            ALPACA | {"datasets": [{"path": "a", "type": "chat_template", "roles": {"user": ["bot"]}}]},
            "datasets[0].roles: 'bot' would be read as another role",
        ),
        (
            ALPACA | {"datasets": [{"path": "a", "type": "chat_template", "roles_to_train": [["tool"]]}]},
            "datasets[0].roles_to_train: expected some of system, human, ",
        ),
        (
            {"model_name_or_path": "m", "stage": "ppo", "dataset": "pairs"},
            "stage: ppo: there are sft, pt, dpo, kto, rm; dataset_info.json: pairs: rows of preferences",
        ),
        (
            {"model_name_or_path": "m", "stage": "sft", "dataset": "own", "train_sampling_strategy": "sequential"},
            "train_sampling_strategy: sequential: rows are shuffled (random), or of similar length in a step",
        ),
        (
            {"model_name_or_path": "m", "stage": "sft", "dataset": "none"},
            "expected names in dataset_info.json (own, talks",
        ),
        (
            TUNE | {"loss": {"_component_": "torchtune.rlhf.loss.GRPOLoss"}},
            "loss._component_: there is no PPO or GRPO",
        ),
        (TUNE | {"teacher_model": {"_component_": "x"}}, "teacher_model: there is no distillation"),
        (TUNE | {"output_dir": "${nowhere}"}, "${nowhere}: expected a reference to another value, got one to nothing"),
        ({"model": {"model_name": "m"}}, "expected the keys of one tool, axolotl's (base_model,"),
        ("- 1", "expected the keys of axolotl, llama-factory, llama-factory-v1, torchtune, got [1]"),
        ("a: [", "theirs.yml:1: not valid YAML"),
    ],
)
def test_what_would_train_another_model_is_refused(given, message, refused):
    error = refused(given)
    assert error.startswith("fastjax import-config: error: theirs.yml") and message in error


def test_a_data_set_of_llama_factory_needs_its_description(refused):
    error = refused({"model_name_or_path": "m", "stage": "sft", "dataset": "own"}, info=None)
    assert "dataset: expected dataset_info.json, which describes it, in data or beside the file, got 'own'" in error


def test_the_tool_can_be_named_and_files_stay(imported, tmp_path, capsys):
    text = "{base_model: m, learning_rate: 1e-4, adapter: lora, stage: sft, datasets: [{path: a, type: alpaca}]}"
    config, _ = imported(text.replace("stage: sft", "stage: sft, bf16: false"), "--from", "axolotl")
    assert config.data.chat_template == "alpaca" and config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.model.dtype == "float32"
    before = (tmp_path / "run.yaml").read_bytes()
    assert main(["import-config", "theirs.yml", "--from", "axolotl"]) == 2
    assert "run.yaml: expected a new file (--force replaces a file), got one that exists" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_bytes() == before
    assert imported(text.replace("1e-4", "3e-4"), "--from", "axolotl", "--force")[0].optimizer.learning_rate == 3e-4


def test_an_import_needs_no_jax(tmp_path):
    (tmp_path / "theirs.yml").write_text(AXOLOTL)
    arguments = ["import-config", str(tmp_path / "theirs.yml"), "--output", str(tmp_path / "new" / "run.yaml")]
    script = f"""
import sys
from fastjax.cli import main
assert main({arguments}) == 0
assert not {{"jax", "transformers", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_one_run_has_the_same_settings_by_each_tool(chat_folder, chats, imported, tmp_path):
    """But for what makes no difference to this run, in which nothing is too long and all projections are adapted."""
    places = {"model": chat_folder, "data": chats, "info": tmp_path, "output": tmp_path / "run"}
    found = [
        dataclasses.asdict(imported(text.format(**places), "--force", info={"talks": talks(chats)})[0])
        for text in RUNS.values()
    ]
    differ = {
        f"{section}.{key}"
        for section in found[0]
        for key, value in found[0][section].items()
        if any(other[section][key] != value for other in found[1:])
    }
    same = {"data.too_long", "lora.target_modules", "training.num_train_epochs", "output.save_steps"}
    assert differ == {*same, "model.dtype"}


def talks(chats):
    """The file of conversations in dataset_info.json."""
    return {"file_name": str(chats), "formatting": "openai", "columns": {"messages": "messages"}}


@pytest.mark.exhaustive(
    by="test_one_run_has_the_same_settings_by_each_tool, "
    "tests/fastjax/cli/test_import_preferences.py::test_an_imported_run_over_preferences_trains"
)
def test_imported_runs_train(chat_folder, chats, imported, tmp_path):
    """One run by each tool, with the same losses."""
    losses = {}
    for name, text in RUNS.items():
        places = {"model": chat_folder, "data": chats, "info": tmp_path, "output": tmp_path / name}
        config, _ = imported(text.format(**places), "--force", info={"talks": talks(chats)})
        assert main(["train", "--config", "run.yaml", "--model.dtype", "float32", "--data.cache_dir", "null"]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows if "loss" in row]
        settings, arrays = read_adapter(tmp_path / name / "adapter")
        assert settings.r == 4 and len(arrays) == 2 * 7 * 2  # A and B of each projection of two layers
        assert config.training.max_steps == len(losses[name]) == 2
    assert losses["axolotl"] == losses["llama-factory"] == losses["torchtune"]
    assert losses["axolotl"][1] < losses["axolotl"][0]


#: A file, what is added to it, and the keys that the answer names.
FILES = {
    "a revision": (AXOLOTL, {"revision_of_model": "v2"}, ["base_model", "revision_of_model"]),
    "a second tracker": (AXOLOTL, {"use_tensorboard": True}, ["wandb_project", "use_tensorboard"]),
    "a tracker that is off": (AXOLOTL, {"use_tensorboard": False}, ["use_tensorboard"]),
    "tokens both ways": (
        AXOLOTL,
        {"special_tokens": {"additional_special_tokens": ["<a>"]}, "tokens": ["<b>"]},
        ["special_tokens.additional_special_tokens", "tokens"],
    ),
    "empty tokens": (AXOLOTL, {"special_tokens": {}}, ["special_tokens"]),
    "two ways to add tokens": (
        LLAMA_FACTORY,
        {"add_tokens": "<a>", "add_special_tokens": "<b>"},
        ["add_tokens", "add_special_tokens"],
    ),
    "two ways to warm up": (AXOLOTL, {"warmup_ratio": 0.1}, ["warmup_steps", "warmup_ratio"]),
    "shares of data that are read whole": (LLAMA_FACTORY, {"interleave_probs": "0.5,0.5"}, ["interleave_probs"]),
    "a component that is the one there is": (TORCHTUNE, {}, ["checkpointer._component_", "loss._component_"]),
    "two ways to learn": (LLAMA_FACTORY, {"train_on_prompt": True}, ["train_on_prompt", "mask_history"]),
}


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_named(name, imported):
    text, added, keys = FILES[name]
    _, out = imported(yaml.safe_load(text) | added)
    named = [key for keys in lists(out).values() for key in keys]
    assert set(keys) <= set(named), out
