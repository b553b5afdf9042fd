"""Templates by Unsloth's names: their texts, families' own, names of messages, tokenizers that lack tokens."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from fastjax.data import ChatRecord, Encoder
from fastjax.data.chat_templates import get_chat_template
from fastjax.data.named_templates import NAMED_TEMPLATES, SAME_TEMPLATES
from fastjax.errors import ConfigError
from tests.support import real_templates, tokenizers

ASKED, SAID = {"role": "user", "content": "hi "}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "S"}
MAPPING = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
#: A question and its answer, what is learnt between « and »; and the generation prompt.
TEXTS = {
    "zephyr": ("<|user|>\nhi </s>\n<|assistant|>\n«yo</s>»\n", "<|assistant|>\n"),
    "unsloth": (
        "<s>You are a helpful assistant to the user\n>>> User: hi \n>>> Assistant: «yo</s>»\n",
        ">>> Assistant: ",
    ),
    "vicuna": (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: hi  ASSISTANT:« yo</s>»",
        "ASSISTANT:",
    ),
    "llama": ("<s>[INST] hi [/INST]« yo </s>»", ""),
    "starling": (
        "<s>GPT4 Correct User: hi <|end_of_turn|>GPT4 Correct Assistant:« yo<|end_of_turn|>»",
        "GPT4 Correct Assistant:",
    ),
    "qwen3-thinking": (
        "<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n<think>\n«\n</think>\n\nyo<|im_end|>»\n",
        "<|im_start|>assistant\n<think>\n",
    ),
    "phi-4": (
        "<|im_start|>user<|im_sep|>hi <|im_end|><|im_start|>assistant<|im_sep|>«yo<|im_end|>»",
        "<|im_start|>assistant<|im_sep|>",
    ),
}
#: Name → templates of its family as TRL ships them, in conversations without functions.
FAMILIES = {
    "llama-3": ["llama3"],
    "llama-3.1": ["llama3_1"],
    "gemma-3": ["gemma3"],
    "gemma-4": ["gemma4"],
    "qwen-2.5": ["qwen2_5"],
    "qwen3": ["qwen3"],
    "qwen3-instruct": ["qwen3_instruct_2507"],
    "phi-3": ["phi3", "phi3_5"],
    "lfm-2": ["lfm2"],
}
#: Those that have functions in the family's own words.
WITH_TOOLS = {"qwen-2.5", "qwen3", "qwen3-instruct"}


def tokenizer_for(*sources):
    found = tokenizers.byte_level()
    tokens = {token for source in sources for token in real_templates.special_tokens(source)}
    found.add_special_tokens({"additional_special_tokens": sorted(tokens)})
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_texts_and_what_is_learnt_of_them(name):
    text, prompt = TEXTS[name]
    tokenizer = get_chat_template(tokenizer_for(text), name)
    ((example,),) = Encoder(tokenizer).encode([ChatRecord([ASKED, SAID], "x")])
    borders = [0, *(np.flatnonzero(np.diff(example.learn)) + 1), len(example.tokens)]
    parts = [tokenizer.decode(example.tokens[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    assert "".join(f"«{part}»" if place % 2 else part for place, part in enumerate(parts)) == text
    asked, prompted = (
        tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=add) for add in (False, True)
    )
    assert prompted == asked + prompt


@pytest.mark.torch
@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in FAMILIES.items() for file in files])
def test_texts_are_those_of_the_families(name, file):
    pytest.importorskip("trl", reason="TRL is in the environment with torch")
    folder = Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"
    real = (folder / f"{file}.jinja").read_text()
    ours, tokenizer = NAMED_TEMPLATES[name].source(name), tokenizer_for(real)
    assert NAMED_TEMPLATES[name].is_own(real)
    assert [other for other in NAMED_TEMPLATES if other != name and NAMED_TEMPLATES[other].is_own(real)] == []
    for kind, row in real_templates.ROWS.items():
        if "tools" in row and name not in WITH_TOOLS or "though" in kind and name not in WITH_TOOLS:
            continue
        for prompted in (False, True):
            given = {"tools": row.get("tools"), "tokenize": False, "add_generation_prompt": prompted}
            expected, found = (
                tokenizer.apply_chat_template(row["messages"], chat_template=one, **given) for one in (real, ours)
            )
            assert found == expected, kind


def test_a_familys_own_template_stays(capsys):
    own = "{% for m in messages %}<|start_header_id|>{{ m.role }}{{ 'Cutting Knowledge Date' }}{% endfor %}"
    tokenizer = tokenizers.byte_level()
    tokenizer.chat_template = own
    assert get_chat_template(tokenizer, "llama-3.2").chat_template == own
    assert "the tokenizer's own is that of llama-3.2, and stays" in capsys.readouterr().err
    assert get_chat_template(tokenizer, "llama-3").chat_template != own
    with pytest.raises(ConfigError, match="gpt-oss: expected a tokenizer with the template of its family"):
        get_chat_template(tokenizer, "gpt-oss")


@pytest.mark.parametrize("name", ["chatml", "llama-3.1", "qwen3", "alpaca", "gemma-4"])
def test_other_names_of_messages_and_a_systems_message(name):
    tokenizer = get_chat_template(tokenizers.byte_level(), name, mapping=MAPPING, system_message="It's \\ S")
    mapped = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    plain = [ASKED | {"content": "hi"}, SAID]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in (mapped, plain)]
    assert texts[0] == texts[1] and "It's \\ S" in texts[0] and texts[0].index("hi") < texts[0].index("yo")
    assert "It's" not in tokenizer.apply_chat_template([SYSTEM, *plain], tokenize=False)
    with pytest.raises(ConfigError, match="mapping: expected a name for each of role, .*, got .*from"):
        get_chat_template(tokenizer, name, mapping={"role": "from"})


def test_the_eos_ends_turns_where_the_end_is_no_token(capsys):
    tokenizer = get_chat_template(tokenizers.byte_level(), "gemma-4")
    assert "lacks <|turn>, <turn|>: its EOS </s> ends turns" in capsys.readouterr().err
    ((example,),) = Encoder(tokenizer).encode([ChatRecord([ASKED, SAID], "x")])
    assert tokenizer.decode(example.tokens[example.learn]) == "yo</s>"
    with pytest.raises(ConfigError, match=r"gemma-4 needs special tokens .* lacks: <\|turn>, <turn\|>; add"):
        get_chat_template(tokenizers.byte_level(), "gemma-4", map_eos_token=False)


def test_a_template_with_its_end():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content + eos_token }}{% endfor %}"
    tokenizer = get_chat_template(tokenizers.byte_level(), (source, "eos_token"))
    assert tokenizer.apply_chat_template([SAID], tokenize=False) == "assistant: yo</s>"
    for pair, message in (
        ((source, "<|no|>"), "expected a token of the tokenizer as the end of a turn, got '<|no|>'"),
        (("{% if %}", "eos_token"), "not valid Jinja"),
        ((source,), "expected a name, or a template's text and the end"),
    ):
        with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
            get_chat_template(tokenizer, pair)


def test_other_names_are_of_templates():
    assert set(SAME_TEMPLATES.values()) <= NAMED_TEMPLATES.keys() and not SAME_TEMPLATES.keys() & NAMED_TEMPLATES.keys()
