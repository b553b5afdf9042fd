"""Settings of a data set: its place, the meaning of its columns, the treatment of its rows."""

from typing import Annotated, Literal

from annotated_types import Interval, MinLen

from fastjax.options import checked

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Role of a message."""

LossOn = Literal["responses", "last_response", "all"] | Annotated[list[Role], MinLen(1)] | dict[str, str]
"""Target tokens: the assistant's answers, only its last one, every token, or the messages of some roles; of plain texts
that hold rendered conversations what follows `response_part` up to the next `instruction_part` (`PARTS`)."""

PARTS = "instruction_part", "response_part"
"""Keys of a `loss_on` for plain texts: the texts that begin an instruction and a response, with Unsloth's names."""

TooLong = Literal["truncate", "split", "drop"]
"""Treatment of an example longer than a row."""

SpecialTokens = Literal["control", "text"]
"""Reading of a special token in a row's content: as the token, or as its text."""

Exhaustion = Literal["first_exhausted", "all_exhausted"]
"""End of a mixture: before any data set repeats, or once each is used up."""

Pairing = Literal["paired", "unpaired", "ranked"]
"""Preferences in pairs of a chosen and a rejected answer; as single answers with a label; or in pairs that may have a
margin and keep each answer's last token, where a score is read."""

COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "tools"),
    *("chosen", "rejected", "label", "margin", "system", "history", "chat_template_kwargs", "documents"),
    *("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "position_ids", "seq_lengths"),
)
"""Meanings of columns, each the default name of its column."""


@checked("data set")
class DataSource:
    """One data set, where data.train or data.eval lists sections."""

    path: str
    """a file (.jsonl, .json, .parquet, .csv, compressed or not), several as a glob pattern, a folder, or any other name
    that `datasets.load_dataset` takes."""
    name: str | None = None
    """the data set's configuration, `load_dataset`'s second argument."""
    split: str | None = None
    """the part to read, slices included: "train", "train[:10%]"; null: "train"."""
    weight: Annotated[float, Interval(gt=0)] | None = None
    """share of this data set in the mixture's examples, relative to the other weights; null in all: every data set
    whole."""
    streaming: bool = False
    """read while training instead of before; needs training.max_steps."""
    columns: dict[str, str] | None = None
    """what the columns are called here, for instance {prompt: question, completion: answer}."""
