"""A language model as one value, and `FastLanguageModel`, the entry points with Unsloth's names, which give handles."""

from fastjax.execution.language_model import LanguageModel
from fastjax.language_model.handle import ModelHandle
from fastjax.language_model.loading import FastLanguageModel

__all__ = ["FastLanguageModel", "LanguageModel", "ModelHandle"]
