"""Rows that people should know of: counted by kind, each with the place of the first."""

from collections.abc import Mapping, Sequence

from fastjax.data import left_out
from fastjax.data.records import PreferenceRecord, Record
from fastjax.data.settings import SpecialTokens

SPECIAL, JOINED, IDENTICAL = "special", "joined", "identical"

_UNWRITTEN = "the chat template does not write"
KINDS = {
    SPECIAL: "with special tokens in what they say",
    left_out.CONTENT: f"with content that {_UNWRITTEN}",
    left_out.REASONING: f"with reasoning that {_UNWRITTEN}",
    left_out.THOUGHTS: f"with thoughts in their content that {_UNWRITTEN}",
    left_out.TOOL_CALLS: f"with tool calls that {_UNWRITTEN}",
    left_out.TOOLS: f"with tools that {_UNWRITTEN}",
    left_out.DOCUMENTS: f"with documents that {_UNWRITTEN}",
    left_out.VARIABLES: "with chat_template_kwargs that the chat template does not read",
    IDENTICAL: "whose chosen and rejected answer are the same tokens, from which no preference is learnt",
    JOINED: "with an answer that begins within a token of its prompt, where generation has other tokens",
}
"""Kind → words that stand behind the number of rows."""

_READ_AS: dict[SpecialTokens, str] = {
    "control": ", which are read as control tokens; special_tokens: text reads them as text",
    "text": ", which are read as text",
}

Notes = dict[str, tuple[int, str]]
"""Kind → number of rows, and the place of the first."""


def add(
    notes: Notes, noted: Mapping[str, Sequence[int]], records: Sequence[Record] | Sequence[PreferenceRecord]
) -> list[str]:
    """Count further rows.

    Args:
        notes: Counts so far, which change.
        noted: Kind → indices of rows, ascending.
        records: The rows.

    Returns:
        Kinds that are new.
    """
    new = [kind for kind, rows in noted.items() if rows and kind not in notes]
    for kind, rows in noted.items():
        if rows:
            count, first = notes.get(kind) or (0, records[rows[0]].where)
            notes[kind] = count + len(rows), first
    return new


def say(kind: str, special_tokens: SpecialTokens) -> str:
    """The words for rows of a kind, to stand behind their number.

    Args:
        kind: One of the keys of `Notes`.
        special_tokens: The reading of special tokens in content.
    """
    return KINDS[kind] + (_READ_AS[special_tokens] if kind == SPECIAL else "")
