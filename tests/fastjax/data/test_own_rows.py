"""The rows that one of several processes builds: its devices', with the values of the whole batch, and no others."""

import jax
import numpy as np
import pytest

from fastjax.data import Batches, Dataset, pack_documents
from fastjax.data.batches import Batch, OwnRows
from fastjax.data.documents import Documents
from fastjax.data.grouping import ByLength
from fastjax.data.packing import PackedRows
from fastjax.data.preferences import Answer, Role, pack_preferences
from fastjax.parallel import make_mesh
from fastjax.parallel.placing import own_rows
from fastjax.runs.training_run import of_process

ROW = 300


class Watched:
    """Tokens that know which of their documents were read.

    Attributes:
        starts: of the documents that were read.
    """

    def __init__(self, tokens):
        self.tokens, self.starts = tokens, []

    def __getitem__(self, part):
        self.starts.append(int(part.start))
        return self.tokens[part]


def plain(make_examples, packing):
    lengths = np.random.default_rng(0).integers(2, ROW, 45, endpoint=True).tolist()
    examples = make_examples([([n] * length, [0, *[1] * (length - 1)]) for n, length in enumerate(lengths, start=1)])
    return pack_documents(Documents.of(examples, ROW), ROW, packing=packing)


def pairs(make_examples):
    rng, roles = np.random.default_rng(0), (Role.CHOSEN, Role.REJECTED)
    return pack_preferences(
        [[Answer([n], rng.integers(1, 9, rng.integers(3, 90)).tolist(), role) for role in roles] for n in range(40)],
        ROW,
    )


KINDS = {
    "packed": (lambda examples: plain(examples, True), lambda rows: Batches(rows, 8, 2, seed=1)),
    "by length": (
        lambda examples: plain(examples, False),
        lambda rows: Batches(rows, 8, 2, seed=1, by_length=ByLength(rows.lengths)).shortened(100),
    ),
    "pairs": (pairs, lambda rows: Batches(rows, 8, 1, seed=1)),
}
#: Of two processes: the devices of each.
HALVES = (range(4), range(4, 8))
TURNS = (range(0, 8, 2), range(1, 8, 2))


@pytest.mark.parametrize(
    ("shape", "processes", "expected"),
    [
        ({"data": 4, "fsdp": 2}, HALVES, ([0, 1, 2, 3], [4, 5, 6, 7])),
        ({"data": 4, "fsdp": 2}, TURNS, ([0, 2, 4, 6], [1, 3, 5, 7])),
        ({"fsdp": 2, "tensor": 4}, HALVES, ([0, 1, 2, 3], [4, 5, 6, 7])),
        ({"data": 2, "context": 4}, TURNS, ([*range(8)], [*range(8)])),
        ({"context": 8}, HALVES, ([*range(8)], [*range(8)])),
    ],
)
def test_the_rows_of_a_process_are_those_of_its_devices(shape, processes, expected):
    mesh, devices = make_mesh(**shape), np.array(jax.devices())
    assert [own_rows(mesh, 8, devices[list(own)]).tolist() for own in processes] == [*expected]
    assert own_rows(mesh, 8).tolist() == [*range(8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [[0, 1, 2, 3], [4, 5, 6, 7], [1, 6]], ids=str)
def test_a_process_builds_its_rows_alone(make_examples, kind, own):
    pack, batches = KINDS[kind]
    rows = pack(make_examples)
    whole = batches(rows)
    tokens, targets = Watched(rows.documents.tokens), Watched(rows.documents.targets)
    watched = Documents(tokens, targets, *tuple(rows.documents)[2:])
    part = batches(OwnRows.of(PackedRows(watched, *tuple(rows)[1:]), np.array(own), 8))
    others = [place for place in range(8) if place not in own]
    steps = range(2 * whole.steps_per_epoch)  # with rows of padding, and another order
    for step, found, expected in zip(steps, part.from_step(0), whole.from_step(0), strict=False):
        assert isinstance(found, Batch)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(one[:, own], other[:, own])
        np.testing.assert_array_equal(found.segment_ids, expected.segment_ids)  # of which a step's tokens are counted
        assert not any(array[:, others].any() for array in (found.tokens, found.targets, found.positions))
        members = [n for row in whole.row_numbers(step)[:, own].ravel() for n in rows.members(int(row))]
        assert tokens.starts == targets.starts == rows.documents.offsets[members].tolist()
        tokens.starts.clear()
        targets.starts.clear()
    np.testing.assert_array_equal(part.row_numbers(1), whole.row_numbers(1))
    assert part.describe_rows(np.arange(3)) == whole.describe_rows(np.arange(3))


def test_a_run_builds_the_rows_of_its_devices(make_examples, monkeypatch):
    data = Dataset(plain(make_examples, True), None, "rows", 9)
    mesh, devices = make_mesh(2, 4), jax.devices()
    assert of_process(data, None, 8) is of_process(data, mesh, 8) is data
    monkeypatch.setattr(jax, "local_devices", lambda: devices[4:])
    rows = of_process(data, mesh, 16).rows
    assert isinstance(rows, OwnRows) and (rows.own.tolist(), rows.batch_size) == ([*range(8, 16)], 16)
