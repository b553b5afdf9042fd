"""The YAML file and the command line: what is read, and the sentence for every mistake."""

import time

import pytest
import yaml

from convert.errors import shown
from fastjax.commands.hints import unknown
from fastjax.commands.settings import parse_train_config
from fastjax.data import DataSource
from fastjax.errors import ConfigError
from fastjax.training.config import QATSettings

GOOD = """
model:
  model_name: llama
  dtype: bfloat16
lora:
  r: 8
  rank_pattern: {q_proj: 4}
  target_modules: [q_proj, v_proj]
  lora_dropout: 1e-2
data:
  train: train.jsonl
optimizer:
  learning_rate: 1e-4
output:
  output_dir: runs/one
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def test_file(write):
    config = parse_train_config(["--config", write(GOOD)])
    assert config == parse_train_config([write(GOOD), "--resume"])
    assert config.model.model_name == "llama"
    assert config.model.dtype == "bfloat16"
    assert config.lora.r == 8
    assert config.lora.rank_pattern == {"q_proj": 4}
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.lora.lora_dropout == 0.01
    assert config.optimizer.learning_rate == 1e-4
    assert config.training.num_train_epochs == 1.0


def test_command_line_wins(write):
    overrides = ["--lora.r", "4", "--training.max_steps=7", "--data.train", "[a, b]", "--model.dtype", "null"]
    config = parse_train_config(["--config", write(GOOD), *overrides])
    assert config == parse_train_config([*overrides, "--config", write(GOOD)])
    assert (config.lora.r, config.training.max_steps) == (4, 7)
    assert config.data.train == ["a", "b"]
    assert config.model.dtype is None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("lora.rank_pattern.layers.0.q_proj", "2", ("lora", "rank_pattern", {"q_proj": 4, "layers.0.q_proj": 2})),
        ("training.qat.weights", "nf4", ("training", "qat", QATSettings("nf4"))),
        ("model.use_gradient_checkpointing", "true", ("model", "use_gradient_checkpointing", True)),
        ("model.use_gradient_checkpointing", "full", ("model", "use_gradient_checkpointing", "full")),
        ("model.model_name", "123", ("model", "model_name", "123")),
        ("model.model_name", "'a'", ("model", "model_name", "'a'")),
        ("output.run_name", "", ("output", "run_name", "")),
        ("output.run_name", "null", ("output", "run_name", None)),
        ("output.run_name", "2024-01-01", ("output", "run_name", "2024-01-01")),
        ("training.qat", "'nf4'", ("training", "qat", "nf4")),
        ("training.eval_steps", "epoch", ("training", "eval_steps", "epoch")),
        ("training.num_train_epochs", "3", ("training", "num_train_epochs", 3.0)),
        ("lora.layers_to_transform", "3", ("lora", "layers_to_transform", 3)),
        ("lora.target_modules", "a: b", ("lora", "target_modules", "a: b")),
        ("data.chat_template_kwargs", "{a: [1, 2e-4, x]}", ("data", "chat_template_kwargs", {"a": [1, 2e-4, "x"]})),
    ],
)  # fmt: skip
def test_values_on_the_command_line(write, key, text, value):
    section, name, expected = value
    given = [f"--{key}", text, "--data.eval=e"]
    found = getattr(getattr(parse_train_config(["--config", write(GOOD), *given]), section), name)
    assert found == expected and type(found) is type(expected)


def test_keys_on_the_command_line_join_a_mapping_in_a_text(write):
    given = ["--lora.rank_pattern", "{q_proj: 2}", "--lora.rank_pattern.k_proj", "3"]
    assert parse_train_config(["--config", write(GOOD), *given]).lora.rank_pattern == {"q_proj": 2, "k_proj": 3}
    quoted = write(GOOD.replace("rank_pattern: {q_proj: 4}", "rank_pattern: '{q_proj: 4}'"))
    assert parse_train_config(["--config", quoted, *given[2:]]).lora.rank_pattern == {"q_proj": 4, "k_proj": 3}


def test_quoted_values_in_the_file_are_read_as_on_the_command_line(write):
    config = parse_train_config(["--config", write(GOOD.replace("r: 8", "r: '8'").replace("1e-4", "'1e-4'"))])
    assert (config.lora.r, config.optimizer.learning_rate) == (8, 1e-4)


def test_command_line_alone():
    config = parse_train_config(["--model.model_name=m", "--data.train=d", "--output.output_dir=o"])
    assert config.model.model_name == "m"


NEEDED = "model: {model_name: m}\ndata: {train: d}\noutput: {output_dir: o}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{file}: expected the sections model, data, output, lora, optimizer, training, parallel, "
         "preferences, got None"),
        ("- a\n", "{file}: expected the sections model, data, output, lora, optimizer, training, parallel, "
         "preferences, got ['a']"),
        ("model: [\n", "{file}:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("train: {}\n", "{file}:1: train: unknown; did you mean data.train? `fastjax train --help` lists all settings"),
        ("output_dir: o\n",
         "{file}:1: output_dir: unknown; did you mean output.output_dir? `fastjax train --help` lists all settings"),
        ("base_model: m\ndatasets: []\n", "{file}:1: base_model: expected the sections model, data, output, lora, "
         "optimizer, training, parallel, preferences, got axolotl's settings; fastjax import-config {file} makes such "
         "of them"),
        ("model: llama\n", "{file}:1: model: expected a section with the keys model_name, max_seq_length, dtype, "
         "param_dtype, float32_modules, load_in_4bit, base_compute, full_finetuning, unfrozen_parameters, new_tokens, "
         "special_tokens_map, rope_scaling, use_gradient_checkpointing, offload_embedding, offload_layers, mlp_chunk, "
         "allow_nonfinite, layer_loop, "
         "got 'llama'"),
        (NEEDED + "training: {num_epochs: 1}\n", "{file}:4: training.num_epochs: unknown; did you mean "
         "training.num_train_epochs? `fastjax train --help` lists all settings"),
        (NEEDED.replace("train: d", "train: 3"),
         "{file}:2: data.train: expected a string or a list of strings or sections with path, got 3"),
        (NEEDED.replace("{output_dir: o}", "{output_dir: o, report_to: [paper]}"),
         "{file}:3: output.report_to: expected a list of some of tensorboard, wandb, got ['paper']"),
        (NEEDED + "training: {max_steps: many}\n",
         "{file}:4: training.max_steps: expected an integer from 1 to 10000000 or null, got 'many'"),
        (NEEDED + "lora: {r: 8.5}\n", "{file}:4: lora.r: expected an integer from 1 to 65536, got 8.5"),
        (NEEDED + "lora: {use_dora: perhaps}\n", "{file}:4: lora.use_dora: expected true or false, got 'perhaps'"),
        (NEEDED + "lora: {layers_to_transform: [1, x]}\n",
         "{file}:4: lora.layers_to_transform: expected a list of integers or an integer or null, got [1, 'x']"),
        (NEEDED + "lora: {alpha_pattern: {q_proj: big}}\n", "{file}:4: lora.alpha_pattern: expected a mapping from "
         "strings to numbers or null, got {{'q_proj': 'big'}}"),
        (NEEDED + "lora: {bias: all}\n", "{file}:4: lora.bias: expected none, got 'all'"),
        (NEEDED + "optimizer: {lr_scheduler_type: step}\n",
         "{file}:4: optimizer.lr_scheduler_type: expected one of cosine, linear, constant, wsd, got 'step'"),
        (NEEDED + "optimizer:\n  name: lion\n  learning_rate: -1\n",
         "{file}:6: optimizer.learning_rate: expected a number greater than 0, got -1"),
        (NEEDED + "optimizer:\n  warmup_steps: 3\n  warmup_ratio: 0.1\n",
         "{file}:5: optimizer.warmup_steps (3) and optimizer.warmup_ratio (0.1) are both set: expected one of them"),
        (NEEDED + "training:\n  max_steps: 9\n  eval_steps: 3\n", "{file}:6: training.eval_steps: expected data.eval "
         "or data.val_set_size with it, got none; name held-out data or leave it out"),
        (NEEDED + "training:\n  qat:\n    weights: nf4\n    start_step: -1\n",
         "{file}:7: training.qat.start_step: expected an integer of at least 0, got -1"),
        (NEEDED + "training:\n\n  learning_rate: 1e-4\n", "{file}:6: training.learning_rate: unknown; did you mean "
         "optimizer.learning_rate? `fastjax train --help` lists all settings"),
        (NEEDED + "learning_rate: 1e-4\n", "{file}:4: learning_rate: unknown; did you mean optimizer.learning_rate? "
         "`fastjax train --help` lists all settings"),
        (NEEDED + "lora.r: 8\n", "{file}:4: lora.r: expected r within the section lora"),
        (NEEDED + "training: {5: 6}\n", "{file}:4: training.5: unknown; expected one of the keys of training: "
         "per_device_train_batch_size, gradient_accumulation_steps, num_train_epochs, max_steps, "
         "per_device_eval_batch_size, eval_steps, early_stopping_patience, early_stopping_threshold, group_by_length, "
         "logging_steps, accumulation_dtype, offload_optimizer, initial_loss_scale, loss_scale_window, "
         "label_smoothing_factor, z_loss_coef, neftune_noise_alpha, router_aux_loss_coef, router_z_loss_coef, qat, "
         "deterministic, step_timeout, seed"),
        (NEEDED.replace("model_name: m", "model_name: ''"),
         "{file}:1: model.model_name: expected a folder or a name on the hub, got ''"),
        (NEEDED.replace("output_dir: o", "output_dir: ''"),
         "{file}:3: output.output_dir: expected the name of a folder, got ''"),
        (NEEDED.replace("train: d", "train: [d, '']"),
         "{file}:2: data.train: expected a file, a folder or a name on the hub, got ''"),
        ("model: {model_name: m}\n", "{file}: data.train, output.output_dir: expected a value, got none"),
        (NEEDED.replace("train: d", "train: [{weight: 2}]"),
         "{file}:2: data.train[0].path: expected a value, got none"),
        (NEEDED.replace("train: d", "train: [{path: a, streaming: 1}]"),
         "{file}:2: data.train[0].streaming: expected true or false, got 1"),
        (NEEDED.replace("data: {train: d}", "data:\n  train:\n  - a\n  - path: b\n    weight: -1"),
         "{file}:6: data.train[1].weight: expected a number greater than 0 or null, got -1"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file(write, text, message):
    file = write(text)
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", file])
    assert str(error.value) == message.format(file=file)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora.r", "big"], "--lora.r: expected an integer from 1 to 65536, got 'big'"),
        (["--lora.r=big"], "--lora.r: expected an integer from 1 to 65536, got 'big'"),
        (["--lora.r", "0"], "--lora.r: expected an integer from 1 to 65536, got 0"),
        (["--lora.alpha", "4"], "--lora.alpha: unknown; did you mean lora.lora_alpha? `fastjax train --help` lists all "
         "settings"),
        (["--lora.r"], "--lora.r: expected a value, got none"),
        (["--lora.use_dora", "--lora.r", "4"], "--lora.use_dora: expected a value, got none"),
        (["--lora.target_modules+", "a"], "--lora.target_modules+: unknown; did you mean lora.target_modules? `fastjax "
         "train --help` lists all settings"),
        (["--lora.quick", "4"], "--lora.quick: unknown; expected one of the keys of lora: adapter, r, lora_alpha, "
         "lora_dropout, target_modules, target_parameters, use_rslora, use_dora, rank_pattern, alpha_pattern, "
         "layers_to_transform, modules_to_save, trainable_token_indices, ensure_weight_tying, init_lora_weights, bias, "
         "random_state"),
        (["--optimiser.learning_rate", "1"], "--optimiser.learning_rate: unknown; did you mean "
         "optimizer.learning_rate? `fastjax train --help` lists all settings"),
        (["7"], "7: expected --section.key value"),
        (["--lora", "{r: 4}"], "--lora: expected --section.key value"),
        (["--lora.rank_pattern.q_proj", "x"], "--lora.rank_pattern: expected a mapping from strings to integers from 1 "
         "to 65536 or null, got {'q_proj': 'x'}"),
        (["--training.qat.weight", "nf4"], "--training.qat.weight: unknown; expected one of weights, activations, "
         "start_step, modules_to_not_quantize"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(write, argv, message):
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", write(GOOD), *argv])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "train"), [("data.columns", "d"), ("data.train[1].columns", "[{path: d}, {path: d, columns: {promt: q}}]")]
)
def test_unknown_columns(write, name, train):
    columns = "" if "[" in name else ", columns: {promt: q}"
    file = write(NEEDED.replace("train: d", f"train: {train}{columns}"))
    with pytest.raises(ConfigError) as error:
        parse_train_config([file])
    assert str(error.value).startswith(f"{file}:2: {name}: promt: unknown; expected some of messages, conversations, ")


def test_one_file_alone(write):
    file = write(GOOD)
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", file, "--config", "other.yaml"])
    assert str(error.value) == f"--config: expected one file, got {file}, other.yaml"


def test_no_file():
    with pytest.raises(ConfigError, match=r"^--config: cannot read nowhere.yaml: No such file or directory$"):
        parse_train_config(["--config", "nowhere.yaml"])
    with pytest.raises(ConfigError, match="model.model_name, .*: expected a value, got none; name a YAML file with"):
        parse_train_config([])


def test_not_text(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"model: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not valid YAML: .*utf-8"):
        parse_train_config(["--config", str(file)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NEEDED + "lora:\n  r: 8\n  r: 16\n", ":6: not valid YAML: the same key twice: r"),
        (NEEDED + "model: {model_name: n}\n", ":4: not valid YAML: the same key twice: model"),
        (NEEDED + "lora: {rank_pattern: {a: 1,\n a: 2}}\n", ":5: not valid YAML: the same key twice: a"),
        (NEEDED + "lora: {rank_pattern: " + "[" * 3000, ":4: not valid YAML: nested more than 100 deep"),
        (NEEDED + "training: {seed: " + "9" * 4301 + "}\n", ":4: not valid YAML: a number of more than 300 digits"),
        (
            NEEDED + f"optimizer: {{no_decay: [[{'x, ' * 20_000}]]}}",
            f":4: optimizer.no_decay: expected a list of strings, got {shown([['x'] * 99], 80)}",
        ),
        (NEEDED + "# " + "x" * 2**17, ": expected settings of at most 131072 bytes, got more"),
    ],
)
def test_hostile_files(write, text, message):
    file = write(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", file])
    assert str(error.value) == file + message
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--lora.rank_pattern", "{a: 1, a: 2}", "the same key twice: a, got '{a: 1, a: 2}'"),
        ("--data.train", "[{path: a, path: b}]", "the same key twice: path, got '[{path: a, path: b}]'"),
        ("--model.rope_scaling", f"{{a: {'9' * 4301}}}", "a number of more than 300 digits, got '{a: 999"),
        ("--output.run_name", "!!int ''", "what cannot be read as int: , got \"!!int ''\""),
        ("--lora.rank_pattern", "[" * 3000 + "]" * 3000, "nested more than 100 deep, got '[[["),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_broken_lists_on_the_command_line(write, option, value, message, apart):
    argv = [option, value] if apart else [f"{option}={value}"]
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", write(GOOD), *argv])
    assert str(error.value).startswith(f"{option}: not valid YAML: {message}") and len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("data.train", "[{path: a, nme: b}]", "[0].nme: unknown; expected one of path, name, data_files, split"),
        (
            "data.train",
            "[a, {path: b, weight: much}]",
            "[1].weight: expected a number greater than 0 or null, got 'much'",
        ),
        ("data.eval", "[1]", ": expected a string or a list of strings or sections with path or null, got [1]"),
        (
            "data.train",
            "{path: a}",
            ": expected a string or a list of strings or sections with path, got {'path': 'a'}",
        ),
        (
            "lora.target_modules",
            "[q_proj, {a: b}]",
            ": expected a list of strings or a string or null, got ['q_proj',",
        ),
    ],
)
def test_a_list_with_a_mistake_is_no_path(write, key, text, message):
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", write(GOOD), f"--{key}={text}"])
    assert str(error.value).startswith(f"--{key}{message}")
    section, _, name = key.partition(".")
    for value in (text, f"'{text}'"):
        given = {"data": {"train": "d"}} | {section: {"train": "d"} if section == "data" else {}}
        lines = ", ".join(f"{k}: {v}" for k, v in (given[section] | {name: value}).items())
        others = "" if section == "data" else "data: {train: d}\n"
        file = write(f"model: {{model_name: m}}\noutput: {{output_dir: o}}\n{others}{section}: {{{lines}}}\n")
        with pytest.raises(ConfigError) as error:
            parse_train_config(["--config", file])
        line = 3 if section == "data" else 4
        assert str(error.value).startswith(f"{file}:{line}: {key}{message}")


def test_what_only_looks_like_a_list():
    argv = ["--model.model_name=m", "--data.train=[ab]*.jsonl", "--output.output_dir=o", "--output.run_name=[a]"]
    config = parse_train_config([*argv, "--data.eval=[{path: a, weight: 1e-1}]"])
    assert (config.data.train, config.output.run_name) == ("[ab]*.jsonl", "[a]")
    assert config.data.eval == [DataSource("a", weight=0.1)]


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("optimizer.no_decay", "null", "expected a list of strings, got None"),
        ("data.packing", "null", "expected true or false, got None"),
        ("training.logging_steps", "null", "expected an integer of at least 1, got None"),
        ("training.num_train_epochs", ".inf", "expected a value that is finite, got inf"),
        ("lora.lora_alpha", ".nan", "expected a value that is finite, got nan"),
        ("optimizer.learning_rate", "1e308", "expected a value of at most 3e+38, got 1e+308"),
        ("training.max_steps", str(2**70), "expected a value of at most 4294967295, got 1180591620717411303424"),
        ("model.max_seq_length", str(10**18), "expected a value of at most 4294967295, got 1000000000000000000"),
        ("data.train", '["a\\0b"]', "expected a value without NUL or half a character, got 'a\\x00b'"),
    ],
)
def test_values_that_no_run_can_use(write, key, text, message):
    section, _, name = key.partition(".")
    sections = yaml.safe_load(NEEDED)
    sections.setdefault(section, {})[name] = "VALUE"
    content = yaml.safe_dump(sections, sort_keys=False).replace("VALUE", text)
    file, line = write(content), content.partition(f"{name}:")[0].count("\n") + 1
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", file])
    assert str(error.value) == f"{file}:{line}: {key}: {message}"
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", write(GOOD), f"--{key}={text}"])
    assert str(error.value) == f"--{key}: {message}"


def test_printed_settings_can_be_read_again(write, tmp_path, capsys):
    options = ["--config", write(GOOD), "--resume", "--training.max_steps", "7"]
    with pytest.raises(SystemExit, match="0"):
        parse_train_config([*options, "--print_config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert parse_train_config(["--config", str(printed)]) == parse_train_config(options)


def test_reading_takes_time_in_proportion(write):
    listed = ", ".join(["x"] * 30_000)
    file = write(NEEDED + f"optimizer: {{no_decay: [{listed}]}}\n")
    start = time.process_time()
    config = parse_train_config(["--config", file, "--lora.target_modules", f"[{listed}]"])
    assert time.process_time() - start < 10
    assert len(config.optimizer.no_decay) == 30_000 == len(config.lora.target_modules)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("training.learning_rate", "optimizer.learning_rate"),
        ("lora.rank", "lora.r"),
        ("lora.lora_rank", "lora.r"),
        ("lora_alpha", "lora.lora_alpha"),
        ("lr", "optimizer.learning_rate"),
        ("training.lr", "optimizer.learning_rate"),
        ("training.batch_size", "training.per_device_train_batch_size"),
        ("training.micro_batch_size", "training.per_device_train_batch_size"),
        ("training.epochs", "training.num_train_epochs"),
        ("training.num_epochs", "training.num_train_epochs"),
        ("training.warmup_ratio", "optimizer.warmup_ratio"),
        ("model.sequence_len", "model.max_seq_length"),
        ("model.cutoff_len", "model.max_seq_length"),
        ("model.gradient_checkpointing", "model.use_gradient_checkpointing"),
        ("model.max_seq_lenght", "model.max_seq_length"),
        ("data.seed", "training.seed"),
        ("optimizer.weight_decy", "optimizer.weight_decay"),
        ("modle", "model"),
        ("preference.beta", "preferences.beta"),
    ],
)
def test_hints(given, meant):
    assert unknown(given) == f"{given}: unknown; did you mean {meant}? `fastjax train --help` lists all settings"


def test_no_hint_without_a_likeness():
    assert unknown("zzz.qqq").startswith("zzz.qqq: unknown; expected one of the sections: model, data, output, lora,")
