"""The loop over a toy step: what it reports, saves and evaluates, that it reads a step behind, how it ends."""

import signal
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.training.cadence import Cadence, Progress
from fastjax.training.checkpoint import SaveFailed
from fastjax.training.evaluation import AHEAD, run_evaluation
from fastjax.training.health import GradientCheck
from fastjax.training.loop import LoopState, Observer, fit, sent_ahead
from fastjax.training.loss import LossSums
from fastjax.training.metrics import Evaluation, Throughput
from fastjax.training.observers import Evaluating, Finite, Metrics, Saving, SinkWriter, Startup
from fastjax.training.signals import StopSignals


class State(NamedTuple):
    step: int
    trainable: int
    halted: bool = False


class RowList(list):
    """A sink that keeps what it is given."""

    def write(self, row):
        self.append(dict(row))

    def close(self):
        pass

    def events(self):
        return [(row["step"], row["event"]) for row in self if "event" in row]


class FakeCheckpoints:
    """Checkpoints in a list; those of the steps in `failing` do not get there, which a slow one says late."""

    folder = "checkpoints"

    def __init__(self, failing=(), slow=False):
        self.states, self.failing, self.slow, self.pending, self.asked = {}, failing, slow, None, []

    def save(self, state, progress):
        self.wait()
        self.asked.append(progress.step)
        self.pending = progress.step
        if progress.step not in self.failing:
            self.states[progress.step] = state, progress

    def begin(self):
        pass

    def wait(self):
        step, self.pending = self.pending, None
        if step in self.failing:
            raise SaveFailed(f"no room for {step}")
        return step

    def poll(self):
        return None if self.slow else self.wait()


def batch(tokens: int = 6) -> Batch:
    segments = np.zeros((1, 2, 4), np.int32)
    segments.flat[:tokens] = 1
    return Batch(segments, segments, segments, segments)


def toy_step(log=None, bad=(), scale=None, norms=(1.0,), forward=True):
    """`bad` steps are not finite, their loss neither unless `forward` is False."""

    def step(state, batch):
        number = state.step + 1
        if log is not None:
            log.append(("dispatch", number))
        finite = number not in bad and not state.halted
        metrics = {
            "loss": jnp.float32(10.0 / number if finite or not forward else float("nan")),
            "num_targets": jnp.int32(8),
            "num_correct": jnp.int32(2),
            "grad_norm": jnp.float32(0.5),
            "squared_norms": jnp.asarray(norms, jnp.float32),
            "finite": jnp.asarray(finite),
            "learning_rate": jnp.float32(0.1 * (1 + state.trainable)),
        }
        if scale is not None:
            metrics |= {"loss_scale": jnp.float32(scale), "skipped_steps": jnp.int32(sum(b <= number for b in bad))}
        halted = state.halted or (not finite and (forward or scale in (None, 1.0)))
        return State(number, state.trainable + finite, halted), metrics

    return step


class Watching(Observer):
    """Keeps what is waited for."""

    def __init__(self, watched):
        self.watched = watched

    def waits(self, what, usual=None):
        self.watched.append(what)


def run(
    steps,
    step=None,
    *,
    batches=None,
    start=None,
    rows=None,
    startup=None,
    evaluate=None,
    checkpoints=None,
    explain=None,
    cadence=None,
    others=(),
):
    start, rows = start or Progress(), RowList() if rows is None else rows
    batches = [batch()] * (steps - start.step) if batches is None else batches
    saving = None if checkpoints is None else Saving(checkpoints, start.step)
    metrics = Metrics(Throughput(steps), startup)
    found = [SinkWriter([rows]), metrics, Finite(saving, explain), *others, evaluate and Evaluating(evaluate), saving]
    cadence = (cadence or Cadence(steps))._replace(total=steps, held_out=evaluate is not None)
    with sent_ahead(batches) as ready:
        reached = LoopState(State(start.step, start.step), start)
        return fit(step or toy_step(), reached, ready, cadence, [one for one in found if one]), rows


def test_one_row_a_step():
    fitted, rows = run(3)
    assert fitted.state == State(3, 3)
    assert fitted.complete and fitted.evaluation is None and fitted.progress.step == 3
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == pytest.approx([10, 5, 10 / 3])
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1, 0.2, 0.3])
    assert {row["token_accuracy"] for row in rows} == {0.25}
    assert {row["num_tokens"] for row in rows} == {6}
    assert rows[0]["tokens_per_second"] is None  # the first step compiles
    assert rows[2]["tokens_per_second"] > 0
    assert rows[2]["seconds_left"] == 0


def test_reads_a_step_while_the_next_one_runs():
    log = []

    class Log(RowList):
        def write(self, row):
            log.append(("report", row["step"]))

    run(3, toy_step(log), rows=Log())
    expected = [("dispatch", 1), ("dispatch", 2), ("report", 1), ("dispatch", 3), ("report", 2), ("report", 3)]
    assert log == expected


def test_the_start_is_told_once_with_its_seconds():
    toy = toy_step()

    def slow(state, batch):
        if state.step == 0:
            time.sleep(0.2)  # compiling
        return toy(state, batch)

    _, rows = run(3, slow, startup=Startup(3.0))
    assert rows.events() == [(1, "started")]
    told = rows[1]
    assert told["load_seconds"] == 3.0
    assert told["compile_seconds"] >= 0.2 > told["first_step_seconds"] >= 0
    assert told["message"].startswith("started: the model loaded in 3.0 s, the train step for rows of")


def test_evaluates_every_few_steps_and_at_the_end():
    seen = []

    def evaluate(trainable):
        seen.append(trainable)
        return Evaluation(1.0, 0.5, 10, {"eval_exact": 0.25})

    fitted, rows = run(5, evaluate=evaluate, cadence=Cadence(0, evaluate=2))
    assert seen == [2, 4, 5]
    assert fitted.evaluation is not None and fitted.evaluation.loss == 1.0
    kinds = [(row["step"], "loss" in row) for row in rows]
    assert kinds == [(1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True), (5, False)]
    assert rows[2] == {
        "step": 2,
        "eval_loss": 1.0,
        "eval_perplexity": pytest.approx(np.e),
        "eval_token_accuracy": 0.5,
        "eval_num_targets": 10,
        "eval_exact": 0.25,
    }
    assert run(4, evaluate=evaluate, cadence=Cadence(0, evaluate=2))[1][-1]["step"] == 4
    assert seen == [2, 4, 5, 2, 4]  # a last step that was evaluated already is not evaluated again


def losses(*values):
    found = iter(values)
    return lambda trainable: Evaluation(next(found), 0.5, 10)


def test_saves_every_few_steps_at_the_end_and_at_the_best():
    saves = FakeCheckpoints()
    cadence = Cadence(0, evaluate=2, save=3, save_best=True)
    fitted, rows = run(7, evaluate=losses(3.0, 2.0, 2.5, 2.4), cadence=cadence, checkpoints=saves)
    assert {step: state.step for step, (state, _) in saves.states.items()} == {2: 2, 3: 3, 4: 4, 6: 6, 7: 7}
    assert saves.states[6][1][:4] == (6, 2.0, 4, 1)
    assert fitted.progress[:4] == (7, 2.0, 4, 2)
    assert rows.events() == [(step, "saved") for step in (2, 3, 4, 6, 7)]


def test_goes_on_where_it_stood():
    start = Progress(2, best_loss=1.0, best_step=2, evaluations_since_best=1, seconds=50.0)
    fitted, rows = run(4, start=start, evaluate=losses(1.5), cadence=Cadence(0, evaluate=4))
    assert [row["step"] for row in rows] == [3, 4, 4]
    assert fitted.progress[:4] == (4, 1.0, 2, 2)
    fitted, rows = run(2, start=Progress(2))
    assert rows == [] and fitted.complete


def test_patience():
    cadence = Cadence(0, evaluate=1, patience=2, threshold=0.1)
    fitted, rows = run(9, evaluate=losses(3.0, 2.0, 1.95, 1.92), cadence=cadence, checkpoints=FakeCheckpoints())
    assert fitted.complete and fitted.progress[:4] == (4, 2.0, 2, 2)
    assert rows.events() == [(4, "early_stop")]
    saves = FakeCheckpoints()
    run(9, evaluate=losses(3.0, 4.0, 4.0), cadence=Cadence(0, evaluate=1, patience=2, save=5), checkpoints=saves)
    assert list(saves.states) == [3]


def test_a_run_whose_patience_was_at_its_end_takes_no_step_when_it_goes_on():
    start = Progress(4, best_loss=2.0, best_step=2, evaluations_since_best=2)
    saves, cadence = FakeCheckpoints(), Cadence(0, evaluate=1, patience=2, save=1)
    fitted, rows = run(9, start=start, evaluate=losses(), cadence=cadence, checkpoints=saves)
    assert fitted == (State(4, 4), start, None, True)
    assert rows == [] and saves.asked == []
    fitted, rows = run(9, start=start, evaluate=losses(2.5), cadence=cadence._replace(patience=3))
    assert fitted.progress.step == 5 and rows.events() == [(5, "early_stop")]


def test_a_run_that_patience_ends_was_not_interrupted():
    stop = StopSignals()
    stop.received = signal.SIGTERM
    cadence = Cadence(0, evaluate=1, patience=1, save=5)
    start = Progress(1, best_loss=1.0, best_step=1)
    fitted, rows = run(
        9, start=start, evaluate=losses(2.0), cadence=cadence, checkpoints=FakeCheckpoints({2}), others=[stop]
    )
    assert fitted.complete and rows.events() == [(2, "early_stop"), (2, "save_failed")]


def test_a_save_that_fails_is_told_and_the_run_goes_on():
    saves = FakeCheckpoints(failing={2})
    fitted, rows = run(4, cadence=Cadence(0, save=1), checkpoints=saves)
    assert fitted.complete and list(saves.states) == [1, 3, 4]
    assert rows.events() == [(1, "saved"), (2, "save_failed"), (3, "saved"), (4, "saved")]
    assert "no room for 2" in [row["message"] for row in rows if row.get("event") == "save_failed"]


def test_a_save_that_fails_does_not_keep_the_next_one_from_being_tried():
    saves = FakeCheckpoints(failing={1}, slow=True)
    fitted, rows = run(3, cadence=Cadence(0, save=1), checkpoints=saves)
    assert fitted.complete and list(saves.states) == [2, 3]
    assert rows.events() == [(2, "save_failed"), (2, "saved"), (3, "saved")]
    stop, saves = StopSignals(), FakeCheckpoints(failing={2}, slow=True)

    class Signalling(RowList):
        def write(self, row):
            super().write(row)
            if row["step"] == 2:
                stop.received = signal.SIGTERM

    fitted, rows = run(9, rows=Signalling(), cadence=Cadence(0, save=2), checkpoints=saves, others=[stop])
    assert not fitted.complete and list(saves.states) == [fitted.progress.step]
    assert rows.events() == [(3, "save_failed"), (3, "saved")]


def test_evaluations_and_saves_are_waited_for_by_name():
    watched, seen = [], []

    class Watched(FakeCheckpoints):
        def save(self, state, progress):
            super().save(state, progress)
            seen.append(watched[-1])

        def wait(self):
            if self.pending is not None:
                seen.append(watched[-1])
            return super().wait()

    def evaluate(trainable):
        seen.append(watched[-1])
        return Evaluation(1.0, 0.5, 10)

    cadence, saves = Cadence(0, evaluate=2, save=2), Watched(slow=True)
    run(4, evaluate=evaluate, cadence=cadence, checkpoints=saves, others=[Watching(watched)])
    second, fourth = ("the evaluation after step {}", "the checkpoint of step {}"), "the checkpoint of step 4"
    assert seen == [text.format(2) for text in second] + [second[0].format(4), second[1].format(2), fourth, fourth]
    assert watched[:3] == [
        "the batch of step 1, from the data",
        "the call of step 1",
        "the batch of step 2, from the data",
    ]
    assert "the numbers of step 1" in watched and watched[-1] is None


@pytest.mark.parametrize("failing", [False, True])
def test_a_signal_ends_the_run_after_its_step_and_saves(failing):
    stop, saves = StopSignals(), FakeCheckpoints({2} if failing else ())

    class Signalling(RowList):
        def write(self, row):
            super().write(row)
            stop.received = signal.SIGTERM  # while step 2 runs

    if failing:
        with pytest.raises(SaveFailed):
            run(5, rows=Signalling(), others=[stop], checkpoints=saves)
        return
    fitted, rows = run(5, rows=Signalling(), others=[stop], checkpoints=saves)
    assert not fitted.complete and fitted.state.step == 2
    assert list(saves.states) == [2]
    assert rows.events() == [(2, "saved")]


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_a_step_that_is_not_finite_ends_the_run(bad):
    saves, rows = FakeCheckpoints(), RowList()
    with pytest.raises(TrainingError, match=rf"^step {bad}: the loss is nan and the gradient norm 0.5.* row 7 is bad"):
        run(4, toy_step(bad={bad}), rows=rows, checkpoints=saves, explain=lambda *_: "row 7 is bad")
    kept = {step: (state.trainable, bool(state.halted)) for step, (state, _) in saves.states.items()}
    assert kept == ({bad - 1: (bad - 1, False)} if bad > 1 else {})
    assert rows.events() == [(bad, "not_finite")]
    assert rows[-1]["message"].count("checkpoint of step") == (bad > 1)


@pytest.mark.parametrize(("save", "start", "asked"), [(2, 0, [2]), (3, 2, []), (1, 0, [1, 2])])
def test_the_state_before_a_step_that_is_not_finite_is_saved_once(save, start, asked):
    saves, rows = FakeCheckpoints(slow=True), RowList()
    with pytest.raises(TrainingError, match="the state before it is the checkpoint of step 2"):
        run(4, toy_step(bad={3}), rows=rows, start=Progress(start), cadence=Cadence(0, save=save), checkpoints=saves)
    assert saves.asked == asked


def test_an_overflow_in_float16_is_a_skipped_step():
    fitted, rows = run(4, toy_step(bad={2}, scale=1024.0, forward=False))
    assert fitted.state.trainable == 3
    assert [row.get("skipped", False) for row in rows] == [False, True, False, False]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 1]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1, 0.2, 0.2, 0.3])
    with pytest.raises(
        TrainingError, match=r"^step 2: the loss is 5.0 and the gradient norm .* lower optimizer.learnin"
    ):
        run(4, toy_step(bad={2}, scale=1.0, forward=False))


def test_a_forward_pass_that_overflows_in_float16_ends_the_run():
    """No smaller scale of the loss mends it: such steps were skipped, up to the end of a short run."""
    with pytest.raises(
        TrainingError, match=r"^step 2: the loss is nan .* forward pass overflows in float16: set model.dt"
    ):
        run(4, toy_step(bad={2}, scale=1024.0))


def test_weights_without_gradient_end_the_run():
    with pytest.raises(TrainingError, match=r"^1 of 2 trained weights have no gradient after the first steps: dead\."):
        run(4, toy_step(norms=(1.0, 0.0)), others=[GradientCheck(["alive", "dead"])])


def test_too_few_batches():
    with pytest.raises(TrainingError, match="ended after 2 steps; expected batches for 3"):
        run(3, batches=[batch()] * 2)


def test_evaluation_is_a_mean_over_tokens():
    def counted(loss_sum, num_targets):
        return LossSums(loss_sum, None, {"num_targets": jnp.int32(num_targets), "num_correct": jnp.int32(1)})

    sums = iter([counted(jnp.float32(6), 3), counted(jnp.float32(4), 1)])
    evaluation = run_evaluation(lambda *_: next(sums), None, None, [batch(), batch()])
    assert evaluation == Evaluation(2.5, 0.5, 4)
    own = [LossSums(jnp.float32(n), jnp.float32(n / 4), {"margin": jnp.float32(2 * n)}) for n in (2, 6)]
    sums = iter(own)
    evaluation = run_evaluation(lambda *_: next(sums), None, None, [batch(), batch()])
    assert evaluation == Evaluation(4.0, 0.0, 0, {"eval_margin": 8.0})
    with pytest.raises(TrainingError, match="no token to predict"):
        run_evaluation(lambda *_: next(sums), None, None, [])


def test_batches_of_an_evaluation_are_heard_of_on_the_way():
    heard = []
    sums = LossSums(jnp.float32(1), jnp.float32(1), {})
    run_evaluation(lambda *_: sums, None, None, [batch()] * (AHEAD + 3), heard=lambda: heard.append(1))
    assert len(heard) == 3
