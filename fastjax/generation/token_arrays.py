"""Token ids as a tokenizer gives them, padded on either side, and ids of prompts with their answers in the same kind.

PyTorch is not imported: its tensors are known by their methods.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.generation.prompts import token_ids


class PromptRows(NamedTuple):
    """Prompts of a batch.

    Attributes:
        given: the ids as they were given, whose kind the result has.
        rows: each row's ids as they stand there, with its padding.
        prompts: each row's ids without padding.
    """

    given: Any
    rows: list[list[int]]
    prompts: list[list[int]]

    @property
    def width(self) -> int:
        """Tokens of the longest row, padding included."""
        return max(map(len, self.rows))


def are_token_ids(value: Any) -> bool:
    """Whether a value is a batch of token ids: an array, or a list of lists or arrays of numbers.

    Args:
        value: any.
    """
    if hasattr(value, "ndim"):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(token_ids(row) is not None for row in value)


def prompt_rows(input_ids: Any, attention_mask: Any = None, pad: int | None = None) -> PromptRows:
    """Read a batch of token ids.

    Args:
        input_ids: [B, S] of NumPy, JAX or PyTorch, or lists, then of any lengths.
        attention_mask: 1 at tokens, 0 at padding, in the shape of the ids; None: everything counts, but `pad`.
        pad: the pad token, if it is no end token too.

    Raises:
        ConfigError: another shape, no whole numbers, or a row of padding alone.
    """
    rows = _rows(input_ids, "input_ids")
    if attention_mask is None:
        masks = [[token != pad for token in row] for row in rows]
    else:
        masks = _rows(attention_mask, "attention_mask")
        sizes, found = ([len(row) for row in each] for each in (rows, masks))
        if sizes != found:
            raise ConfigError(
                f"attention_mask: expected the shape of input_ids, rows of {shown(sizes, 60)} tokens, got "
                f"{shown(found, 60)}"
            )
        if any(value not in (0, 1) for row in masks for value in row):
            raise ConfigError("attention_mask: expected 1 at tokens and 0 at padding, got other values")
    prompts = [[token for token, kept in zip(*each, strict=True) if kept] for each in zip(rows, masks, strict=True)]
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"input_ids[{place}]: expected at least one token, got none, or padding alone")
    return PromptRows(input_ids, rows, prompts)


def with_answers(prompts: PromptRows, answers: Sequence[Sequence[int]], pad: int) -> Int[Any, "N T"]:
    """Prompts with their answers behind them, [N, T] with N = answers and T the longest, in the kind of the prompts.

    Args:
        prompts: B rows, which keep their padding.
        answers: N ids, those of the first row before those of the second; N is a multiple of B.
        pad: the token behind those that are shorter than the longest.
    """
    each = len(answers) // len(prompts.rows)
    rows = [[*prompts.rows[place // each], *answer] for place, answer in enumerate(answers)]
    longest = max(map(len, rows))
    return like(prompts.given, np.asarray([row + [pad] * (longest - len(row)) for row in rows], np.int64))


def like(given: Any, ids: Int[np.ndarray, "..."]) -> Any:
    """Token ids in the kind of array, dtype and place of others.

    Args:
        given: of NumPy, JAX or PyTorch, or lists, for which NumPy's int64 arrays come back.
        ids: the ids.
    """
    if hasattr(given, "new_tensor"):
        return given.new_tensor(ids)
    if isinstance(given, jax.Array):
        return jnp.asarray(ids, given.dtype)
    return ids.astype(given.dtype).view(type(given)) if isinstance(given, np.ndarray) else ids


def on_host(ids: Any) -> Any:
    """Token ids in the host's memory, as streamers expect them.

    Args:
        ids: of any kind.
    """
    return np.asarray(ids) if isinstance(ids, jax.Array) else ids.cpu() if hasattr(ids, "cpu") else ids


def _rows(value: Any, name: str) -> list[list[int]]:
    """The rows of an array, or of lists."""
    given = value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, list | tuple) else None
    rows = given and [row.tolist() if hasattr(row, "tolist") else row for row in given]
    if not rows or not all(isinstance(row, list | tuple) for row in rows):
        shape = getattr(value, "shape", None)
        got = shown(value, 60) if shape is None else f"shape {tuple(shape)}"
        raise ConfigError(f"{name}: expected token ids [rows, tokens], got {got}")
    for place, row in enumerate(rows):
        for token in row:
            if not isinstance(token, int):
                raise ConfigError(f"{name}[{place}]: expected whole numbers, got {shown(token, 60)}")
    return [list(row) for row in rows]
