"""The section `data`: training and held-out data."""

import dataclasses
from typing import Any

from fastjax.data.settings import DataSource, Exhaustion, LossOn, SpecialTokens, TooLong
from fastjax.errors import ConfigError
from fastjax.training.config.checks import check_section, expect


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Training and held-out data.

    Attributes:
        train: a file, a folder, or a name that `datasets.load_dataset` takes; or a list of these, or of sections with
            path, name, split, weight, streaming and columns. Rows hold messages (with tools), conversations (ShareGPT),
            prompt and completion, instruction, input and output, text, or input_ids (with labels); with
            preferences.loss prompt, chosen and rejected, or prompt, completion and label. If one is streamed, all are.
        eval: held-out data, named in the same way; null: none but those of val_set_size.
        val_set_size: hold so many examples of the training data out, or a share of them below 1, of each data set its
            part, the same ones whatever training.seed is; null: none.
        columns: names of the columns of data sets without their own: {prompt: question, completion: answer}.
        mixture_ends: with weights: first_exhausted (an epoch ends before any example would be repeated; of the other
            data sets it has a random part) or all_exhausted (no example is left out; the others repeat). Streamed data
            have no epochs: a data set begins again at its own end, and the others go on.
        chat_template: chatml, llama3, mistral, gemma, alpaca, plain, or a file with a Jinja template, which is saved
            with the tokenizer; prompt and completion then are a user's and an assistant's message. null: the
            tokenizer's own, for conversations only.
        loss_on: the tokens to learn: the assistant's responses, its last_response, or all; or a list of roles whose
            messages are learnt, such as [assistant, tool]; or, for texts that hold conversations, {instruction_part: …,
            response_part: …}, what begins an instruction and a response, of which what the responses say is learnt.
        special_tokens: the reading of the tokenizer's special tokens in rows, such as <|im_end|> in a user's message:
            control (that token, as in transformers) or text (its letters; only the template writes control tokens).
            Rows that hold any are counted.
        chat_template_kwargs: variables of the chat template in every conversation, such as {enable_thinking: false}; a
            row's own, in a column of this name, stand before them.
        too_long: the treatment of an example longer than max_seq_length: truncate (its beginning is kept), split (into
            pieces that do not see each other) or drop.
        packing: put several documents into one row; false: one document a row, padded.
        cache_dir: folder of the prepared data, kept for the next run; null: none.
    """

    train: str | list[str | DataSource]
    eval: str | list[str | DataSource] | None = None
    val_set_size: int | float | None = None
    columns: dict[str, str] | None = None
    mixture_ends: Exhaustion = "first_exhausted"
    chat_template: str | None = None
    loss_on: LossOn = "responses"
    special_tokens: SpecialTokens = "control"
    chat_template_kwargs: dict[str, Any] | None = None
    too_long: TooLong = "truncate"
    packing: bool = True
    cache_dir: str | None = "~/.cache/fastjax/data"

    def __post_init__(self) -> None:
        check_section("data", self)
        for which in ("train", "eval"):
            weights = [source.weight for source in self.sources(which)]
            given = [weight for weight in weights if weight is not None]
            if given and (len(given) < len(weights) or min(given) <= 0):
                raise ConfigError(
                    f"data.{which}: weight: expected a positive number in every data set or in none, got {weights}"
                )
        expect("data.loss_on", self.loss_on, self.loss_on != [], "with a role")
        if not self.sources("train"):
            raise ConfigError("data.train: expected at least one data set, got none")
        size = self.val_set_size
        fits = size is None or 0 < size < 1 or (size >= 1 and size == int(size))
        expect("data.val_set_size", size, fits, "that is a whole number from 1, or a share between 0 and 1")
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
