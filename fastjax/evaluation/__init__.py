"""Evaluations of a model: tasks from a YAML file, by exact match of what it answers or by the likeliest choice."""

from fastjax.evaluation.run import Result, evaluate
from fastjax.evaluation.scoring import Score, completion_scores
from fastjax.evaluation.tasks import Task, read_tasks

__all__ = ["Result", "Score", "Task", "completion_scores", "evaluate", "read_tasks"]
