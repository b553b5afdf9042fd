"""Tokenizers of every kind, trained in milliseconds, and their tokens' byte ranges, from the pieces alone."""

import functools
import json
import random
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
SPECIAL += ["[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<unk>"]

_CORPUS = ["the answer is 👍 what the user asked 😀 and ß ñ 🎉 wo the ™ 世界 is. 👍 👍 😀 😀\n\n"] * 4
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*, trim_offsets: bool = False, emoji: bool = True, prefix: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's kind: characters are bytes, and tokens may end within one.

    Args:
        trim_offsets: Whether white space is left out of the offsets, as Llama 3's post-processor does.
        emoji: Whether emoji stand in the corpus, so that a space and the first bytes of one are one token.
        prefix: Whether a space is put before a text.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS if emoji else ["the answer is what the user asked"] * 4, trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets, add_prefix_space=prefix)
    return wrapped(backend)


def byte_fallback(*, prepend: bool = False) -> PreTrainedTokenizerFast:
    """Llama 2's kind: pieces with ▁ for a space, and bytes for characters that have no piece.

    Args:
        prepend: Whether ▁ comes by a normalizer before every stretch of text, and not by Metaspace before the first.
    """
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL + _BYTES, limit_alphabet=24, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    backend = Tokenizer.from_str(json.dumps(state))
    if prepend:
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrapped(backend)


def unigram(scheme: str) -> PreTrainedTokenizerFast:
    """SentencePiece's Unigram, with bytes for characters that have no piece.

    Args:
        scheme: Where Metaspace puts a ▁ of its own: always, first or never.
    """
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["model"]["vocab"] += [[byte, -20.0] for byte in _BYTES]
    state["model"]["byte_fallback"] = True
    return wrapped(Tokenizer.from_str(json.dumps(state)))


#: Name -> a tokenizer of each kind.
KINDS = {
    "byte level": byte_level,
    "byte level, trimmed offsets": lambda: byte_level(trim_offsets=True),
    "byte level, space in front": lambda: byte_level(prefix=True),
    "byte fallback": byte_fallback,
    "byte fallback, prepended": lambda: byte_fallback(prepend=True),
    "unigram": lambda: unigram("first"),
    "unigram, ▁ before every word": lambda: unigram("always"),
}


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the special tokens of all named templates."""
    if backend.decoder is None:
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def endings(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of random words whose last characters are one to four bytes long, in NFC.

    Args:
        count: Number of texts.
        seed: For the texts.
    """
    draw = random.Random(seed)
    known = "ß ñ ő ł 😀 🎉 ™ 👍 世 é . 1 \u200d \u3000 \u00a0".split(" ") + [" ", "\n", "  ", "\t", "👨‍👩‍👧", "🇫🇷"]
    planes = [(0x21, 0x7E), (0xA1, 0x17F), (0x400, 0x45F), (0x4E00, 0x9FA0), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F)]
    for _ in range(count):
        words = draw.choices(["the", "user", "answer", "👍", "世界", "wo"], k=draw.randint(1, 3))
        last = draw.choice(known) if draw.random() < 0.6 else chr(draw.randint(*draw.choice(planes)))
        yield " ".join(words) + draw.choice(["", " "]) + last


def token_ranges(tokenizer: PreTrainedTokenizerFast, ids: list[int], text: str) -> list[tuple[int, int]]:
    """The bytes [start, end) of `text` in UTF-8 of each token, from its piece, without offsets.

    A ▁ or space that the tokenizer puts in belongs to the character behind it.
    """
    data = text.encode()
    pieces: list[bytes] = []
    added = tokenizer.added_tokens_decoder
    by_byte = isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    for index, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if index in added:
            pieces.append(token.encode())
        elif by_byte:
            pieces.append(bytes(_byte_of()[character] for character in token))
        else:
            pieces.append(bytes([_BYTES.index(token)]) if token in _BYTES else token.replace("▁", " ").encode())
    ranges, place = [], 0
    for piece in pieces:
        start = place
        if not data[place:].startswith(piece):
            assert piece[:1] == b" " and data[place:].startswith(piece[1:]), (piece, data[place:])
            piece = piece[1:]
        place += len(piece)
        ranges.append((start, max(place, start + 1)))
    assert place == len(data), (text, pieces)
    return ranges


@functools.cache
def _byte_of() -> dict[str, int]:
    """GPT-2's character of a byte → the byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
