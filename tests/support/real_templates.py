"""A judge of learnt tokens by transformers' renderings alone: nothing of the project's is used here.

An answer is what the generation prompt leaves to say: the text of the conversation up to it, behind the text that asks
for it, to the special token that ends the turn.
"""

import re

_SPECIAL = re.compile(
    r"<\|[^|>{}\n'\"]{1,40}\|>|</?s>|<(?:start|end)_of_\w+>|<turn\|>|<\|turn>|\[/?[A-Z]{3,}(?:_[A-Z]+)*\]|<｜[^｜>]+｜>"
    r"|<SPECIAL_\d+>|\[e~\[|\]~b\]|〈\|[A-Z]+\|〉|</assistant>"
)
CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "sea"}}}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}, "required": []}}


def _user(text):
    return {"role": "user", "content": text}


def _said(text, **more):
    return {"role": "assistant", "content": text, **more}


_ONE = [_user("question one"), _said("answer one")]
_TWO = [*_ONE, _user("question two"), _said("answer two")]
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "blue"}
#: Name → a row.
ROWS = {
    "one answer": {"messages": _ONE},
    "two answers": {"messages": _TWO},
    "system": {"messages": [{"role": "system", "content": "be short"}, *_TWO]},
    "tools": {
        "messages": [
            _user("question one"),
            _said("", tool_calls=[CALL | {"id": "call00001"}]),
            _RESULT,
            _said("answer one"),
        ],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "reasoning_content": {"messages": [*_ONE, _user("question two"), _said("answer two", reasoning_content="thought")]},
    "thinking": {"messages": [*_ONE, _user("question two"), _said("answer two", thinking="thought")]},
    "reasoning": {"messages": [*_ONE, _user("question two"), _said("answer two", reasoning="thought")]},
    "inline thoughts": {
        "messages": [
            _user("question one"),
            _said("<think>\nthought one\n</think>\n\nanswer one"),
            _user("question two"),
            _said("<think>\nthought two\n</think>\n\nanswer two"),
        ]
    },
    "thoughts and calls": {
        "messages": [
            _user("question one"),
            _said("", reasoning_content="thought one", tool_calls=[CALL | {"id": "call00001"}]),
            _RESULT,
            _said("answer one", reasoning_content="thought two"),
        ],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "user last": {"messages": [*_ONE, _user("question two")]},
}


def special_tokens(source):
    """The special tokens that a template writes."""
    return sorted(set(_SPECIAL.findall(source)))


def rendered(tokenizer, row, count=None, prompt=False):
    """Text of the first messages of a row, by transformers; None: its template refuses them."""
    try:
        return tokenizer.apply_chat_template(
            row["messages"][:count], tools=row.get("tools"), tokenize=False, add_generation_prompt=prompt
        )
    except Exception:
        return None


def judge(tokenizer, row, examples, elsewhere):
    """Judge a row's answers: "" where all are learnt as they should be, else what is wrong.

    Args:
        tokenizer: with the template.
        row: one of `ROWS`.
        examples: (token ids, which of them are learnt) of each example that the row became.
        elsewhere: answers that are said to follow on another text than generation's.
    """
    runs = []
    for ids, learn in examples:
        borders = [n for n in range(1, len(ids)) if learn[n] != learn[n - 1]] + [len(ids)]
        for start, end in zip(borders, borders[1:], strict=False):
            if learn[start]:
                runs.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:end])))
    turns = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    others = 0
    marked = re.search(r"{%-? *generation", tokenizer.chat_template) is not None
    for n in turns:
        before, through = rendered(tokenizer, row, n, prompt=True), rendered(tokenizer, row, n + 1)
        if before is None or through is None:
            return f"transformers does not render the beginning up to message {n}"
        if marked:
            before, said = _marked(tokenizer, row, n + 1)
        elif through.startswith(before):
            said = through[len(before) :]
        else:  # the text before is rewritten, and the answer stands behind generation's, or it is said not to
            others += not any(
                _without_bos(tokenizer, start) == _without_bos(tokenizer, before) and through.rstrip().endswith(learnt)
                for start, learnt in runs
            )
            continue
        found = [learnt for start, learnt in runs if _without_bos(tokenizer, start) == _without_bos(tokenizer, before)]
        if not found:
            return f"message {n}: nothing is learnt behind {before[-60:]!r}; learnt are {runs}"
        whole = rendered(tokenizer, row) or ""
        behind = _SPECIAL.match(whole, len(through)) if whole.startswith(through) else None
        end = behind[0] if behind is not None and behind[0] in tokenizer.all_special_tokens else ""
        if not any(_is_answer(learnt, said, end) for learnt in found):
            return f"message {n}: {found} is learnt of {said!r}"
    if others != elsewhere:
        return f"{others} answers follow on another text than the generation prompt, {elsewhere} are counted"
    if len(runs) != len(turns):
        return f"{len(turns)} answers, {len(runs)} texts are learnt: {runs}"
    return ""


def _marked(tokenizer, row, count):
    """The text before the last turn's marks and the text inside them, by transformers' mask."""
    found = tokenizer.apply_chat_template(
        row["messages"][:count],
        tools=row.get("tools"),
        return_dict=True,
        tokenize=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
    starts = [n for n in range(1, len(ids)) if mask[n] and not mask[n - 1]]
    for start in reversed(starts):
        end = next((n for n in range(start, len(ids)) if not mask[n]), len(ids))
        said = tokenizer.decode(ids[start:end])
        if _SPECIAL.sub("", said).strip():  # not the end of the whole alone
            return tokenizer.decode(ids[:start]), said
    return "", ""


def _is_answer(learnt, said, end):
    """Whether a text is all that is said, to the first of the tokens behind it; another may stand in its place.

    A turn without an end of its own ends with the special token right behind it (GLM's `<|user|>`).
    """
    words = [word for word in _SPECIAL.split(said) if word.strip()]
    last = words[-1].rstrip() if words else ""
    begun = said[: said.rindex(last) + len(last)] if last else ""
    if not learnt.startswith(begun):
        return False
    rest, ends = learnt[len(begun) :], _SPECIAL.findall(said[len(begun) :])
    if not ends and end:
        return rest == end
    if not ends:
        return rest.strip() in ("", "</s>")
    tail = said[len(begun) :].rstrip()
    return (
        rest.rstrip() == rest and (tail.startswith(rest) or _SPECIAL.fullmatch(rest.strip()) is not None) and bool(rest)
    )


def _without_bos(tokenizer, text):
    while tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        text = text.removeprefix(tokenizer.bos_token)
    return text
