"""Names of Unsloth's for trainers, where its users import them from: `unsloth` and `unsloth.trainer`."""

from typing import Any

import fastjax
from fastjax.runs.sft import SFTConfig, SFTTrainer
from pallas_kernels import dispatch

UnslothTrainer = SFTTrainer
UnslothTrainingArguments = SFTConfig


def PatchDPOTrainer() -> None:  # noqa: N802 (Unsloth's name)
    """Do nothing: the trainers of preferences are what they are."""


def is_bfloat16_supported() -> bool:
    """Whether the device computes in bfloat16, which all do but GPUs before Ampere."""
    capability = dispatch.target().compute_capability
    return capability is None or capability >= (8, 0)


is_bf16_supported = is_bfloat16_supported


def __getattr__(name: str) -> Any:
    return getattr(fastjax, name)
