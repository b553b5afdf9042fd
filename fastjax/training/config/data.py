"""The section `data`: training and held-out data."""

import dataclasses
from typing import Annotated, Any

from annotated_types import Predicate

from fastjax.data.settings import DataSource, Exhaustion, LossOn, SpecialTokens, TooLong
from fastjax.errors import ConfigError
from fastjax.options import checked
from fastjax.options.kinds import is_count_or_share


@checked("data")
class DataSection:
    """Training and held-out data."""

    train: str | list[str | DataSource]
    """a file, a folder, or a name that `datasets.load_dataset` takes; or a list of these, or of sections with path,
    name, split, weight, streaming and columns. Rows hold messages (with tools), conversations (ShareGPT), prompt and
    completion, instruction, input and output, text, or input_ids (with labels); with preferences.loss prompt, chosen
    and rejected, or prompt, completion and label. If one is streamed, all are."""
    eval: str | list[str | DataSource] | None = None
    """held-out data, named in the same way; null: none but those of val_set_size."""
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
    """chatml, llama3, mistral, gemma, alpaca, plain, or a file with a Jinja template, which is saved with the
    tokenizer; prompt and completion then are a user's and an assistant's message. null: the tokenizer's own, for
    conversations only."""
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
    packing: bool = True
    """put several documents into one row; false: one document a row, padded."""
    cache_dir: str | None = "~/.cache/fastjax/data"
    """folder of the prepared data, kept for the next run; null: none."""

    def __post_init__(self) -> None:
        for which in ("train", "eval"):
            weights = [source.weight for source in self.sources(which)]
            given = [weight for weight in weights if weight is not None]
            if given and len(given) < len(weights):
                raise ConfigError(
                    f"data.{which}: weight: expected a positive number in every data set or in none, got {weights}"
                )
        if not self.sources("train"):
            raise ConfigError("data.train: expected at least one data set, got none")
        size = self.val_set_size
        if size is not None and (self.eval is not None or any(source.streaming for source in self.sources("train"))):
            beside = "data.eval" if self.eval is not None else "streaming: true in data.train"
            raise ConfigError(f"data.val_set_size: expected null beside {beside}, got {size}")
        if any(source.streaming for source in self.sources("eval")):
            raise ConfigError("data.eval: streaming: expected false, got true; held-out data are read whole")

    def sources(self, which: str) -> list[DataSource]:
        """The data sets of `train` or `eval`, each as a section, with the columns that hold for all."""
        given = getattr(self, which)
        listed = [] if given is None else [given] if isinstance(given, str) else list(given)
        sources = [DataSource(item) if isinstance(item, str) else item for item in listed]
        return [s if s.columns is not None else dataclasses.replace(s, columns=self.columns) for s in sources]
