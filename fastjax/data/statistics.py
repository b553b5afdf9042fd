"""What became of the examples on their way into rows: what was cut, what was left out, how full the rows are."""

from typing import NamedTuple

from fastjax.data.settings import SpecialTokens

READ_AS: dict[SpecialTokens, str] = {
    "control": "control tokens; special_tokens: text reads them as text",
    "text": "text",
}
"""What becomes of special tokens in content, for people."""


class DataStatistics(NamedTuple):
    """Counts over a whole data set.

    Attributes:
        examples: Examples read that an epoch has.
        documents: Documents that are trained on in an epoch.
        truncated: Examples of which tokens to learn were cut off because they are longer than a row.
        split: Examples that became several documents because they are longer than a row.
        dropped: Examples left out because they are longer than a row.
        no_targets: Examples left out because they have no token to learn (no response, or cut off before it).
        tokens: Tokens that go through the model in an epoch, padding not counted.
        target_tokens: Tokens learnt in an epoch.
        rows: Rows in an epoch.
        slots: Places for a token in these rows.
        special: Examples read whose content holds special tokens.
        first_special: Where the first of these is; empty: there is none.
        special_tokens: What these are read as.
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
    special: int = 0
    first_special: str = ""
    special_tokens: SpecialTokens = "control"

    @property
    def slots_filled(self) -> float:
        """The fraction of the slots that hold a token."""
        return self.tokens / self.slots if self.slots else 0.0

    def __str__(self) -> str:
        """One line for people."""
        parts = [
            f"{self.documents:,} {'documents' if self.split else 'examples'} in {self.rows:,} rows",
            f"{self.tokens:,} tokens, {self.target_tokens:,} of them learnt",
            f"{self.slots_filled:.1%} of the slots filled",
        ]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated")
        if self.split:
            parts.append(f"{self.split:,} too long, split")
        if self.dropped:
            parts.append(f"{self.dropped:,} too long, dropped")
        if self.no_targets:
            parts.append(f"{self.no_targets:,} left out: nothing to learn in them")
        if self.special:
            read_as = READ_AS[self.special_tokens]
            parts.append(
                f"{self.special:,} with special tokens in what they say, which are read as {read_as} (first: "
                f"{self.first_special})"
            )
        return "; ".join(parts)
