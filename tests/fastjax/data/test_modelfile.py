"""Modelfiles: a Go template that writes what the chat template does, or a word why there is none."""

import re

import pytest

from fastjax.data import Encoder
from fastjax.data.modelfile import find_turns, write_modelfile
from fastjax.data.named_templates import set_chat_template
from tests.support import tokenizers

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS = "{{ bos_token }}" + QWEN.replace("You help.", "You {{ '{{' }} help.")
THINKS = QWEN.replace("m.content", "m.content.split('</think>')[-1] if m.role == 'assistant' else m.content")
ALWAYS_THINKS = QWEN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
DATED = QWEN.replace("You help.", "Today is {{ strftime_now('%d %b %Y') }}.")
ONCE = QWEN.replace("{{ m.role }}", "{{ m.role if not loop.last else 'last' }}")
NO_SYSTEM = QWEN.replace(
    "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
)


def made(source, *, adds_bos=False):
    tokenizer = tokenizers.byte_level()
    if source in ("chatml", "llama3", "mistral", "plain"):
        set_chat_template(tokenizer, source)
    else:
        tokenizer.chat_template = source
    if adds_bos:
        from tokenizers import processors

        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    return tokenizer


def rendered(template, messages):
    """The text that Go's text/template makes of the few constructs that are used."""
    head, loop, answer = re.fullmatch(r"(.*?)\{\{ range \.Messages }}(.*)\{\{ end }}(.*)", template, re.S).groups()
    system = any(message["role"] == "system" for message in messages)
    unasked = re.fullmatch(r"\{\{ if not \.System }}(.*)\{\{ end }}", head, re.S)
    text = "" if unasked is None or system else unasked[1]
    pattern = r"\{\{ (?:else )?if eq \.Role \"(\w+)\" }}(.*?)(?=\{\{ else if|\{\{ end }})"
    branches = dict(re.findall(pattern, loop, re.S))
    text += "".join(branches[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages) + answer
    return text.replace('{{ "{{" }}', "{{")


def chat(*contents, system=None):
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("source", ["chatml", "llama3", "mistral", "plain", QWEN, BOS])
def test_the_go_template_writes_the_same_turns(source, adds_bos):
    encoder = Encoder(made(source, adds_bos=adds_bos))
    turns, told = find_turns(encoder)
    assert turns is not None and ("white space" in told) == (source in ("llama3", "mistral"))
    for messages in (chat("hi"), chat("a", "b", "c {{ x }}"), chat("a", "b", "c", "d", "e\n\nf", system="be\nshort")):
        ours = encoder.template.render(messages, "p", add_generation_prompt=True).text
        text = rendered(turns.go_template().replace("{{ x }}", "X"), messages)
        assert text == (ours.removeprefix("<s>") if adds_bos else ours)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (THINKS, "rewrites thoughts"),
        (ALWAYS_THINKS, "begins with more than its text"),
        (DATED, "tells the date"),
        (ONCE, "depends on the others"),
        (NO_SYSTEM, "refuses some conversations"),
        (None, "has no chat template"),
    ],
)
def test_others_are_left_to_ollama_with_a_word_why(source, told, tmp_path):
    tokenizer = made(source)
    turns, why = find_turns(Encoder(tokenizer))
    assert turns is None and told in why
    tokenizer.save_pretrained(str(tmp_path))
    text = write_modelfile(tmp_path / "m.gguf", tmp_path).read_text()
    assert told in text and not re.search("^TEMPLATE", text, re.M) and "--jinja" in text and "FROM ./m.gguf" in text


def test_the_file(tmp_path):
    made("chatml").save_pretrained(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 1}')
    file = write_modelfile(tmp_path / "m-q8_0.gguf", tmp_path)
    assert file == tmp_path / "m-q8_0.Modelfile"
    head, template, tail = re.fullmatch(r'(.*)TEMPLATE """(.*)"""\n(.*)', file.read_text(), re.S).groups()
    assert head.splitlines()[:2] == ["# ollama create NAME -f m-q8_0.Modelfile", "FROM ./m-q8_0.gguf"]
    assert template.endswith("<|im_start|>assistant\n")
    stops = ['PARAMETER stop "</s>"', 'PARAMETER stop "<|im_end|>"']
    assert tail.splitlines() == [*stops, "PARAMETER temperature 0.6", "PARAMETER top_k 20"]
    file.write_text("mine")
    assert write_modelfile(tmp_path / "m-q8_0.gguf", tmp_path) is None and file.read_text() == "mine"
    assert write_modelfile(tmp_path / "m-q8_0.gguf", tmp_path, force=True) and file.read_text() != "mine"
