"""Model cards (README.md): of a merged folder its sources and the merge, of an adapter its base."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from convert.adapter_config import SCORED, AdapterConfig
from convert.adapters import Adapter
from convert.checkpoint import Checkpoint
from convert.trained_over import TrainedOver

#: By which an adapter's card is known as one that is written here.
_MARK = "A PEFT adapter by fastjax."
_SHOWN = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)
_SHOWN += ("layers_to_transform", "modules_to_save", "trainable_token_indices")


def write_card(
    folder: Path,
    base: Checkpoint,
    adapter: Adapter,
    *,
    dtype: str | None,
    base_in_nf4: bool,
    notes: Sequence[str],
    recipe: str | None,
) -> None:
    """Write README.md.

    Args:
        folder: The merged folder.
        base: The base model.
        adapter: The adapter.
        dtype: Requested dtype of the merged tensors; None for the base's.
        base_in_nf4: Whether the base was quantised first.
        notes: Sentences about the merge.
        recipe: The adapter's training, in Markdown.
    """
    named = adapter.config.base_model_name_or_path or base.config.get("_name_or_path") or base.folder.name
    quantization = base.config.get("quantization_config") or {}
    method = quantization.get("quant_method", "4 or 8 bits")
    kind = f"its {method} weights, decoded" if quantization else "its weights as they are stored"
    if base_in_nf4:
        kind = "its layers' matrices quantised to NF4 (nested scales) and decoded"
    revision = f", revision {adapter.config.revision}" if adapter.config.revision else ""
    settings = {name: getattr(adapter.config, name) for name in _SHOWN}
    shown = {name: value for name, value in settings.items() if value not in (None, False, {}, [])}
    lines = [
        *_front_matter(str(named), adapter.config, "transformers"),
        f"# {Path(str(named)).name}, fine-tuned",
        "",
        f"{Path(str(named)).name}{revision} with a LoRA adapter merged into it, in float32, by fastjax.",
        "",
        f"- Base: `{base.folder.name}`, {kind}.",
        f"- Stored as: {dtype or 'each tensor in the dtype of the base'}.",
        *(f"- {note[0].upper()}{note[1:]}." for note in notes),
        "",
        "## Adapter",
        "",
        "```json",
        json.dumps(shown, indent=2, ensure_ascii=False),
        "```",
    ]
    if recipe:
        lines += ["", "## Training", "", recipe.strip()]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_adapter_card(folder: Path, adapter: AdapterConfig, over: TrainedOver | None, place: Path) -> None:
    """Write an adapter's README.md, with the fields that PEFT's has, unless its final folder has one of another's.

    Args:
        folder: Where it is written.
        adapter: PEFT's settings.
        over: The base that it was trained over; None: not known.
        place: The final folder.
    """
    earlier = place / "README.md"
    if earlier.is_file() and _MARK not in earlier.read_text("utf-8", errors="replace"):
        return
    named = adapter.base_model_name_or_path or ""
    tags = ["tags:", *([f"- base_model:adapter:{named}"] if _is_name(named) else []), "- lora", "- transformers"]
    lines = [
        *_front_matter(named, adapter, "peft", tags),
        f"# {Path(named).name or 'An adapter'}, fine-tuned",
        "",
        f"{_MARK} Trained over {'a base that is not known' if over is None else f'`{over.told}`'}.",
    ]
    if over is not None and over.when_read:
        skip = f" --skip {' '.join(over.skipped)}" if over.skipped else ""
        lines += [
            "",
            f"It belongs to these values. To merge it into them: `fastjax convert merge {over.name} ADAPTER OUT "
            f"--base_in_nf4{skip}`",
        ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _front_matter(base: str, adapter: AdapterConfig, library: str, tags: Sequence[str] = ()) -> list[str]:
    task = "text-classification" if adapter.task_type == SCORED else "text-generation"
    named = [f"base_model: {base}"] if _is_name(base) else []
    return ["---", *named, f"library_name: {library}", f"pipeline_tag: {task}", *tags, "---", ""]


def _is_name(base: str) -> bool:
    """Whether a base is a name on the hub; a local folder tells others nothing."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()
