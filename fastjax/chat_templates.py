"""Unsloth's module of chat templates: its names."""

from fastjax.data.chat_templates import get_chat_template
from fastjax.data.example_template import apply_chat_template
from fastjax.data.sharegpt import standardize_data_formats, standardize_sharegpt, to_sharegpt
from fastjax.runs.sft import train_on_responses_only

__all__ = [
    "apply_chat_template",
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_sharegpt",
    "train_on_responses_only",
]
