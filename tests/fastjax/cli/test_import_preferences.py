"""`fastjax import-config` of runs over preferences: the loss and its data, what is refused, and a run that trains."""

import dataclasses
import json
import math

import pytest
import yaml

from fastjax.cli import main
from fastjax.training.config import PreferencesSection
from tests.support.other_runs import RUNS
from tests.support.other_tools import (
    AXOLOTL_DPO,
    LLAMA_FACTORY_SIMPO,
    TORCHTUNE_DPO,
    lists,
)

PAIR = {"chosen": "chosen", "rejected": "rejected"}
ONCE = {"precompute_ref_log_probs": True}
TURNS = {"path": "org/turns", "type": "chat_template.default", "field_messages": "talk", "field_chosen": "better"}


@pytest.mark.parametrize(
    ("text", "changes", "preferences", "data", "columns"),
    [
        (
            AXOLOTL_DPO,
            {},
            {"loss": "dpo", "beta": 0.2, "label_smoothing": 0.1, "max_length": 1024, **ONCE},
            {"chat_template": "chatml", "too_long": "drop"},
            [{"prompt": "question", "chosen": "chosen", "rejected": "rejected"}, PAIR],
        ),
        (
            AXOLOTL_DPO,
            {"rl": "kto", "kto_desirable_weight": 0.5, "datasets": [{"path": "a", "type": "llama3.argilla"}]},
            {"loss": "kto", "beta": 0.2, "desirable_weight": 0.5, "undesirable_weight": 1.0, "max_length": 1024} | ONCE,
            {"chat_template": "llama3"},
            [{"prompt": "instruction", "completion": "completion", "label": "label"}],
        ),
        (
            AXOLOTL_DPO,
            {"rl": "orpo", "rl_beta": None, "orpo_alpha": 0.3, "datasets": [TURNS | {"type": "chat_template.argilla"}]},
            {"loss": "orpo", "beta": 0.3, "nll_tokens": "all", "max_length": 1024},
            {"chat_template": "chatml"},
            [{"prompt": "prompt", "chosen": "better", "rejected": "rejected"}],
        ),
        (
            AXOLOTL_DPO,
            {"rl": "simpo", "rl_beta": None, "cpo_alpha": 0, "chat_template": None, "datasets": [TURNS]},
            {"loss": "simpo", "beta": 0.1, "gamma": 0.5, "max_length": 1024},  # TRL's defaults
            {"chat_template": None},
            [{"prompt": "talk", "chosen": "better", "rejected": "rejected"}],
        ),
        (
            AXOLOTL_DPO,
            {"rl": "ipo", "trl": {"beta": 0.4}, "datasets": [{"path": "a", "type": {"field_prompt": "question"}}]},
            {"loss": "ipo", "beta": 0.4, "max_length": 1024, **ONCE},
            {"chat_template": None},
            [{"prompt": "question", "chosen": "chosen", "rejected": "rejected"}],
        ),
        (
            LLAMA_FACTORY_SIMPO,
            {},
            {"loss": "simpo", "beta": 2.0, "gamma": 0.7, "max_length": 2048},
            {"chat_template": "llama3", "too_long": "truncate"},
            [{"prompt": "conversations", **PAIR}],
        ),
        (
            LLAMA_FACTORY_SIMPO,
            {"stage": "kto", "dataset": "labelled", "eval_dataset": None, "kto_rejected_weight": 2},
            {"loss": "kto", "beta": 2.0, "desirable_weight": 1.0, "undesirable_weight": 2, "max_length": 2048},
            {"chat_template": "llama3"},
            [{"prompt": "question", "completion": "answer", "label": "good"}],
        ),
        (
            TORCHTUNE_DPO,
            {},
            {"loss": "dpo", "beta": 0.05, "label_smoothing": 0.0, "max_length": 1024},
            {"chat_template": None},
            [{"chosen": "better", "rejected": "worse"}],
        ),
    ],
)
def test_preferences(imported, tmp_path, text, changes, preferences, data, columns):
    config, out = imported(yaml.safe_load(text) | changes)
    assert dataclasses.asdict(config.preferences) == dataclasses.asdict(PreferencesSection(**preferences))
    assert config.model.max_seq_length == 2 * preferences["max_length"] and config.data.packing is False
    assert {name: getattr(config.data, name) for name in data} == data
    assert [source.columns for source in config.data.sources("train")] == columns
    assert not config.lora.lora_dropout
    listed = " ".join(key for keys in lists(out).values() for key in keys)
    assert all(key in listed for key in yaml.safe_load(text) | changes)  # nothing is dropped in silence


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (AXOLOTL_DPO, {"rl": "simpo"}, "cpo_alpha: by it, or by its default of 1, cross-entropy is added; only 0"),
        (AXOLOTL_DPO, {"rpo_alpha": 1.0}, "rpo_alpha: no cross-entropy is added"),
        (
            AXOLOTL_DPO,
            {"datasets": [{"path": "a", "type": "chatml.intel"}, {"path": "b", "type": "llama3.intel"}]},
            "datasets[].type: all rows of a run go through one chat template",
        ),
        (
            AXOLOTL_DPO,
            {"datasets": [{"path": "a", "type": {"prompt_format": "Q: {prompt}"}}]},
            "datasets[0].type.prompt_format: texts are as they are",
        ),
        (
            AXOLOTL_DPO,
            {"datasets": [{"path": "a", "type": "zephyr.nectar"}]},
            "datasets[0].type: zephyr.nectar is not supported with rl: dpo; chatml.argilla, chatml.argilla_chat, ",
        ),
        (AXOLOTL_DPO, {"reward_model": True}, "reward_model: rl names another loss"),
        (LLAMA_FACTORY_SIMPO, {"pref_loss": "hinge"}, "pref_loss: hinge: there are sigmoid, ipo, orpo, simpo"),
        (LLAMA_FACTORY_SIMPO, {"pref_ftx": 0.5}, "pref_ftx: no other loss is added"),
        (LLAMA_FACTORY_SIMPO, {"ref_model": "m"}, "ref_model: the reference is the model as training begins"),
        (
            LLAMA_FACTORY_SIMPO,
            {"pref_loss": "sigmoid", "adapter_name_or_path": "a"},
            "adapter_name_or_path: the reference is the base there, and here the adapter to start from; merge it first",
        ),
        (LLAMA_FACTORY_SIMPO, {"dataset": "own"}, "dataset_info.json: own: stages dpo and rm take rows with"),
        (
            LLAMA_FACTORY_SIMPO,
            {"dataset": "ranked", "template": "some"},
            "template: rows of texts go through data.chat_template, a name or a file",
        ),
        (
            TORCHTUNE_DPO,
            {"dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}},
            "dataset._component_: torchtune.datasets.stack_exchange_paired_dataset: it reads the folder data/rl alone",
        ),
        (
            TORCHTUNE_DPO,
            {"loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}},
            "dataset._component_: rows of pairs are for loss DPOLoss or SimPOLoss",
        ),
        (
            TORCHTUNE_DPO,
            {"loss": {"_component_": "torchtune.rlhf.loss.RSOLoss"}},
            "loss._component_: the loss is cross",
        ),
    ],
)
def test_preferences_that_would_train_another_model(text, changes, message, refused):
    assert message in refused(yaml.safe_load(text) | changes)


def test_an_imported_run_over_preferences_trains(chat_folder, imported, tmp_path):
    """ShareGPT's turns, of which an answer is one; every weight, so that the reference is computed before."""
    rows = [
        {
            "conversations": [{"from": "human", "value": word}],
            "chosen": {"from": "gpt", "value": word[::-1]},
            "rejected": {"from": "gpt", "value": word},
        }
        for word in ("abc", "bcd")
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    given = yaml.safe_load(RUNS["llama-factory"].format(model=chat_folder, info=tmp_path, output=tmp_path / "run"))
    given |= {"stage": "dpo", "dataset": "pairs", "pref_beta": 0.2, "cutoff_len": 32, "packing": False}
    given |= {"learning_rate": 1e-3}  # both pairs in each step
    given |= {"finetuning_type": "full", "quantization_bit": None}
    _, out = imported(given)
    assert "needed (" not in out.replace("not needed (", "")  # model and data are here
    assert main(["train", "--config", "run.yaml", "--model.dtype", "float32", "--data.cache_dir", "null"]) == 0
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = [row for row in found if "loss" in row]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5) and first["rewards/margins"] == 0
    assert second["loss"] < first["loss"]
