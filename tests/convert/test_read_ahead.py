"""Reading ahead: order, bounds, errors, and an end before the last."""

import functools
import threading

import pytest

from convert.read_ahead import read_ahead

SIZES = [3, 1, 4, 1, 5, 9, 2, 6]


def test_in_order_and_never_further_ahead_than_asked():
    begun, lock = [], threading.Lock()

    def read(number):
        with lock:
            begun.append(number)
        return number

    for ahead in (1, 5, 100):
        begun.clear()
        results = read_ahead(((size, functools.partial(read, n)) for n, size in enumerate(SIZES)), ahead)
        for taken, result in enumerate(results):
            assert result == taken
            with lock:
                most = max(begun)
            waiting = SIZES[taken + 1 : most + 1]
            assert sum(waiting) <= ahead or len(waiting) == 1, (ahead, taken, most)
        assert sorted(begun) == list(range(len(SIZES)))


def test_an_error_comes_in_its_turn_and_an_early_end_reads_no_more():
    begun = []

    def read(number):
        begun.append(number)
        if number == 2:
            raise OSError("cut short")
        return number

    reads = [(1, functools.partial(read, n)) for n in range(50)]
    results = read_ahead(reads, 4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="cut short"):
        next(results)
    assert max(begun) < 8

    begun.clear()
    results = read_ahead(reads[3:], 2)
    assert next(results) == 3
    results.close()
    assert max(begun) <= 6 and not [t for t in threading.enumerate() if t.name.startswith("read_")]
