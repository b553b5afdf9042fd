"""llama.cpp's vocabulary from tokenizer.json: tokens, types, merges or scores, special tokens, chat template.

Byte-level BPE is llama.cpp's "gpt2"; BPE over text with byte fallback is its "llama" (scores instead of merges). The
pre-tokenizer is a regular expression in tokenizer.json and a name in llama.cpp; an unknown expression is refused, never
guessed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, unexpected
from convert.files import read_json
from convert.generation_config import end_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str) -> str:
    """Words cut at case changes, each followed by `ending`."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}|"


#: (regular expression, ignore_merges) -> llama.cpp's name.
_SPLITS = {
    (_CONTRACTIONS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_CONTRACTIONS + r"\p{N}{1,3}" + _REST, False): "dbrx",
    (_CONTRACTIONS + r"\p{N}" + _REST, False): "qwen2",
    (
        _CONTRACTIONS.replace(r"\p{L}+", r"[\p{L}\p{M}]+") + r"\p{N}" + _REST.replace(r"\p{L}", r"\p{L}\p{M}"),
        False,
    ): "qwen35",
    (_cased("") + r"\p{N}" + _REST_AND_SLASHES, True): "tekken",
    (_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"\p{N}{1,3}" + _REST_AND_SLASHES, False): "gpt-4o",
}
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


def read_vocabulary(folder: Path, rows: int, pre: str | None = None) -> dict[str, Any]:
    """Read a folder's tokenizer.

    Args:
        folder: A folder with tokenizer.json.
        rows: Rows of the embedding; ids without a token get placeholder names.
        pre: llama.cpp's name of the pre-tokenizer; None to look it up.

    Returns:
        Name of `GGUFWriter.add_…` -> argument. Tokens are by id, one for each row of the embedding; scores fall from
        merge to merge; "eot" is another end of generation_config.json, the last one.

    Raises:
        ConvertError: tokenizer.json is missing, is not BPE, has more tokens than rows, or has an unknown pre-tokenizer.
    """
    file = folder / "tokenizer.json"
    raw = read_json(file)
    model = raw.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise unexpected(file, "model.type", "'BPE'", model.get("type") if isinstance(model, dict) else model)
    vocab, merges, added = model.get("vocab"), model.get("merges"), raw.get("added_tokens") or []
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise unexpected(file, "model.vocab", "an object {token: id}", type(vocab).__name__)
    if not isinstance(merges, list) or not all(_is_merge(merge) for merge in merges):
        raise unexpected(file, "model.merges", "a list of pairs", type(merges).__name__)
    if not isinstance(added, list) or not all(isinstance(t, dict) and type(t.get("id")) is int for t in added):
        raise unexpected(file, "added_tokens", "a list of objects with an id", added)
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    byte_fallback = bool(model.get("byte_fallback"))
    tokens, types = _tokens(file, vocab, added, rows, byte_fallback)
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    ids = {token: index for index, token in enumerate(tokens)}
    special = {}
    for name in _SPECIAL:
        given = settings.get(f"{name}_token")
        text = given.get("content") if isinstance(given, dict) else given
        if isinstance(text, str) and text in ids:
            special[name] = ids[text]
    others = [end for end in end_tokens(folder) if end != special.get("eos") and end < rows]
    if others:
        special["eot"] = others[-1]  # llama.cpp takes one
    keys: dict[str, Any] = {
        "tokenizer_model": "llama" if byte_fallback else "gpt2",
        "tokenizer_pre": pre or ("default" if byte_fallback else _name_of_split(file, raw, model)),
        "token_list": tokens,
        "token_types": types,
    }
    if byte_fallback:
        rank = {left + right: -float(index) for index, (left, right) in reversed(list(enumerate(pairs)))}
        keys["token_scores"] = [rank.get(token, -float(len(pairs) + index)) for index, token in enumerate(tokens)]
        keys["add_space_prefix"] = _space_in_front(raw)
    else:
        keys["token_merges"] = [f"{left} {right}" for left, right in pairs]
    keys |= {f"{name}_token_id": index for name, index in special.items()}
    keys |= {f"add_{name}_token": added for name, added in _around(raw, settings, special, tokens).items()}
    template = _template(folder, settings)
    return keys if template is None else keys | {"chat_template": template}


def _space_in_front(raw: dict[str, Any]) -> bool:
    """Whether the normaliser or the pre-tokenizer prepends a space."""
    if any(step.get("type") == "Prepend" for step in _steps(raw.get("normalizer"), "normalizers")):
        return True
    spaces = [step for step in _steps(raw.get("pre_tokenizer"), "pretokenizers") if step.get("type") == "Metaspace"]
    return any(step.get("prepend_scheme", "always") != "never" for step in spaces)


def _steps(step: Any, within: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer: of a sequence, or the one that it is."""
    steps = step.get(within) if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    return [each for each in steps if isinstance(each, dict)] if isinstance(steps, list) else []


def _is_merge(merge: Any) -> bool:
    if isinstance(merge, str):
        return merge.count(" ") == 1
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge)


def _tokens(
    file: Path, vocab: dict[str, int], added: list[dict[str, Any]], rows: int, byte_fallback: bool
) -> tuple[list[str], list[int]]:
    """Tokens and types by id."""
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [UNUSED] * rows
    special = [(str(token.get("content", "")), token["id"], CONTROL if token.get("special") else USER_DEFINED)
               for token in added]  # fmt: skip
    for text, index, kind in [*((text, index, NORMAL) for text, index in vocab.items()), *special]:
        if not 0 <= index < rows:
            raise unexpected(file, f"id of {text!r}", f"one below {rows}, the rows of the embedding", index)
        if kind == NORMAL and byte_fallback and len(text) == 6 and text.startswith("<0x"):
            kind = BYTE
        if byte_fallback and text == "<unk>":
            kind = UNKNOWN
        tokens[index], types[index] = text, kind
    return tokens, types


def _name_of_split(file: Path, raw: dict[str, Any], model: dict[str, Any]) -> str:
    splitter = raw.get("pre_tokenizer")
    steps = _steps(splitter, "pretokenizers")
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0].get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        name = _SPLITS.get((expression, bool(model.get("ignore_merges"))))  # type: ignore[arg-type]
        if name is not None:
            return name
    expected = "a way to cut text up that llama.cpp has a known name for; give the name (--pre_tokenizer) if it has one"
    raise unexpected(file, "pre_tokenizer", expected, splitter)


def _around(
    raw: dict[str, Any], settings: dict[str, Any], special: Mapping[str, int], tokens: list[str]
) -> dict[str, bool]:
    """Whether "bos" and "eos" are added, from the settings or the post-processor's template."""
    flags = {}
    shown = json.dumps(raw.get("post_processor"))
    for name in ("bos", "eos"):
        given = settings.get(f"add_{name}_token")
        if isinstance(given, bool):
            flags[name] = given
        elif name in special:
            flags[name] = json.dumps(tokens[special[name]]) in shown
    return flags


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{file}: not valid UTF-8 at byte {error.start}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
