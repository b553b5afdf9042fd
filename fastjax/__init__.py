"""Fast, lean fine-tuning of language models on NVIDIA GPUs in JAX.

`from fastjax import FastLanguageModel` is where a script starts. It is imported when it is asked for, so that what
needs no JAX (the command line's help, conversions) imports none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.language_model import FastLanguageModel, LanguageModel

__all__ = ["FastLanguageModel", "LanguageModel"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("fastjax.language_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
