"""The section `data`: training and held-out data."""

import dataclasses

from fastjax.data.settings import DataOptions, DataSource
from fastjax.errors import ConfigError
from fastjax.options import checked


@dataclasses.dataclass(frozen=True)
class _DataSets:
    train: str | list[str | DataSource]
    """a file, a folder, or a name that `datasets.load_dataset` takes; or a list of these, or of sections with path,
    name, data_files, split, weight, streaming and columns. Rows hold messages (with tools), conversations (ShareGPT),
    prompt and completion, instruction, input and output, text, or input_ids (with labels); with preferences.loss
    prompt, chosen and rejected, or prompt, completion and label. If one is streamed, all are."""
    eval: str | list[str | DataSource] | None = None
    """held-out data, named in the same way; null: none but those of val_set_size."""


@checked("data")
class DataSection(DataOptions, _DataSets):
    """Training and held-out data."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if self.deduplicate and any(source.streaming for source in self.sources("train")):
            raise ConfigError("data.deduplicate: expected false beside streaming: true in data.train, got true")
        if any(source.streaming for source in self.sources("eval")):
            raise ConfigError("data.eval: streaming: expected false, got true; held-out data are read whole")

    def sources(self, which: str) -> list[DataSource]:
        """The data sets of `train` or `eval`, each as a section."""
        given = getattr(self, which)
        listed = [] if given is None else [given] if isinstance(given, str) else list(given)
        try:
            return [DataSource(item) if isinstance(item, str) else item for item in listed]
        except ConfigError as error:
            raise ConfigError(f"data.{which}{str(error).removeprefix('data set.path')}") from error
