"""The YAML file and the command line: what is read, and the sentence for every mistake."""

import pytest

from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError

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
    assert (config.lora.r, config.training.max_steps) == (4, 7)
    assert config.data.train == ["a", "b"]
    assert config.model.dtype is None


def test_command_line_alone():
    config = parse_train_config(["--model.model_name=m", "--data.train=d", "--output.output_dir=o"])
    assert config.model.model_name == "m"


NEEDED = "model: {model_name: m}\ndata: {train: d}\noutput: {output_dir: o}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{file}: expected the sections model, data, output, lora, optimizer, training, given None"),
        ("- a\n", "{file}: expected the sections model, data, output, lora, optimizer, training, given ['a']"),
        ("model: [\n", "{file}:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("train: {}\n", "{file}: train: unknown; did you mean training? `fastjax train --help` lists the sections"),
        ("model: llama\n", "{file}: model: expected a section with the keys model_name, max_seq_length, dtype, "
         "param_dtype, float32_modules, load_in_4bit, full_finetuning, new_tokens, rope_scaling, "
         "use_gradient_checkpointing, layer_loop, given 'llama'"),
        (NEEDED + "training: {num_epochs: 1}\n", "{file}: training.num_epochs: unknown; did you mean "
         "num_train_epochs? `fastjax train --help` lists the keys of training"),
        (NEEDED + "data: {train: 3}\n", "{file}: data.train: expected a string or a list of strings or sections with "
         "path, given 3"),
        (NEEDED.replace("{output_dir: o}", "{output_dir: o, report_to: [paper]}"), "{file}: output.report_to: expected "
         "a list of some of tensorboard, wandb, given ['paper']"),
        (NEEDED + "training: {max_steps: many}\n",
         "{file}: training.max_steps: expected an integer or null, given 'many'"),
        (NEEDED + "lora: {r: 8.5}\n", "{file}: lora.r: expected an integer, given 8.5"),
        (NEEDED + "lora: {use_dora: perhaps}\n", "{file}: lora.use_dora: expected true or false, given 'perhaps'"),
        (NEEDED + "lora: {layers_to_transform: [1, x]}\n",
         "{file}: lora.layers_to_transform: expected a list of integers or an integer or null, given [1, 'x']"),
        (NEEDED + "lora: {alpha_pattern: {q_proj: big}}\n", "{file}: lora.alpha_pattern: expected a mapping from "
         "strings to numbers or null, given {{'q_proj': 'big'}}"),
        (NEEDED + "lora: {bias: all}\n", "{file}: lora.bias: expected none, given 'all'"),
        (NEEDED + "optimizer: {lr_scheduler_type: step}\n",
         "{file}: optimizer.lr_scheduler_type: expected one of cosine, linear, constant, wsd, given 'step'"),
        (NEEDED + "optimizer: {learning_rate: -1}\n",
         "{file}: optimizer.learning_rate: expected a value greater than 0, given -1.0"),
        ("model: {model_name: m}\n", "{file}: data.train, output.output_dir: expected a value, given none"),
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
        (["--lora.r", "big"], "--lora.r: expected an integer, given 'big'"),
        (["--lora.r=big"], "--lora.r: expected an integer, given 'big'"),
        (["--lora.r", "0"], "--lora.r: expected a value at least 1, given 0"),
        (["--lora.alpha", "4"], "--lora.alpha: unknown; did you mean lora_alpha? `fastjax train --help` lists the keys "
         "of lora"),
        (["--lora.quick", "4"], "--lora.quick: unknown; expected one of the keys of lora: adapter, r, lora_alpha, "
         "lora_dropout, target_modules, use_rslora, use_dora, rank_pattern, alpha_pattern, layers_to_transform, "
         "modules_to_save, trainable_token_indices, ensure_weight_tying, init_lora_weights, bias, random_state"),
        (["--optimiser.learning_rate", "1"], "--optimiser.learning_rate: unknown; did you mean optimizer? `fastjax "
         "train --help` lists the sections"),
        (["7"], "7: expected --section.key value"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(write, argv, message):
    with pytest.raises(ConfigError) as error:
        parse_train_config(["--config", write(GOOD), *argv])
    assert str(error.value) == message


def test_no_file():
    with pytest.raises(ConfigError, match=r"^--config: cannot read nowhere.yaml: No such file or directory$"):
        parse_train_config(["--config", "nowhere.yaml"])
    with pytest.raises(ConfigError, match="model.model_name, .*: expected a value, given none; name a YAML file with"):
        parse_train_config([])


def test_not_text(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"model: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not valid YAML: .*utf-8"):
        parse_train_config(["--config", str(file)])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("[{pth: a}]", "data.train[0]: expected a section with path, given {'pth': 'a'}"),
        ("[a, {path: b, wight: 2}]", "data.train[1].wight: unknown; expected one of path, name, split, weight"),
        ("[{path: a, weight: much}]", "data.train[0].weight: expected a number or null, given 'much'"),
        ("[{path: a, streaming: 1}]", "data.train[0].streaming: expected true or false, given 1"),
        ("[{path: a, columns: [text]}]", "data.train[0].columns: expected a mapping from strings to strings or null"),
        ("7", "data.train: expected a string or a list of strings or sections with path, given 7"),
    ],
)
def test_mistakes_in_a_list_of_data_sets(write, train, message):
    file = write(NEEDED.replace("train: d", f"train: {train}"))
    with pytest.raises(ConfigError) as caught:
        parse_train_config(["--config", file])
    assert str(caught.value).startswith(f"{file}: {message}")


def test_printed_settings_can_be_read_again(write, tmp_path, capsys):
    options = ["--config", write(GOOD), "--resume", "--training.max_steps", "7"]
    with pytest.raises(SystemExit, match="0"):
        parse_train_config([*options, "--print_config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert parse_train_config(["--config", str(printed)]) == parse_train_config(options)


def test_the_command_line_wins_wherever_the_file_stands(write):
    assert parse_train_config(["--lora.r", "4", "--config", write(GOOD)]).lora.r == 4
