"""Unsloth's helpers over data sets, of lists and of the `datasets` library."""

import numpy as np
import pytest

from fastjax.chat_templates import apply_chat_template, standardize_data_formats, standardize_sharegpt, to_sharegpt
from fastjax.data import ChatRecord, Encoder
from fastjax.errors import ConfigError, DataError
from tests.support import tokenizers

ROWS = [
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hi."},
    {"instruction": "Count.", "input": None, "output": 1},
]
MERGED = "{instruction}[[\nYour input is:\n{input}]]"
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def data_sets(rows):
    import datasets

    return [rows, datasets.Dataset.from_list(rows)]


@pytest.mark.parametrize("kind", [0, 1])
def test_names_of_conversations(kind):
    rows = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 7}]
    found = list(standardize_sharegpt(data_sets(rows)[kind]))
    assert found == [{"conversations": CHAT, "id": 7}]
    assert list(standardize_data_formats(data_sets(found)[kind])) == found
    assert list(standardize_data_formats(data_sets([{"messages": CHAT}])[kind])) == [{"messages": CHAT}]


def test_other_roles_and_flags():
    told = [{"role": "Alice", "content": "q", "train": False}, {"role": "output", "content": "a", "weight": 1}]
    found = standardize_sharegpt([{"conversations": told}], aliases_for_user=["Alice"])
    assert found[0]["conversations"] == [CHAT[0] | {"train": False}, CHAT[1] | {"weight": 1}]
    with pytest.raises(DataError, match=r"conversations\[0\]: unknown role 'Alice'; the roles are"):
        standardize_sharegpt([{"conversations": told}])


@pytest.mark.parametrize("kind", [0, 1])
def test_conversations_of_rows(kind):
    rows = data_sets([row | {"output": str(row["output"])} for row in ROWS])[kind]
    found = to_sharegpt(rows, merged_prompt=MERGED, output_column_name="output", conversation_extension=3)
    turns = [("Add.\nYour input is:\n1, 2", "3"), ("Greet.", "Hi."), ("Count.", "1")]
    orders = [range(3), *(np.random.default_rng(3407 + j).permutation(3) for j in (1, 2))]
    assert len(found) == 3 and type(found) is type(rows)
    for number, row in enumerate(found):
        assert [*row] == ["conversations"]
        told = [(message["from"], message["value"]) for message in row["conversations"]]
        asked = [turns[order[number]] for order in orders]
        assert told == [pair for q, a in asked for pair in (("human", q), ("gpt", a))]


def test_rows_that_make_no_conversations():
    kept = to_sharegpt(ROWS[:1], remove_unused_columns=False)
    assert kept[0]["input"] == "1, 2" and kept[0]["conversations"][0]["value"] == "Add."
    with pytest.raises(DataError, match="row 1: expected the column 'topic', found 'instruction', 'input', 'output'"):
        to_sharegpt(ROWS, merged_prompt="{topic}")
    with pytest.raises(ConfigError, match=r"merged_prompt: expected a column in \[\[none\]\], got none"):
        to_sharegpt(ROWS, merged_prompt="{instruction}[[none]]")
    with pytest.raises(ConfigError, match="conversation_extension: expected an integer from 1, got 0"):
        to_sharegpt(ROWS, conversation_extension=0)
    with pytest.raises(DataError, match="expected rows without conversations, found some"):
        to_sharegpt([{"conversations": CHAT}])


ONCE = "Below are tasks.\n\n### Instruction:\n{INPUT}\n\n### Response:\n{OUTPUT}"
END = {"extra_eos_tokens": "<|im_end|>"}
TWICE = "<s>[{SYSTEM}]<|im_end|>Q: {INPUT}<|im_end|>A: {OUTPUT}<|im_end|>Q: {INPUT}<|im_end|>A: {OUTPUT}<|im_end|>"


@pytest.mark.parametrize(
    ("example", "settings", "text"),
    [
        (ONCE, {}, "Below are tasks.\n\n### Instruction:\nq\n\n### Response:\n«a</s>»\n\n### Instruction:\nr"),
        (
            TWICE,
            {"extra_eos_tokens": "<|im_end|>"},
            "<s>[DEFAULT]<|im_end|>Q: q<|im_end|>A: «a<|im_end|>»Q: r<|im_end|>",
        ),
        ("U {INPUT}\nB {OUTPUT}</s>", {}, "U q\nB «a</s>»U r"),
    ],
)
@pytest.mark.parametrize("kind", [0, 1])
def test_a_template_by_an_example(example, settings, text, kind):
    tokenizer, asked = tokenizers.byte_level(), {"role": "user", "content": "r"}
    rows = data_sets([{"conversations": CHAT}])[kind]
    default = {"default_system_message": "DEFAULT"}
    found = apply_chat_template(rows, tokenizer, chat_template=example, **default, **settings)
    whole = text.replace("«", "").replace("»", "")
    assert whole.startswith(list(found)[0]["text"].rstrip())
    ((learnt,),) = Encoder(tokenizer).encode([ChatRecord([*CHAT, asked], "x")])
    said = text.split("«")[1].split("»")[0]
    assert tokenizer.decode(learnt.tokens[learnt.learn]) == said
    assert tokenizer.apply_chat_template([*CHAT, asked], tokenize=False).startswith(whole)
    assert vars(tokenizer)["_ollama_modelfile"].splitlines()[1] == "FROM {__FILE_LOCATION__}"
    if example == ONCE:
        assert tokenizer.apply_chat_template([{"role": "system", "content": "S"}, asked], tokenize=False) == (
            "S\n\n### Instruction:\nr"
        )
        assert "### Response:\n" in vars(tokenizer)["_ollama_modelfile"].partition("TEMPLATE")[2]


def test_texts_that_are_no_example():
    for example in (
        "{INPUT}",
        "{OUTPUT}{INPUT}",
        ONCE + ONCE + ONCE,
        "a{INPUT}b{OUTPUT}c{INPUT}d{OUTPUT}e",
        "{}" + ONCE,
    ):
        with pytest.raises(ConfigError, match=r"chat_template: expected \{INPUT\} and \{OUTPUT\}, once or twice"):
            apply_chat_template([], tokenizers.byte_level(), chat_template=example)
    with pytest.raises(ConfigError, match="extra_eos_tokens: expected tokens of the tokenizer, got <no>"):
        apply_chat_template([], tokenizers.byte_level(), chat_template=ONCE, extra_eos_tokens="<no>")
