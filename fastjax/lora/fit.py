"""An adapter's folder opened for a model, which its settings and the shapes of its arrays fit. No JAX."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from convert.adapter_config import SCORED
from convert.adapters import Adapter, AdapterConfig, open_adapter
from convert.families.mapping import family_of, with_score
from convert.model.config import ModelConfig
from convert.model.paths import SCORE, WeightPath
from fastjax.data.tokenizer import own_tokenizer
from fastjax.errors import ConfigError
from fastjax.lora.settings import check_adapter
from fastjax.lora.sites import Shape, adapter_sites
from fastjax.lora.tables import adapter_rows, trained_tables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class OpenAdapter(NamedTuple):
    """An adapter before its arrays are read.

    Attributes:
        arrays: the open PEFT folder; None: its arrays are not on this machine.
        tokenizer: the folder's own; None: it has none.
    """

    arrays: Adapter | None
    tokenizer: "PreTrainedTokenizerFast | None"


def open_fitting(
    folder: Path,
    config: ModelConfig,
    new_token_ids: Sequence[int] = (),
    *,
    allow_nonfinite: bool = False,
) -> OpenAdapter:
    """Open the folder of an adapter that is for a model.

    Args:
        folder: PEFT's.
        config: the model's.
        new_token_ids: tokens whose rows must be trained.
        allow_nonfinite: let NaN and infinity through when arrays are read.

    Raises:
        ConvertError: what is wrong with the folder.
        ConfigError: it is not for this model (the first misfits named).
    """
    family = family_of(config)
    opened = open_adapter(folder, family=family, specs=config.specs, allow_nonfinite=allow_nonfinite)
    adapter, tokenizer = opened.config, own_tokenizer(folder)
    shapes = {path: opened.shape(path) for path in opened.tensors}
    rows = max(config.vocab_size, adapter_rows(adapter, shapes, tokenizer))
    config = dataclasses.replace(config, vocab_size=rows)
    if adapter.task_type == SCORED and f"{SCORE}.modules_to_save.weight" in shapes:
        config = with_score(config)  # the model's own head gives way to the adapter's
    check_adapter(adapter, config, new_token_ids, folder)
    check_shapes(adapter, config, shapes, folder)
    return OpenAdapter(opened, tokenizer)


def check_shapes(
    adapter: AdapterConfig, config: ModelConfig, shapes: Mapping[str, Shape], where: str | Path = "adapter"
) -> None:
    """Refuse missing and left-over arrays, and other shapes; frozen matrices beside adapters may be left.

    Args:
        adapter: PEFT's settings.
        config: the model's, with all rows that the adapter adds.
        shapes: path -> shape of its arrays, as `convert.adapters` names them.
        where: the adapter's folder, for messages.

    Raises:
        ConfigError: an adapter that does not fit (the first misfits named).
    """
    expected, spare = _expected(adapter, config, shapes)
    problems = [
        f"{path}: expected {list(shape)}, got {list(shapes[path]) if path in shapes else 'nothing'}"
        for path, shape in expected.items()
        if shapes.get(path) != shape
    ]
    left = map(WeightPath.parse, sorted(shapes.keys() - expected.keys() - spare))
    problems += [f"{path}: no module of this model takes it" for path in left if path.leaf != "base_layer.weight"]
    if problems:
        listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        base = adapter.base_model_name_or_path
        named = "" if base is None else f" (its settings name {base} as its base)"
        raise ConfigError(f"{where}: the adapter does not fit the model{named}: {listed}")


def _expected(
    adapter: AdapterConfig, config: ModelConfig, shapes: Mapping[str, Shape]
) -> tuple[dict[WeightPath, Shape], set[WeightPath]]:
    """The shapes of an adapter's arrays, and the paths of copies that PEFT writes and nothing takes."""
    expected: dict[WeightPath, Shape] = {}
    for site in adapter_sites(adapter, config):
        expected |= {site.path.with_leaf(leaf): shape for leaf, shape in site.shapes(adapter.use_dora).items()}
    spare: set[WeightPath] = set()
    for table in trained_tables(adapter, config):
        taken = table.stored(shapes)
        rows = 1 if taken.part == SCORE else config.vocab_size
        expected[taken] = (rows if table.ids is None else len(table.ids), config.hidden_size)
        spare |= {*table.paths} - {taken}  # PEFT writes one for the head of a tied table, too
    return expected, spare
