"""Text models beside a vision tower, in the files and classes that transformers has had of them."""

import re
from collections.abc import Mapping, Sequence

from convert.families.family import Family, Ignored, nested

_REASON = "of the vision tower; only text is trained"
_PARTS = ("multi_modal_projector", "vision_tower")


def by_class(family: Family, model_type: str, parts: Sequence[str] = _PARTS) -> Family:
    """A family's models beside a vision tower, by the names of transformers' classes since 4.52.

    Args:
        family: The text model's.
        model_type: The whole model's.
        parts: The other parts, by their names in transformers.
    """
    return _named(family, model_type, {"model.": "model.language_model.", "lm_head": "lm_head"}, "model.", parts)


def by_file(family: Family, model_type: str, parts: Sequence[str] = _PARTS) -> Family:
    """As `by_class`, and by the earlier names, which files on the Hub keep ("language_model.model.layers...").

    Args:
        family: The text model's.
        model_type: The whole model's.
        parts: The other parts, by their names in transformers.
    """
    starts = {"model.": "language_model.model.", "lm_head": "language_model.lm_head"}
    return _named(family, model_type, starts, "", parts, (by_class(family, model_type, parts),))


def _named(
    family: Family,
    model_type: str,
    starts: Mapping[str, str],
    beside: str,
    parts: Sequence[str],
    others: tuple[Family, ...] = (),
) -> Family:
    """The whole model's family, with a checkpoint's names of its parts."""
    return nested(
        family,
        model_type=model_type,
        starts=starts,
        modules={"model.": "model.language_model."},
        ignored=tuple(Ignored(rf"{re.escape(beside)}{part}\..*", _REASON, copied=True) for part in parts),
        beside=tuple(f"model.{part}" for part in parts),
        others=others,
    )
