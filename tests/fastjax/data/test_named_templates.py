"""Texts and masks of the named templates, written by hand: what is learnt stands between « and »."""

import re

import numpy as np
import pytest

from fastjax.data import ChatRecord, Encoder, parse_row, set_chat_template
from fastjax.errors import ConfigError
from tests.support.data import uncached

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [
    {"role": "user", "content": "Who 世?"},
    {"role": "assistant", "content": "Me 世"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": ""},
]
TOOL_TURNS = [
    SYSTEM,
    {"role": "user", "content": "Add."},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "Ok"},
]
SCHEMA = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
INDENTED = """{
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object"
        }
    }
}"""
PARAMETERS = (
    'You may call these functions, each described by a JSON schema. Write a call as {"name": function name, '
    '"parameters": JSON object} and nothing else.'
)
BELOW = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
EXPECTED = {
    ("chatml", "turns"): "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho 世?<|im_end|>\n"
    "<|im_start|>assistant\n«Me 世<|im_end|>»\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n",
    ("chatml", "tools"): "<|im_start|>system\nBe kind.\n\nYou may call these functions, each described by a JSON "
    f"schema:\n<tools>\n{SCHEMA}\n</tools>\nWrite a call as\n<tool_call>\n"
    '{"name": <function name>, "arguments": <JSON object>}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"
    '«<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>»\n'
    "<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n«Two<|im_end|>»\n"
    "<|im_start|>user\nOk<|im_end|>\n",
    ("llama3", "turns"): "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho 世?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Me 世<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\n<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«<|eot_id|>»",
    ("llama3", "tools"): f"<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.\n\n{PARAMETERS}\n\n{INDENTED}"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAdd.<|eot_id|>"
    '<|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "add", "parameters": {"a": 1}}<|eot_id|>»'
    "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Two<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nOk<|eot_id|>",
    ("mistral", "turns"): "<s>[INST] Be kind.\n\nWho 世?[/INST]« Me 世</s>»[INST] [/INST]«</s>»",
    ("mistral", "tools"): f"<s>[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS][INST] Be kind.\n\nAdd.[/INST]"
    '«[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>»[TOOL_RESULTS] {"content": "2"}[/TOOL_RESULTS]'
    "« Two</s>»[INST] Ok[/INST]",
    ("gemma", "turns"): "<s><start_of_turn>user\nBe kind.\n\nWho 世?<end_of_turn>\n"
    "<start_of_turn>model\n«Me 世<end_of_turn>»\n<start_of_turn>user\n<end_of_turn>\n"
    "<start_of_turn>model\n«<end_of_turn>»\n",
    ("gemma", "tools"): f"<s><start_of_turn>user\nBe kind.\n\n{PARAMETERS}\n[{SCHEMA}]\n\nAdd.<end_of_turn>\n"
    '<start_of_turn>model\n«{"name": "add", "parameters": {"a": 1}}<end_of_turn>»\n'
    "<start_of_turn>user\n```tool_output\n2\n```<end_of_turn>\n<start_of_turn>model\n«Two<end_of_turn>»\n"
    "<start_of_turn>user\nOk<end_of_turn>\n",
    ("alpaca", "turns"): "Be kind.\n\n### Instruction:\nWho 世?\n\n### Response:\n«Me 世</s>»\n\n### Instruction:\n"
    "\n\n### Response:\n«</s>»",
    ("alpaca", "tools"): f"Be kind.\n\n### Functions:\n[{SCHEMA}]\n\n### Instruction:\nAdd.\n\n### Response:\n"
    '«{"name": "add", "arguments": {"a": 1}}</s>»\n\n### Result:\n2\n\n### Response:\n«Two</s>»\n\n'
    "### Instruction:\nOk",
    ("plain", "turns"): "System: Be kind.\n\nUser: Who 世?\n\nAssistant:« Me 世</s>»\n\nUser: \n\nAssistant:«</s>»\n\n",
    ("plain", "tools"): f"Functions: [{SCHEMA}]\n\nSystem: Be kind.\n\nUser: Add.\n\nAssistant:"
    '« {"name": "add", "arguments": {"a": 1}}</s>»\n\nResult: 2\n\nAssistant:« Two</s>»\n\nUser: Ok\n\n',
}
RECORDS = {
    "turns": ChatRecord([SYSTEM, *TURNS], "x"),
    "tools": ChatRecord(TOOL_TURNS, "x", TOOLS),
}


def pieces(tokenizer, record, loss_on="responses"):
    """The example as text, what is learnt between « and »."""
    ((example,),) = Encoder(tokenizer, uncached(loss_on=loss_on)).encode([record])
    borders = [0, *(np.flatnonzero(np.diff(example.learn)) + 1), len(example.tokens)]
    parts = [tokenizer.decode(example.tokens[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    return "".join(f"«{part}»" if index % 2 else part for index, part in enumerate(parts))


@pytest.fixture(params=sorted({name for name, _ in EXPECTED}))
def name(request):
    return request.param


@pytest.fixture
def tokenizer(make_tokenizer, name):
    """A tokenizer with a named template."""
    found = make_tokenizer(None)
    set_chat_template(found, name)
    return found


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_and_mask_are_those_written_by_hand(make_tokenizer, name, kind, adds_bos):
    tokenizer = make_tokenizer(None, adds_bos=adds_bos)
    set_chat_template(tokenizer, name)
    expected = EXPECTED[name, kind]
    if adds_bos and not expected.startswith("<s>"):
        expected = "<s>" + expected
    assert pieces(tokenizer, RECORDS[kind]) == expected


@pytest.mark.parametrize("kind", RECORDS)
def test_loss_on_the_last_response_and_on_all(tokenizer, name, kind):
    expected = EXPECTED[name, kind]
    head, last, tail = re.fullmatch(r"(.*)(«[^«»]*»)([^«»]*)", expected, re.S).groups()
    assert pieces(tokenizer, RECORDS[kind], "last_response") == re.sub("[«»]", "", head) + last + tail
    ((example,),) = Encoder(tokenizer, uncached(loss_on="all")).encode([RECORDS[kind]])
    assert not example.learn[0] and example.learn[1 : np.flatnonzero(example.learn)[-1]].all()


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("learnt", [(), (0,), (1,)])
def test_responses_that_the_row_excludes_are_not_learnt(tokenizer, name, kind, learnt):
    record = RECORDS[kind]
    says = iter([index in learnt for index in range(2)])
    train = tuple(next(says) if message["role"] == "assistant" else None for message in record.messages)
    count = iter(range(2))
    expected = re.sub(
        "«([^«»]*)»", lambda found: found[0] if next(count) in learnt else found[1], EXPECTED[name, kind], flags=re.S
    )
    assert pieces(tokenizer, record._replace(train=train)) == expected


def test_a_prompt_is_the_beginning_of_what_is_trained_and_the_end_stops(make_tokenizer, name):
    tokenizer = make_tokenizer(None, adds_bos=True)
    set_chat_template(tokenizer, name)
    encoder = Encoder(tokenizer)
    ((example,),) = encoder.encode([ChatRecord(TOOL_TURNS[:3], "x", TOOLS)])
    prompt = encoder.encode_prompt(TOOL_TURNS[:2], TOOLS)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.learn[: len(prompt)].any() and example.learn[len(prompt)]
    assert int(example.tokens[example.learn][-1]) in encoder.stop_tokens()


def test_only_the_completion_of_a_conversation_is_learnt(make_tokenizer):
    tokenizer = make_tokenizer(None)
    set_chat_template(tokenizer, "plain")
    record = parse_row({"prompt": TURNS[:3], "completion": TURNS[3:]}, "x")
    assert pieces(tokenizer, record) == "User: Who 世?\n\nAssistant: Me 世</s>\n\nUser: \n\nAssistant:«</s>»\n\n"


def test_alpaca_sets_an_input_apart(make_tokenizer):
    tokenizer = make_tokenizer(None)
    set_chat_template(tokenizer, "alpaca")
    with_input = parse_row({"instruction": "Add.", "input": "1 1", "output": "2"}, "x")
    assert pieces(tokenizer, with_input) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 1\n\n"
        "### Response:\n«2</s>»"
    )
    without = parse_row({"instruction": "Add.", "input": "", "output": "2"}, "x")
    assert pieces(tokenizer, without) == BELOW + "### Instruction:\nAdd.\n\n### Response:\n«2</s>»"


def test_a_file_is_a_template_too_and_is_saved_with_the_tokenizer(make_tokenizer, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    tokenizer = make_tokenizer("chatml")
    set_chat_template(tokenizer, str(file))
    assert pieces(tokenizer, ChatRecord(TURNS[:2], "x")) == "Who 世?;«Me 世;</s>»"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert "m.content" in (tmp_path / "saved" / "chat_template.jinja").read_text()


def test_what_a_tokenizer_lacks_is_named(make_tokenizer, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ConfigError, match=r"chatml needs special tokens .* lacks: <\|im_start\|>, <\|im_end\|>; add"):
        set_chat_template(bare, "chatml")
    with pytest.raises(ConfigError, match=r"lacks: eos_token \(none is set\)"):
        set_chat_template(bare, "plain")
    with pytest.raises(ConfigError, match="expected one of chatml, .* got nothing, which is neither"):
        set_chat_template(bare, "nothing")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        set_chat_template(bare, str(broken))
