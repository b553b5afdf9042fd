"""Generating text from a model."""

from fastjax.generation.generate import generate

__all__ = ["generate"]
