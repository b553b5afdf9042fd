import threading
import time

import pytest

from fastjax.data import Prefetched


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "fastjax-prefetch"]


def test_values_come_in_order_from_the_thread():
    names = []
    values = ((names.append(threading.current_thread().name), value)[1] for value in range(50))
    assert list(Prefetched(values, 3)) == list(range(50))
    assert set(names) == {"fastjax-prefetch"} and not alive()


def test_it_runs_ahead_by_its_depth_and_no_further():
    made = []
    values = Prefetched((made.append(n) or n for n in range(100)), depth=3)
    assert next(values) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # one taken, three ready, one in the making
    values.close()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closed_early_it_leaves_no_thread_and_closes_the_iterator(taken):
    closed = []

    def endless():
        try:
            n = 0
            while True:
                yield n
                n += 1
        finally:
            closed.append(threading.current_thread().name)

    with Prefetched(endless(), depth=2) as values:
        for n in range(taken):
            assert next(values) == n
        while not values._queue.full():
            time.sleep(0.001)
    assert not alive() and closed == ["fastjax-prefetch"]
    with pytest.raises(StopIteration):
        next(values)


def test_an_exception_comes_in_its_turn():
    def failing():
        yield 1
        yield 2
        raise KeyError("broken")

    values = Prefetched(failing(), 4)
    assert [next(values), next(values)] == [1, 2]
    with pytest.raises(KeyError, match="broken"):
        next(values)
    with pytest.raises(StopIteration):
        next(values)
    assert not alive()
