"""Options of data: the place of a data set, the meaning of its columns, the treatment of its rows."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import MinLen, Predicate

from convert.errors import shorten, shown
from fastjax.errors import ConfigError
from fastjax.options import checked, full_name
from fastjax.options.kinds import Positive, is_count_or_share

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


def check_columns(columns: Mapping[str, str] | None, where: str) -> None:
    """Raise ConfigError for an unknown meaning of a column.

    Args:
        columns: meaning → column name; None: none.
        where: the name of the setting, for errors.
    """
    for meaning in columns or {}:
        if meaning not in COLUMNS:
            raise ConfigError(f"{where}: {shorten(meaning, 80)}: unknown; expected some of {', '.join(COLUMNS)}")


@checked("data set")
class DataSource:
    """One data set, where data.train or data.eval lists sections."""

    path: Annotated[str, MinLen(1), "a file, a folder or a name on the hub"]
    """a file (.jsonl, .json, .parquet, .csv, compressed or not), several as a glob pattern, a folder, or any other name
    that `datasets.load_dataset` takes."""
    name: str | None = None
    """the data set's configuration, `load_dataset`'s second argument."""
    data_files: Annotated[list[str], MinLen(1)] | None = None
    """files of a folder or of a data set on the hub, by their names or glob patterns inside it; null: those of the
    split."""
    split: str | None = None
    """the part to read, slices included: "train", "train[:10%]"; null: "train"."""
    weight: Positive | None = None
    """share of this data set in the mixture's examples, relative to the other weights; null in all: every data set
    whole."""
    streaming: bool = False
    """read while training instead of before; needs training.max_steps."""
    columns: dict[str, str] | None = None
    """what the columns are called here, for instance {prompt: question, completion: answer}."""

    def __post_init__(self) -> None:
        check_columns(self.columns, full_name(self, "columns"))


@checked("data")
class DataOptions:
    """The treatment of data sets' rows: a run's section `data` without the data sets themselves."""

    val_set_size: (
        Annotated[int | float, Predicate(is_count_or_share), "a whole number from 1 or a share between 0 and 1"] | None
    ) = None
    """hold so many examples of the training data out, or a share of them below 1, of each data set its part, the same
    ones whatever training.seed is; null: none."""
    columns: dict[str, str] | None = None
    """names of the columns of data sets without their own: {prompt: question, completion: answer}."""
    mixture_ends: Exhaustion = "first_exhausted"
    """with weights: first_exhausted (an epoch ends before any example would be repeated; of the other data sets it has
    a random part) or all_exhausted (no example is left out; the others repeat). Streamed data have no epochs: a data
    set begins again at its own end, and the others go on."""
    chat_template: str | None = None
    """chatml, llama3, llama-3.1, mistral, gemma, gemma-3, qwen3, phi-4, alpaca, plain or another name, or a file with a
    Jinja template, which is saved with the tokenizer; prompt and completion then are a user's and an assistant's
    message. null: the tokenizer's own, for conversations only."""
    loss_on: LossOn = "responses"
    """the tokens to learn: the assistant's responses, its last_response, or all; or a list of roles whose messages are
    learnt, such as [assistant, tool]; or, for texts that hold conversations, {instruction_part: …, response_part: …},
    what begins an instruction and a response, of which what the responses say is learnt."""
    special_tokens: SpecialTokens = "control"
    """the reading of the tokenizer's special tokens in rows, such as <|im_end|> in a user's message: control (that
    token, as in transformers) or text (its letters; only the template writes control tokens). Rows that hold any are
    counted."""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables of the chat template in every conversation, such as {enable_thinking: false}; a row's own, in a column
    of this name, stand before them."""
    too_long: TooLong = "truncate"
    """the treatment of an example longer than max_seq_length: truncate (its beginning is kept), split (into pieces that
    do not see each other) or drop."""
    deduplicate: bool = False
    """leave out every example that an earlier one of these data sets equals, before any are held out."""
    packing: bool = True
    """put several documents into one row; false: one document a row, padded."""
    cache_dir: str | None = "~/.cache/fastjax/data"
    """folder of the prepared data, kept for the next run; null: none."""

    def __post_init__(self) -> None:
        check_columns(self.columns, full_name(self, "columns"))
        parts = self.loss_on
        if isinstance(parts, dict) and not (parts.keys() == set(PARTS) and all(parts.values())):
            raise ConfigError(f"data.loss_on: expected {' and '.join(PARTS)}, which are not empty, got {shown(parts)}")


NO_CACHE = DataOptions(cache_dir=None)
"""The options of data that are prepared each time."""
