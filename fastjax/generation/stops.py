"""The tokens that end a model's answers."""

from convert.generation_config import end_tokens, named_ends
from fastjax.data import Encoder
from fastjax.execution.language_model import LanguageModel


def stop_tokens(model: LanguageModel, encoder: Encoder | None) -> tuple[int, ...]:
    """The ends that training learns, and those that the folder's generation_config.json names, as transformers stops.

    Args:
        model: whose folder is asked.
        encoder: of its tokenizer; None: of a model without one, for which its folder alone is asked.

    Returns:
        Token ids, each once.

    Raises:
        ConvertError: a generation_config.json that cannot be read.
    """
    if encoder is None:
        return () if model.folder is None else named_ends(model.folder)
    named = () if model.folder is None else end_tokens(model.folder)
    return tuple(dict.fromkeys([*encoder.stop_tokens(), *named]))
