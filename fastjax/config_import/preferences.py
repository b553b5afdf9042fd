"""What the tools' runs over preferences share: lengths of answers, dropout, the columns of pairs."""

from collections.abc import Mapping
from typing import Any

from fastjax.config_import.job import Job

#: The losses that the tools have too, by their names here.
LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")
NO_RL = "there is no PPO or GRPO; preferences.loss has dpo, ipo, kto, orpo and simpo"
REFERENCE = "the reference is the model as training begins: without a fresh adapter"
OTHER = "of another loss, or of none"
ONE_TEMPLATE = "all rows of a run go through one chat template"
SYSTEM = "a column of system messages is not read: put each into its prompt, as messages"
PAIR = {"chosen": "chosen", "rejected": "rejected"}


def carry_loss(job: Job, key: str, loss: str, arguments: Mapping[str, tuple[str, float | None]]) -> None:
    """Carry a loss over.

    Args:
        job: the import.
        key: of the loss.
        loss: its name here.
        arguments: setting → the tool's key, and its default; None: the setting's own.
    """
    job.carry(key, "preferences.loss", loss)
    for setting, (own, default) in arguments.items():
        value = job.number(own, default)
        if value is not None:
            job.carry(own, f"preferences.{setting}", value)


def spelling(job: Job, key: str, role: Any, content: Any, others: Mapping[str, Any]) -> str:
    """The meaning of a column of messages by the names of their parts; other names are refused."""
    meaning = {("role", "content"): "messages", ("from", "value"): "conversations"}.get((str(role), str(content)))
    if meaning is None or any(name != value for name, value in others.items()):
        job.refused[key] = "messages have role and content, or from and value"
    return meaning or "messages"


def answer_length(job: Job, key: str, default: int, note: str = "") -> None:
    """Carry the longest answer over, with its prompt; a row has room for two of them."""
    length = job.integer(key, default)
    job.carry(key, "preferences.max_length", length, note)
    job.carry(key, "model.max_seq_length", 2 * length, "a row has both answers of a pair, each with its prompt")


def no_dropout(job: Job, key: str) -> None:
    """Account for an adapter's dropout, which the tools' trainers of preferences switch off."""
    if job.number(key) is not None:
        job.not_needed[key] = f"{job.tool.name} trains on preferences without dropout"


def wants(job: Job, key: str, value: Any, only: Any, why: str) -> None:
    """Refuse a value, unless it is absent, off or the one that there is."""
    if value and value != only:
        job.refused[key] = why
    elif value is not None:
        job.not_needed[key] = "so it is here"
