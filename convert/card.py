"""The model card (README.md) of a merged folder: its sources and the merge."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from convert.adapter_config import SCORED
from convert.adapters import Adapter
from convert.checkpoint import Checkpoint

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
    kept = {name: value for name, value in settings.items() if value not in (None, False, {}, [])}
    lines = [
        "---",
        *([f"base_model: {named}"] if _is_name(str(named)) else []),
        "library_name: transformers",
        f"pipeline_tag: {'text-classification' if adapter.config.task_type == SCORED else 'text-generation'}",
        "---",
        "",
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
        json.dumps(kept, indent=2, ensure_ascii=False),
        "```",
    ]
    if recipe:
        lines += ["", "## Training", "", recipe.strip()]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_name(base: str) -> bool:
    """Whether a base is a name on the hub; a local folder tells others nothing."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()
