"""The loop's decisions: a table of cases, and the judgement of evaluations."""

import pytest

from fastjax.training.cadence import Actions, Cadence, Progress, interval

GO_ON, LOOK = Actions(), Actions(evaluate=True)
SAVE = Actions(log=True, save=True)
FINISHED, PATIENCE = Actions(log=True, stop="finished"), Actions(log=True, stop="patience")


def best(step, at=None, waited=0):
    return Progress(step, 1.0, step if at is None else at, waited)


@pytest.mark.parametrize(
    ("cadence", "progress", "options", "expected"),
    [
        (Cadence(9, True), Progress(3), {}, GO_ON),
        (Cadence(9, True, evaluate=2), Progress(3), {}, GO_ON),
        (Cadence(9, True, evaluate=2), Progress(4), {}, LOOK),
        (Cadence(9, True, evaluate=2), Progress(4), {"evaluated": True}, GO_ON),
        (Cadence(9, evaluate=2), Progress(4), {}, GO_ON),
        (Cadence(9, True, save=3), Progress(3), {}, SAVE),
        (Cadence(9, True, save=3), Progress(4), {}, GO_ON),
        (Cadence(9, True, evaluate=4, save=4), Progress(4), {}, LOOK),
        (Cadence(9, True, evaluate=4, save=4), best(4, at=2, waited=1), {"evaluated": True}, SAVE),
        # the best
        (Cadence(9, True, evaluate=2, save_best=True), best(4), {"evaluated": True}, SAVE),
        (Cadence(9, True, evaluate=2, save_best=True), best(4, at=2, waited=1), {"evaluated": True}, GO_ON),
        (Cadence(9, True, evaluate=2), best(4), {"evaluated": True}, GO_ON),
        # the last step: 9
        (Cadence(9, True), Progress(9), {}, LOOK),
        (Cadence(9), Progress(9), {}, FINISHED),
        (Cadence(9, save=5), Progress(9), {}, Actions(log=True, save=True, stop="finished")),
        (Cadence(9, True, save=5), best(9), {"evaluated": True}, Actions(log=True, save=True, stop="finished")),
        (Cadence(9, True, save_best=True), best(9), {"evaluated": True}, Actions(log=True, save=True, stop="finished")),
        (Cadence(9), Progress(9), {"signalled": True}, FINISHED),
        (
            Cadence(9, True, patience=1),
            best(9, at=2, waited=3),
            {"evaluated": True},
            FINISHED,
        ),
        # patience
        (Cadence(9, True, patience=2), best(4, at=2, waited=1), {"evaluated": True}, GO_ON),
        (
            Cadence(9, True, patience=2),
            best(4, at=2, waited=2),
            {"evaluated": True},
            PATIENCE,
        ),
        (Cadence(9, True, patience=2), best(4, at=2, waited=2), {}, PATIENCE),
        (
            Cadence(9, True, save=5, patience=2),
            best(4, at=2, waited=2),
            {"evaluated": True, "signalled": True},
            Actions(log=True, save=True, stop="patience"),
        ),
        # a signal
        (Cadence(9, True), Progress(4), {"signalled": True}, Actions(log=True, save=True, stop="signal")),
        (Cadence(9, True, evaluate=2), Progress(4), {"signalled": True}, LOOK),
        (
            Cadence(9, True, evaluate=2),
            best(4),
            {"evaluated": True, "signalled": True},
            Actions(log=True, save=True, stop="signal"),
        ),
    ],
)
def test_after_a_step_of_nine(cadence, progress, options, expected):
    assert cadence.after(progress, **options) == expected


@pytest.mark.parametrize(
    ("every", "steps"),
    [(None, None), (7, 7), (7.0, 7), ("epoch", 12), (0.1, 3), (0.25, 7), (0.001, 1), (0.99, 25)],
)
def test_intervals_in_a_run_of_25_steps(every, steps):
    assert interval(every, 25, 12) == steps


def test_an_evaluation_is_better_by_more_than_the_threshold():
    cadence = Cadence(9, True, threshold=0.1)
    first = cadence.judged(Progress(2, seconds=7.0), 3.0)
    assert first == Progress(2, 3.0, 2, 0, 7.0)
    worse = cadence.judged(first._replace(step=4), 2.95)
    assert worse == Progress(4, 3.0, 2, 1, 7.0)
    assert cadence.judged(worse._replace(step=6), 2.85) == Progress(6, 2.85, 6, 0, 7.0)
    assert cadence.judged(worse._replace(step=6), float("nan")) == Progress(6, 3.0, 2, 2, 7.0)
    unknown = cadence.judged(Progress(2), float("nan"))
    assert cadence.judged(unknown._replace(step=4), 9.0) == Progress(4, 9.0, 4, 0), "any number is better than none"


def test_patience_may_be_at_its_end_before_a_step():
    assert Cadence(9, True, patience=2).exhausted(best(4, at=2, waited=2))
    assert not Cadence(9, True, patience=3).exhausted(best(4, at=2, waited=2))
    assert not Cadence(9, True).exhausted(best(4, at=2, waited=99))
