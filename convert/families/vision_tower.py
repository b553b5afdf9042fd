"""Text models beside a vision tower, in the files and classes that transformers has had of them."""

import re

from convert.families.family import Family, Ignored, nested

_REASON = "of the vision tower; only text is trained"


def beside_a_tower(
    family: Family, model_type: str, *, modules: tuple[str, ...] = ("multi_modal_projector", "vision_tower")
) -> Family:
    """A family's models beside a vision tower.

    Args:
        family: The text model's.
        model_type: The whole model's.
        modules: The other parts, by their names in transformers.

    Returns:
        The family of checkpoints by the names of transformers' classes since 4.52; files on the Hub keep the earlier
        ones ("language_model.model.layers…"), which `others` has.
    """
    by_class = _named(family, model_type, {"model.": "model.language_model.", "lm_head": "lm_head"}, "model.", modules)
    starts = {"model.": "language_model.model.", "lm_head": "language_model.lm_head"}
    return _named(family, model_type, starts, "", modules, (by_class,))


def _named(
    family: Family,
    model_type: str,
    starts: dict[str, str],
    beside: str,
    modules: tuple[str, ...],
    others: tuple[Family, ...] = (),
) -> Family:
    """The whole model's family, with a checkpoint's names of its parts."""
    return nested(
        family,
        model_type=model_type,
        starts=starts,
        modules={"model.": "model.language_model."},
        ignored=tuple(Ignored(rf"{re.escape(beside)}{name}\..*", _REASON, copied=True) for name in modules),
        beside=tuple(f"model.{name}" for name in modules),
        others=others,
    )
