"""Generating text from a model.

Its names are imported when they are asked for: the options of an answer need no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.generation.engine import Engine as Engine
    from fastjax.generation.engines import Engines as Engines
    from fastjax.generation.options import GenerationOptions as GenerationOptions

_MODULE_OF = {"Engine": "engine", "Engines": "engines", "GenerationOptions": "options"}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
