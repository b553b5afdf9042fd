"""Generating text from a model."""

from fastjax.generation.engine import Engine
from fastjax.generation.engines import Engines
from fastjax.generation.generate import generate
from fastjax.generation.options import GenerationOptions

__all__ = ["Engine", "Engines", "GenerationOptions", "generate"]
