import numpy as np
import pytest

from fastjax.data.mixture import choose, next_source, split_off
from fastjax.errors import ConfigError


def test_without_weights_everything_once():
    assert [part.tolist() for part in choose([3, 2], [None, None], "first_exhausted", 0)] == [[0, 1, 2], [0, 1]]


def test_first_exhausted_repeats_nothing():
    large, small = choose([1000, 30], [3.0, 1.0], "first_exhausted", 5)
    assert small.tolist() == list(range(30))
    assert len(large) == 90 == len(np.unique(large)) and (np.diff(large) > 0).all()
    assert large.tolist() == choose([1000, 30], [3.0, 1.0], "first_exhausted", 5)[0].tolist()
    assert large.tolist() != choose([1000, 30], [3.0, 1.0], "first_exhausted", 6)[0].tolist()


def test_all_exhausted_leaves_nothing_out():
    large, small = choose([100, 30], [2.0, 1.0], "all_exhausted", 5)
    assert large.tolist() == list(range(100))
    assert len(small) == 50 and np.bincount(small).min() == 1 and np.bincount(small).max() == 2


@pytest.mark.parametrize("ends", ["first_exhausted", "all_exhausted"])
def test_shares_are_those_of_the_weights(ends):
    parts = choose([700, 900, 40], [0.5, 0.3, 0.2], ends, 0)
    np.testing.assert_allclose([len(part) / sum(map(len, parts)) for part in parts], [0.5, 0.3, 0.2], atol=0.005)


@pytest.mark.parametrize(
    ("held_out", "counts"), [(0.1, [10, 3, 0]), (13, [10, 3, 0]), (1, [1, 0, 0]), (131, [99, 30, 2])]
)
def test_of_each_data_set_its_part_is_held_out(held_out, counts):
    parts = split_off([99 + 1, 30, 2], held_out)
    assert [len(part) for part in parts] == counts
    assert all((np.diff(part) > 0).all() for part in parts)
    assert [part.tolist() for part in parts] == [part.tolist() for part in split_off([100, 30, 2], held_out)]


@pytest.mark.parametrize("held_out", [132, 0.001, 200])
def test_something_is_held_out_and_something_left(held_out):
    with pytest.raises(ConfigError, match="val_set_size: expected at least 1 and fewer than the 132 examples, got"):
        split_off([100, 30, 2], held_out)


def test_a_stream_keeps_the_shares_at_any_time():
    drawn, weights = [0, 0, 0], [5.0, 3.0, 2.0]
    for total in range(1, 200):
        drawn[next_source(weights, drawn)] += 1
        # Never a whole example away from its share.
        assert np.abs(np.array(drawn) - np.array(weights) / 10 * total).max() < 1
