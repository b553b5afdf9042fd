"""The loop over a toy step: what it reports, when it evaluates, that it reads a step behind, how it fails."""

import json
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.training.loop import fit, run_evaluation
from fastjax.training.metrics import Evaluation, JsonLines, Throughput


class State(NamedTuple):
    step: int
    trainable: float


class Rows(list):
    """A sink that keeps what it is given."""

    def write(self, row):
        self.append(dict(row))

    def close(self):
        pass


def batch(tokens: int = 6) -> Batch:
    segments = np.zeros((1, 2, 4), np.int32)
    segments.flat[:tokens] = 1
    return Batch(segments, segments, segments, segments)


def toy_step(log=None, bad=()):
    def step(state, frozen, batch):
        number = state.step + 1
        if log is not None:
            log.append(("dispatch", number))
        loss = float("nan") if number in bad else 10.0 / number
        metrics = {
            "loss": jnp.float32(loss),
            "num_targets": jnp.int32(8),
            "num_correct": jnp.int32(2),
            "grad_norm": jnp.float32(0.5),
            "finite": jnp.asarray(number not in bad),
        }
        return State(number, state.trainable + 1), metrics

    return step


def run(steps, step=None, *, batches=None, **options):
    rows = Rows()
    rates = np.linspace(0.1, 1.0, steps, dtype=np.float32)
    batches = [batch()] * steps if batches is None else batches
    state, evaluation = fit(
        step or toy_step(), State(0, 0), None, batches, learning_rates=rates, sinks=[rows], **options
    )
    return state, evaluation, rows


def test_one_row_a_step():
    state, evaluation, rows = run(3)
    assert state == State(3, 3)
    assert evaluation is None
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == pytest.approx([10, 5, 10 / 3])
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1, 0.55, 1.0])
    assert {row["token_accuracy"] for row in rows} == {0.25}
    assert rows[0]["tokens_per_second"] is None  # the first step compiles
    assert rows[2]["tokens_per_second"] > 0
    assert rows[2]["seconds_left"] == 0


def test_reads_a_step_while_the_next_one_runs():
    log = []

    class Log(Rows):
        def write(self, row):
            log.append(("report", row["step"]))

    fit(toy_step(log), State(0, 0), None, [batch()] * 3, learning_rates=np.ones(3), sinks=[Log()])
    expected = [("dispatch", 1), ("dispatch", 2), ("report", 1), ("dispatch", 3), ("report", 2), ("report", 3)]
    assert log == expected


def test_evaluates_every_few_steps_and_at_the_end():
    seen = []

    def evaluate(trainable):
        seen.append(trainable)
        return Evaluation(1.0, 0.5, 10)

    _, evaluation, rows = run(5, evaluate=evaluate, eval_steps=2)
    assert seen == [2, 4, 5]
    assert evaluation == Evaluation(1.0, 0.5, 10)
    kinds = [(row["step"], "loss" in row) for row in rows]
    assert kinds == [(1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True), (5, False)]
    assert rows[2] == {
        "step": 2,
        "eval_loss": 1.0,
        "eval_perplexity": pytest.approx(np.e),
        "eval_token_accuracy": 0.5,
        "eval_num_targets": 10,
    }
    assert run(4, evaluate=evaluate, eval_steps=2)[2][-1]["step"] == 4
    assert seen == [2, 4, 5, 2, 4]  # a last step that was evaluated already is not evaluated again


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_a_step_that_is_not_finite_ends_the_run(bad):
    with pytest.raises(TrainingError, match=rf"^step {bad}: the loss is nan and the gradient norm 0.5"):
        run(4, toy_step(bad={bad}))


def test_too_few_batches():
    with pytest.raises(TrainingError, match="ended after 2 steps; expected batches for 3"):
        run(3, batches=[batch()] * 2)


def test_evaluation_is_a_mean_over_tokens():
    sums = iter([(jnp.float32(6), jnp.int32(3), jnp.int32(1)), (jnp.float32(4), jnp.int32(1), jnp.int32(1))])
    evaluation = run_evaluation(lambda *_: next(sums), None, None, [batch(), batch()])
    assert evaluation == Evaluation(2.5, 0.5, 4)
    with pytest.raises(TrainingError, match="no token to predict"):
        run_evaluation(lambda *_: next(sums), None, None, [])


def test_throughput_leaves_out_compilation_and_evaluation():
    times = iter([0.0, 30.0, 32.0, 34.0, 100.0, 102.0])
    throughput = Throughput(10, clock=lambda: next(times))
    assert throughput.step(1, 100) == {"tokens_per_second": None, "seconds": 30.0, "seconds_left": None}
    assert throughput.step(2, 100) == {"tokens_per_second": 50.0, "seconds": 32.0, "seconds_left": 16.0}
    assert throughput.step(3, 300)["tokens_per_second"] == 100.0
    throughput.pause()
    assert throughput.step(4, 100)["tokens_per_second"] == 100.0
    assert throughput.step(5, 200)["seconds_left"] == 10.0


def test_json_lines_are_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1, "loss": float("nan"), "tokens_per_second": None})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "tokens_per_second": None}
    lines.close()
