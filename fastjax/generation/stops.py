"""The tokens that end a model's answers."""

from convert.generation_config import end_tokens
from fastjax.data import Encoder
from fastjax.execution.language_model import LanguageModel


def stop_tokens(model: LanguageModel, encoder: Encoder) -> tuple[int, ...]:
    """The ends that training learns, and those that the folder's generation_config.json names, as transformers stops.

    Args:
        model: whose folder is asked.
        encoder: of its tokenizer.

    Returns:
        Token ids, at least one, each once.

    Raises:
        ConvertError: a generation_config.json that cannot be read.
    """
    named = () if model.folder is None else end_tokens(model.folder)
    return tuple(dict.fromkeys([*encoder.stop_tokens(), *named]))
