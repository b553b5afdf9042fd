"""How a data set is described: where it is, which of its columns mean what, and what is done with its rows."""

import dataclasses
from typing import Literal

LossOn = Literal["responses", "last_response", "all"]
"""Which tokens are learnt: what the assistant says, only its last answer, or every token."""

TooLong = Literal["truncate", "split", "drop"]
"""What becomes of an example longer than a row."""

SpecialTokens = Literal["control", "text"]
"""What a special token in a row's content is read as: the token, or the text that it looks like."""

Exhaustion = Literal["first_exhausted", "all_exhausted"]
"""When a mixture ends: before any data set would repeat itself, or after each has been used up."""

COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "tools")
"""What a column can mean; a column of that name means it without being told."""


@dataclasses.dataclass(frozen=True)
class DataSource:
    """One data set.

    Attributes:
        path: a file (.jsonl, .json, .parquet, .csv, compressed or not), several as a glob pattern, a folder, or any
            other name that `datasets.load_dataset` takes.
        name: the data set's configuration, `load_dataset`'s second argument.
        split: the part to read, slices included: "train", "train[:10%]"; null: "train".
        weight: share of this data set in the mixture's examples, relative to the other weights; null in all: every data
            set whole.
        streaming: read while training instead of before; needs training.max_steps.
        columns: what the columns are called here, for instance {prompt: question, completion: answer}.
    """

    path: str
    name: str | None = None
    split: str | None = None
    weight: float | None = None
    streaming: bool = False
    columns: dict[str, str] | None = None
