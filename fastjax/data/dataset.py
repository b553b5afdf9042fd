"""A data set as rows, with its counts: examples cut and left out, tokens, the filling of the rows."""

from collections.abc import Mapping
from typing import NamedTuple

from fastjax.data import notes
from fastjax.data.packing import PackedRows
from fastjax.data.settings import SpecialTokens

_APART = (
    "answers in examples of their own, since the chat template rewrites them when messages follow (loss_on: "
    "last_response leaves them out)"
)
_ELSEWHERE = (
    "answers are learnt behind another text than generation's, since the chat template begins an answer otherwise there"
)


class DataStatistics(NamedTuple):
    """Counts over a whole data set.

    Attributes:
        examples: Examples of an epoch.
        documents: Documents of an epoch.
        truncated: Examples longer than a row that lost targets.
        split: Examples longer than a row that became several documents.
        dropped: Examples longer than a row that were left out.
        no_targets: Examples left out without a target (no response, or cut off before it).
        tokens: Input tokens of an epoch, without padding.
        target_tokens: Targets of an epoch.
        rows: Rows of an epoch.
        slots: Room for tokens in these rows.
        notes: Examples that people should know of: kind → number, and the place of the first.
        special_tokens: The reading of special tokens in content.
        apart: Examples more than rows of data, since the chat template rewrites earlier answers: one an answer.
        elsewhere: Answers that follow on another text than the generation prompt.
        desirable: The desirable answers of an epoch, where single answers have a label.
        undesirable: The others.
    """

    examples: int
    documents: int
    truncated: int
    split: int
    dropped: int
    no_targets: int
    tokens: int
    target_tokens: int
    rows: int
    slots: int
    notes: Mapping[str, tuple[int, str]] = {}
    special_tokens: SpecialTokens = "control"
    apart: int = 0
    elsewhere: int = 0
    desirable: int = 0
    undesirable: int = 0

    def __str__(self) -> str:
        """One line for people."""
        several = f" of {self.examples:,} examples" if self.documents > self.examples and not self.split else ""
        parts = [
            f"{self.documents:,} {'documents' if self.split or several else 'examples'}{several} in {self.rows:,} rows",
            f"{self.tokens:,} tokens, {self.target_tokens:,} of them learnt",
        ]
        counted = (
            (self.truncated, "truncated"),
            (self.split, "too long, split"),
            (self.dropped, "too long, dropped"),
            (self.no_targets, "left out: nothing to learn in them"),
            (self.apart, _APART),
            (self.elsewhere, _ELSEWHERE),
        )
        parts += [f"{count:,} {words}" for count, words in counted if count]
        for kind, (count, first) in self.notes.items():
            parts.append(f"{count:,} {notes.say(kind, self.special_tokens)} (first: {first})")
        if self.desirable or self.undesirable:
            parts.append(f"{self.desirable:,} answers desirable, {self.undesirable:,} undesirable")
            if not (self.desirable and self.undesirable):
                kind = "undesirable" if self.desirable else "desirable"
                parts[-1] += f": none is {kind}, and kto learns from the difference between the two kinds"
        return "; ".join(parts)


class Dataset(NamedTuple):
    """A data set ready for `Batches`.

    Attributes:
        rows: The rows.
        statistics: Counts of its examples and tokens.
        fingerprint: A checksum of the rows, independent of their origin.
        max_token_id: The largest token id, for which the model's embedding must have a row.
        from_cache: Whether an earlier run prepared it.
        now: The time that its chat template has told, in ISO 8601; None: none, or an earlier version did not keep it.
    """

    rows: PackedRows
    statistics: DataStatistics
    fingerprint: str
    max_token_id: int
    from_cache: bool = False
    now: str | None = None
