import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken

from fastjax.data import ChatRecord, Encoder, TextRecord, encoding
from fastjax.data.documents import Documents
from fastjax.data.pipeline import prepare
from fastjax.errors import ConfigError, DataError
from tests.support.data import uncached

CHAT = [
    {"role": "user", "content": "the user asked 世界"},
    {"role": "assistant", "content": "what the answer is 世"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": ""},
]
SYSTEM = [{"role": "system", "content": "the assistant"}, *CHAT[:2]]


def encode(tokenizer, record, loss_on="responses"):
    """An example as [text, text, …], alternately not learnt and learnt, and its token ids."""
    record = TextRecord(record, "x") if isinstance(record, str) else ChatRecord(record, "x")
    ((example,),) = Encoder(tokenizer, uncached(loss_on=loss_on)).encode([record])
    borders = [0, *(np.flatnonzero(np.diff(example.learn)) + 1), len(example.tokens)]
    assert not example.learn[0]
    pieces = [tokenizer.decode(example.tokens[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    return pieces, example.tokens.tolist()


ASKED = "the user asked 世界"
SAID = "what the answer is 世"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("name", "chat", "expected"),
    [
        (
            "chatml",
            SYSTEM,
            f"<|im_start|>system\nthe assistant<|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
            f"«{SAID}<|im_end|>»\n",
        ),
        (
            "chatml",
            CHAT,
            f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n«{SAID}<|im_end|>»\n"
            "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n",
        ),
        (
            "llama3",
            CHAT,
            f"<s>{HEADER}{ASKED}<|eot_id|>{HEADER}«{SAID}<|eot_id|>»{HEADER}and?<|eot_id|>{HEADER}«<|eot_id|>»".format(
                *("user", "assistant") * 2
            ),
        ),
        ("llama2", CHAT[:2], f"<s>[INST] {ASKED} [/INST]« {SAID}</s>»"),
        (
            "plain",
            CHAT,
            f"### user:\n{ASKED}\n\n### assistant:\n«{SAID}\n\n»### user:\nand?\n\n### assistant:\n«\n\n</s>»",
        ),
        ("chatml", CHAT[:1], f"<|im_start|>user\n{ASKED}<|im_end|>\n"),
    ],
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_responses_and_the_end_of_the_turn_are_learnt(make_tokenizer, name, chat, expected, adds_bos):
    """Marks « and » around the tokens that are learnt."""
    found, tokens = encode(make_tokenizer(name, adds_bos=adds_bos), chat)
    if adds_bos and not expected.startswith("<s>"):
        expected = "<s>" + expected
    assert found == re.split("[«»]", expected.removesuffix("»"))
    assert tokens.count(0) == int(expected.startswith("<s>"))


@pytest.mark.parametrize("template", ["chatml", "llama2"])
@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("last", [None, True, False])
def test_responses_that_the_row_excludes_are_not_learnt(make_tokenizer, template, first, last):
    tokenizer = make_tokenizer(template)
    chat = [*CHAT[:3], {"role": "assistant", "content": "the end"}]
    record = ChatRecord(chat, "x", train=(None, first, None, last))
    ((example,),) = Encoder(tokenizer).encode([record])
    learnt = tokenizer.decode(example.tokens[example.learn])
    assert ("what the answer is" in learnt, "the end" in learnt) == (first is not False, last is not False)
    ends = [index for index in np.flatnonzero(example.learn) if example.tokens[index] in (1, 3)]
    assert len(ends) == (first is not False) + (last is not False)
    ((only,),) = Encoder(tokenizer, uncached(loss_on="last_response")).encode([record])
    assert ("the end" in tokenizer.decode(only.tokens[only.learn])) == (last is not False)


def test_a_row_that_asks_for_what_is_not_learnt_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    asked = ChatRecord(CHAT, "rows.jsonl:7", train=(True, None, None, None))
    with pytest.raises(
        DataError, match=r"^rows.jsonl:7: messages\[0\] is to be learnt .* but is the user's.*loss_on: all"
    ):
        list(Encoder(tokenizer).encode([asked]))
    list(Encoder(tokenizer, uncached(loss_on="all")).encode([asked]))
    given = ChatRecord(CHAT, "rows.jsonl:7", prompt=2, train=(None, True, None, None))
    with pytest.raises(DataError, match=r"^rows.jsonl:7: messages\[1\] is to be learnt .* part of the prompt"):
        list(Encoder(tokenizer).encode([given]))
    excluded = ChatRecord(CHAT, "rows.jsonl:7", train=(None, False, None, None))
    with pytest.raises(DataError, match=r"^rows.jsonl:7: messages\[1\] is not to be learnt .* but loss_on is all"):
        list(Encoder(tokenizer, uncached(loss_on="all")).encode([excluded]))


CALLS = [
    {"role": "system", "content": "the assistant"},
    {"role": "user", "content": "what the user asked"},
    {"role": "assistant", "content": "the call"},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "the end"},
]
TURN_OF_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}<result>\n{{ m.content }}\n</result>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n{MESSAGE}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Results of tools in one turn of the user's, as Qwen's template writes them."""
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize("message", ["{{ m.content }}", MARKED])
@pytest.mark.parametrize(
    ("roles", "learnt"),
    [
        (["assistant"], ["the call<|im_end|>", "the answer<|im_end|>"]),
        (
            ["tool", "assistant"],
            [
                "the call<|im_end|>",
                "one\n</result><result>\ntwo\n</result><|im_end|>",
                "the answer<|im_end|>",
            ],
        ),
        (["user", "system"], ["the assistant<|im_end|>", "what the user asked<|im_end|>", "the end<|im_end|>"]),
    ],
)
def test_roles_to_learn(make_tokenizer, roles, learnt, message):
    pieces, tokens = encode(make_tokenizer(TURN_OF_TOOLS.replace("{MESSAGE}", message)), CALLS, roles)
    assert pieces[1::2] == learnt


def test_a_message_in_a_turn_of_its_own_has_no_other_s_header(make_tokenizer):
    """Seed-OSS and gpt-oss write each result of a tool as a turn."""
    pieces, _ = encode(make_tokenizer("chatml"), CALLS, ["tool"])
    assert pieces[1::2] == ["one<|im_end|>", "two<|im_end|>"]


def test_the_end_of_a_thought_ends_no_answer(make_tokenizer):
    """gpt-oss ends thoughts and inner turns with one token, and the last turn with another."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}{{ m.reasoning_content }}"
        "<|im_end|><|im_start|>{% endif %}{{ m.content }}"
        "{{ '</s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
        "{% endfor %}" + BEGUN
    )
    tokenizer = make_tokenizer(template)
    pieces, _ = encode(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2)
    assert pieces[1::2] == ["b<|im_end|>", "b</s>"]
    assert tokenizer.convert_ids_to_tokens(Encoder(tokenizer).stop_tokens()) == ["</s>"]


def test_a_turn_ends_with_the_token_that_begins_the_next(make_tokenizer):
    """As in GLM's templates: the last turn has EOS there, and generation stops at either."""
    tokenizer = make_tokenizer("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" + BEGUN)
    chat = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]
    pieces, _ = encode(tokenizer, chat)
    assert pieces[1::2] == ["a<|im_start|>", "a</s>"]
    stops = tokenizer.convert_ids_to_tokens(Encoder(tokenizer).stop_tokens())
    assert stops == ["</s>", "<|im_start|>"]


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_that_end_turns_need_not_be_special(make_tokenizer, special):
    """As those of `model.new_tokens`; with the text that closes a conversation, and another end of calls."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
        "{% if m.tool_calls %}</call><|run|>{% else %}<|stop|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    texts = ["<|user|>", "<|assistant|>", "<|tool|>", "</call>", "<|stop|>", "<|run|>"]
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    call = {"type": "function", "function": {"name": "the", "arguments": {}}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    chat += [{"role": "tool", "content": "c"}, {"role": "assistant", "content": "d"}]
    pieces, _ = encode(tokenizer, chat)
    assert [piece[-16:] for piece in pieces[1::2]] == ["{}}}]</call><|run|>"[-16:], "d<|stop|>"]
    assert tokenizer.convert_ids_to_tokens(Encoder(tokenizer).stop_tokens()) == ["</s>", "<|stop|>", "<|run|>"]


def test_roles_to_learn_and_messages_that_are_not(make_tokenizer):
    flags = (None, False, None, True, False, None, True)
    record = ChatRecord(CALLS, "x", prompt=1, train=flags)
    tokenizer = make_tokenizer("chatml")
    ((example,),) = Encoder(tokenizer, uncached(loss_on=["system", "user", "tool"])).encode([record])
    assert tokenizer.decode(example.tokens[example.learn]) == "one<|im_end|>the end<|im_end|>"
    with pytest.raises(DataError, match=r"x: messages\[6\] is to be learnt .* only tool is learnt; leave it out, name"):
        list(Encoder(tokenizer, uncached(loss_on=["tool"])).encode([record]))
    with pytest.raises(DataError, match=r"x: the chat template does not write messages\[0\], the user's, by itself"):
        encode(make_tokenizer("{{ messages | length }}"), CHAT, ["user"])
    with pytest.raises(ConfigError, match=r"or a list of some of system, .*, got \['model'\]"):
        uncached(loss_on=["model"])


def test_everything_is_learnt_on_request(make_tokenizer):
    pieces, tokens = encode(make_tokenizer("llama3", adds_bos=True), CHAT[:2], loss_on="all")
    assert pieces[0] == "<s>" and pieces[1].endswith("世<|eot_id|>") and len(pieces) == 2
    assert tokens.count(0) == 1
    forgetful, _ = encode(make_tokenizer("forgetful", adds_bos=True), CHAT, loss_on="all")
    assert len(forgetful) == 3 and forgetful[2] == "\n"


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["the answer", "<s>the answer", "the answer</s>", "<s><s>the answer</s>"])
def test_a_text_gets_one_bos_and_one_eos(make_tokenizer, adds_bos, text):
    pieces, tokens = encode(make_tokenizer(None, adds_bos=adds_bos), text)
    assert tokens.count(1) == 1 and tokens[-1] == 1
    assert "".join(pieces).endswith("the answer</s>") and pieces[-1].endswith("answer</s>")
    assert tokens.count(0) == (1 if adds_bos else text.count("<s>"))


def test_a_text_that_ends_in_another_special_token_still_gets_its_eos(make_tokenizer):
    _, tokens = encode(make_tokenizer(None), "the<|im_end|>")
    assert tokens[-2:] == [3, 1]
    assert encode(make_tokenizer(None), "a")[0] == ["a", "</s>"]  # as few tokens as learn anything


def test_stop_tokens_are_eos_and_the_end_of_the_turn(make_tokenizer):
    names = {"chatml": (1, 3), "llama3": (1, 6), "llama2": (1,), "plain": (1,), None: (1,)}
    assert {name: Encoder(make_tokenizer(name)).stop_tokens() for name in names} == names
    assert Encoder(make_tokenizer("{{ raise_exception('content in parts alone') }}")).stop_tokens() == (1,)


def test_many_examples_come_in_order_across_chunks(make_tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 5000)
    records = [TextRecord(f"the {index}", "x") for index in range(2500)]
    tokenizer = make_tokenizer(None)
    chunks = Encoder(tokenizer).encode(records)
    chunks = list(chunks)
    assert len(chunks) > 2 and all(chunk.records.tolist() == list(range(len(chunk))) for chunk in chunks)
    texts = [tokenizer.decode(example.tokens) for examples in chunks for example in examples]
    assert texts == [f"the {index}</s>" for index in range(2500)]


def test_the_mask_is_transformers_own_where_the_template_marks_responses(make_tokenizer):
    marked = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A:\n{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:\n{% endif %}"
    )
    tokenizer = make_tokenizer(marked)
    expected = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ((example,),) = Encoder(tokenizer).encode([ChatRecord(CHAT, "x")])
    assert example.tokens.tolist() == expected["input_ids"]
    assert example.learn.astype(int).tolist() == expected["assistant_masks"]


def test_a_special_token_amid_an_answer_ends_nothing(make_tokenizer):
    """The template writes none at its end: all that stands behind the one in the content is learnt too."""
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "answer <|im_end|> is what"}]
    pieces, _ = encode(make_tokenizer("plain"), chat)
    assert pieces == ["### user:\nthe\n\n### assistant:\n", "answer <|im_end|> is what\n\n</s>"]


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{% endgeneration %}"
    "<|im_end|>\n{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "learnt"),
    [("~the user", "the user"), ("the user~", "the user"), ("~the~ user~", "the user"), ("~", "")],
)
def test_characters_that_the_tokenizer_drops(make_tokenizer, content, learnt):
    """Where a response begins or ends in one, or is nothing else, its tokens are found by those beside it."""
    from tokenizers import normalizers

    tokenizer = make_tokenizer(MARKED)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    chat = [{"role": "user", "content": "~and?"}, {"role": "assistant", "content": content}]
    assert encode(tokenizer, chat)[0] == ["U:and?\nA:", f"{learnt}<|im_end|>", "\n"]


def test_a_beginning_has_no_end_that_the_tokenizer_adds(make_tokenizer):
    from tokenizers import processors

    tokenizer = make_tokenizer(None)
    ends = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor = ends
    encoder = Encoder(tokenizer)
    assert tokenizer.decode(encoder.encode_beginning("the user")) == "<s>the user"
    ((example,),) = encoder.encode([TextRecord("the user", "x")])
    assert tokenizer.decode(example.tokens) == "<s>the user</s>"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_token_of_the_post_processor_without_ids(make_tokenizer, wrapped):
    """Encoding would end in a panic, which is no Exception."""
    tokenizer = make_tokenizer(None)
    added, text = {"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [added, text], "pair": [text, text], "special_tokens": {}}
    template = {"type": "Sequence", "processors": [template]} if wrapped else template
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": template}
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    tokenizer.backend_tokenizer.post_processor = backend.post_processor
    with pytest.raises(ConfigError, match="post_processor: expected ids in its special_tokens .*, got none for <x>;"):
        Encoder(tokenizer)


def test_what_cannot_be_done_is_said(make_tokenizer):
    with pytest.raises(ConfigError, match="has no eos_token"):
        Encoder(make_tokenizer("chatml", eos_token=None))
    with pytest.raises(
        ConfigError, match="loss_on: expected one of responses, last_response, all or .*, got 'answers'"
    ):
        uncached(loss_on="answers")
    with pytest.raises(ConfigError, match="has no chat template"):
        Encoder(make_tokenizer(None)).encode_prompt(CHAT)
    with pytest.raises(DataError, match="the prompt: the chat template refuses"):
        Encoder(make_tokenizer("llama2")).encode_prompt(SYSTEM)


PARTS = {"instruction_part": "<|im_start|>user\n", "response_part": "<|im_start|>assistant\n"}


def test_of_a_text_the_responses_are_learnt_by_what_begins_them(make_tokenizer):
    """As the same conversation with its template: each answer and the end of its turn, and nothing else."""
    tokenizer = make_tokenizer("chatml")
    chat = [{"role": "system", "content": "s"}]
    for number in range(2):
        chat += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}\n"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    records = [TextRecord(text, "w"), TextRecord("no conversation", "w"), TextRecord("a" + "b", "w", prompt=1)]
    ((by_parts, without, completion),) = Encoder(tokenizer, uncached(loss_on=PARTS)).encode(records)
    (((by_template),),) = Encoder(tokenizer).encode([ChatRecord(chat, "w")])
    assert by_parts.tokens.tolist() == by_template.tokens.tolist()
    assert by_parts.learn.tolist() == by_template.learn.tolist() and 0 < by_parts.learn.sum() < len(by_parts.learn)
    assert not without.learn.any() and completion.learn.any()
    cut = PARTS["response_part"] + "said"
    ((cut, _),) = Encoder(tokenizer, uncached(loss_on=PARTS)).encode([TextRecord(cut, "w"), TextRecord(text, "w")])
    assert tokenizer.decode(cut.tokens[cut.learn]) == "said" + tokenizer.eos_token  # a text's end is learnt
    with pytest.raises(DataError, match=r"^w: a response_part stands in it, but the instruction_part, 'User:', in no"):
        list(
            Encoder(tokenizer, uncached(loss_on=PARTS | {"instruction_part": "User:"})).encode([TextRecord(text, "w")])
        )
    for wrong in ({}, {"response_part": "a"}, PARTS | {"instruction_part": ""}, PARTS | {"more": "a"}):
        with pytest.raises(ConfigError, match="loss_on: expected instruction_part and response_part, which are not em"):
            uncached(loss_on=wrong)


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("inside", "behind"),
    [
        ("{{ m.content }}<|im_end|>\n", ""),
        ("{{ m.content }}<|im_end|>", "{{ '\n' }}"),
        ("{{ m.content }}", "<|im_end|>\n"),
    ],
)
def test_marks_may_hold_the_end_and_the_line_break_behind_it(make_tokenizer, inside, behind):
    """As the training templates that TRL ships have them: the end of the turn is learnt once, and nothing behind it."""
    template = TURNS + "{% generation %}" + inside + "{% endgeneration %}" + behind + "{% endfor %}" + BEGUN
    chat = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    pieces, _ = encode(make_tokenizer(template), chat)
    head = "<|im_start|>assistant\n"
    assert pieces == [head, "a<|im_end|>", f"\n{head}", "b<|im_end|>", "\n"]


def test_of_more_marks_than_answers_empty_ones_are_none(make_tokenizer):
    """Else the special token behind one would be taken for its end."""
    empty = "{% generation %}{% endgeneration %}"
    template = f"{{% for m in messages %}}{empty}<|im_start|>{{{{ m.role }}}}\n"
    template += "{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    pieces, _ = encode(make_tokenizer(template + BEGUN), CHAT[:2])
    assert pieces[1:] == [f"{CHAT[1]['content']}<|im_end|>", "\n"]
    said, _ = encode(make_tokenizer(template.replace(empty, "") + BEGUN), [{"role": "assistant", "content": ""}])
    assert said[1:] == ["<|im_end|>", "\n"]  # an empty answer is one


def test_what_closes_a_conversation_behind_its_last_turn_is_not_learnt(make_tokenizer):
    """Phi-3's template writes EOS where there is no generation prompt; generation stops at the end of the turn."""
    template = TURNS + "{{ m.content }}<|im_end|>\n{% endfor %}"
    closed = template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    chat = CHAT[:2]
    pieces, tokens = encode(make_tokenizer(closed), chat)
    plain, others = encode(make_tokenizer(template + BEGUN), chat)
    assert pieces[:2] == plain[:2] and pieces[1].endswith("<|im_end|>")
    assert tokens == [*others, make_tokenizer(closed).eos_token_id]
    assert Encoder(make_tokenizer(closed)).stop_tokens() == Encoder(make_tokenizer(template + BEGUN)).stop_tokens()


REWRITTEN = (
    TURNS + "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + BEGUN
)


def test_answers_that_are_rewritten_are_documents_of_their_own(make_tokenizer):
    """Each example of a record is one answer, as generation would see it, and keeps the record's number."""
    tokenizer = make_tokenizer(REWRITTEN)
    chat = [{"role": role, "content": f"{role[0]}{turn}"} for turn in range(3) for role in ("user", "assistant")]
    records = [ChatRecord(CHAT[:2], "one"), ChatRecord(chat, "three"), TextRecord("text", "text")]
    (examples,) = Encoder(tokenizer).encode(records)
    assert examples.records.tolist() == [0, 1, 1, 1, 2] and examples.count == 3
    said = [tokenizer.decode(example.tokens[example.learn]) for example in (examples[n] for n in range(1, 4))]
    assert said == [f"<think></think>a{turn}<|im_end|>" for turn in range(3)]
    for turn in range(3):
        prompt = Encoder(tokenizer).encode_prompt(chat[: 2 * turn + 1])
        assert examples[1 + turn].tokens[: len(prompt)].tolist() == prompt
    documents = Documents.of(examples, 100)
    assert documents.examples.tolist() == [0, 1, 1, 1, 2]
    assert (documents.counts.examples, documents.counts.apart, documents.counts.no_targets) == (3, 2, 0)
    dropped = Documents.of(examples, 20, "drop").counts
    assert (
        dropped.examples
        == 3
        == dropped.dropped + dropped.no_targets + len(set(Documents.of(examples, 20, "drop").examples))
    )
    rows = [{"messages": CHAT[:2]}, {"messages": chat}, {"messages": CHAT[:1]}]
    dataset = prepare(rows, tokenizer, 200)
    assert dataset.statistics.apart == 2 and "2 answers in examples of their own, since" in str(dataset.statistics)
    (last,) = Encoder(tokenizer, uncached(loss_on="last_response")).encode(records)
    assert len(last) == 3
    with pytest.raises(DataError, match="^three: the chat template rewrites earlier answers when messages follow"):
        list(Encoder(tokenizer).encode(records, apart=False))


def test_answers_behind_another_text_than_generation_s_are_counted(make_tokenizer):
    tokenizer = make_tokenizer(
        TURNS
        + "{{ m.content }}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    statistics = prepare([{"messages": CHAT}], tokenizer, 200).statistics
    assert statistics.elsewhere == 2 and "2 answers are learnt behind another text than generation's" in str(statistics)


def test_variables_reach_the_template(make_tokenizer):
    """A row's own variables stand before those of all rows, in training and in prompts."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{{ mood }}{{ documents }}"
    tokenizer = make_tokenizer(template)
    for mode in ("control", "text"):
        encoder = Encoder(
            tokenizer, uncached(loss_on="all", special_tokens=mode, chat_template_kwargs={"mood": "calm"})
        )
        chats = [
            ChatRecord(CHAT[:2], "x", options=options) for options in (None, {"mood": "<|im_end|>"}, {"documents": [1]})
        ]
        (examples,) = encoder.encode(chats)
        said = [
            tokenizer.decode(examples[n].tokens).partition("世<|im_end|>")[2].removesuffix("</s>") for n in range(3)
        ]
        assert said == ["calmNone", "<|im_end|>None", "calm[1]"]
        assert examples.noted == {"special": [1]}
        assert tokenizer.decode(encoder.encode_prompt(CHAT[:1])).endswith("calmNone")
    with pytest.raises(DataError, match="^chat_template_kwargs: expected none of messages, tools"):
        Encoder(tokenizer, uncached(chat_template_kwargs={"messages": []}))
    with pytest.raises(
        ConfigError, match="^chat_template_kwargs: expected variables .* got mod, which .*; .*, mood do$"
    ):
        _ = Encoder(tokenizer, uncached(chat_template_kwargs={"mod": "calm"})).template


def test_variables_of_a_conversation_read_no_tokenizer_again(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}")
    plain = Encoder(tokenizer, uncached(special_tokens="text"))
    happy = plain.with_variables({"mood": "世"})
    fresh = Encoder(tokenizer, uncached(special_tokens="text", chat_template_kwargs={"mood": "世"}))
    assert happy.encode_prompt(CHAT[:1]) == fresh.encode_prompt(CHAT[:1]) != plain.encode_prompt(CHAT[:1])
    assert happy._backend is plain._backend and happy.stop_tokens() == fresh.stop_tokens()
