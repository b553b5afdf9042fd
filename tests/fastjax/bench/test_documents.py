"""Lengths of documents, and rows packed of them."""

import math

import numpy as np
import pytest

from fastjax.bench.documents import chat_lengths, packed, read_lengths
from fastjax.errors import ConfigError


def test_lengths_are_those_of_the_file_or_log_normal(tmp_path):
    drawn = chat_lengths(2_000_000, 8192)
    assert np.median(drawn) == pytest.approx(math.exp(5.9), rel=0.05)
    assert min(drawn) >= 8 and max(drawn) <= 8192
    (tmp_path / "lengths.txt").write_text("3\n20\n32\n9\n")
    np.save(tmp_path / "lengths.npy", np.array([3, 20, 32, 9]))
    for name in ("lengths.txt", "lengths.npy"):
        assert read_lengths(tmp_path / name) == [3, 20, 32, 9]
    assert sorted(packed([3, 20, 40, 9], 2, 32)) == [(3, 20, 9), (32,)]


@pytest.mark.parametrize(
    "text, message", [("long\n", "a number a line"), ("", "at least 1"), ("3\n0.5\n", "at least 1")]
)
@pytest.mark.filterwarnings("ignore:.*input contained no data")
def test_other_lengths_are_refused(text, message, tmp_path):
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ConfigError, match=f"lengths.txt: expected .*{message}"):
        read_lengths(tmp_path / "lengths.txt")


def test_too_few_lengths_are_refused():
    with pytest.raises(ConfigError, match="expected documents for 3 rows of 32 tokens, got 12 tokens"):
        packed([5, 7], 3, 32)
