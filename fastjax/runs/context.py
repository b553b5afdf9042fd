"""A run as a list of stages over one context: each stage reads what those before it have found, and adds its own."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import optax
from rich.console import Console

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.opening import OpenModel
from fastjax.language_model import LanguageModel, ModelHandle
from fastjax.parallel import MeshShape
from fastjax.planning.choice import PolicyChoice
from fastjax.runs.datasets import Given, RunData
from fastjax.runs.folder import RunFolder
from fastjax.runs.identity import Identity
from fastjax.runs.messages import say
from fastjax.runs.resume import ResumePoint
from fastjax.runs.steps import Optimizer, StepRecipe
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.config import TrainConfig
from fastjax.training.loss import Loss
from fastjax.training.metrics import Evaluation, Sink
from fastjax.training.observers import Startup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: A user's own held-out evaluation: of a model, to numbers by names that begin with `eval_`.
Evaluate = Callable[[ModelHandle], Mapping[str, float]]


class FineTuned(NamedTuple):
    """A finished run.

    Attributes:
        model: the trained model.
        folder: the adapter's folder, or the whole model's.
        evaluation: the last held-out evaluation; None without held-out data.
        config: the settings, with names on the hub at their commit.
    """

    model: ModelHandle
    folder: Path
    evaluation: Evaluation | None
    config: TrainConfig


class RunStep(NamedTuple):
    """The train step of a run before its model is loaded.

    Attributes:
        policy: of rematerialisation.
        choice: how it was chosen, with the compiled step; None: the device's memory is not known.
        mesh: shape of the mesh.
        advice: says what to do where the device is out of memory; None: the model's facts are not known.
    """

    policy: str
    choice: PolicyChoice | None
    mesh: MeshShape
    advice: Callable[[], str] | None = None


@dataclasses.dataclass
class Run:
    """The context of a run. An attribute below `ended` is there once a stage, or the program, has set it.

    Attributes:
        config: the settings; once they are settled, with names on the hub at their commit.
        console: for progress.
        resume: whether to go on from a checkpoint.
        verbose: say of every module how it is computed.
        loss: in place of the settings' own; see `training.loss.Loss`.
        evaluate: a measurement at each held-out evaluation.
        optimizer: in place of the settings' own.
        given: data sets in memory, by "train" and "eval", in place of the settings'.
        sinks: take the rows behind the run's own.
        ended: whether the run is to end; asked before each step.
        began: when, in seconds of `time.perf_counter`.
        exits: the contexts that are left at the end of the run.
        folder: the output folder, which is claimed.
        checkpoints: of the run.
        earlier: the checkpoint to resume from; None: there is none.
        changed: lines about what has changed since.
        damage: to the result of a run that is finished; None: none.
        meshes: the shapes to choose from, the fastest first.
        opened: the folders of its model; None: the model came in memory.
        start: the trained arrays in memory that are the run's reference; None: there are none.
        tokenizer: of the run.
        data: of the run.
        identity: fingerprints of its inputs.
        recipe: of its step.
        step: its step, with the policy and the mesh that were chosen.
        model: as it begins, or as the program gave it; once the state has a copy, without its trained arrays.
        startup: seconds that loading and compiling have taken.
        result: of the run; None: it is not there yet.
        reached: the model as far as training came; None: there is none.
    """

    config: TrainConfig
    console: Console
    resume: bool = False
    verbose: bool = False
    loss: Loss | None = None
    evaluate: Evaluate | None = None
    optimizer: Optimizer | None = None
    given: Given = dataclasses.field(default_factory=dict)
    sinks: Sequence[Sink] = ()
    ended: Callable[[], bool] = lambda: False
    began: float = dataclasses.field(default_factory=time.perf_counter)
    exits: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    folder: RunFolder = dataclasses.field(init=False)
    checkpoints: Checkpoints = dataclasses.field(init=False)
    earlier: ResumePoint | None = None
    changed: list[str] = dataclasses.field(default_factory=list)
    damage: str | None = None
    meshes: tuple[MeshShape, ...] = ()
    opened: OpenModel | None = None
    start: Any = None
    tokenizer: "PreTrainedTokenizerFast" = dataclasses.field(init=False)
    data: RunData = dataclasses.field(init=False)
    identity: Identity = dataclasses.field(init=False)
    recipe: StepRecipe = dataclasses.field(init=False)
    step: RunStep = dataclasses.field(init=False)
    model: LanguageModel = dataclasses.field(init=False)
    startup: Startup = dataclasses.field(init=False)
    result: FineTuned | None = None
    reached: Callable[[], LanguageModel | None] = lambda: None

    def __post_init__(self) -> None:
        rule = self.optimizer
        if type(rule) is tuple and len(rule) == 2 and callable(rule[1]):
            rule = rule[0]
        for name, served, expected in (
            ("optimizer", isinstance(rule, optax.GradientTransformation), "one of optax, alone or with its schedule"),
            ("loss", callable(self.loss), "a function (training.loss.Loss)"),
            ("evaluate", callable(self.evaluate), "a function of the model"),
        ):
            if (given := getattr(self, name)) is not None and not served:
                raise ConfigError(f"{name}: expected {expected}, got {shown(given)}")

    def tell(self, text: str) -> None:
        """Say a line on the console."""
        say(self.console, text)

    def description(self, step: int) -> dict[str, Any]:
        """The JSON that the checkpoint of a step keeps beside its state."""
        chosen = getattr(self, "step", None)
        return {
            "config": dataclasses.asdict(self.config),
            **self.identity._asdict(),
            "checkpointing": chosen and chosen.policy,
            "replicas": chosen and chosen.mesh.replicas,
            "now": self.data.train.now,
            "position": self.data.batches.position(step),
        }


def perform(run: Run, stages: Iterable[Callable[[Run], None]]) -> FineTuned:
    """Do a run's stages, until there is a result.

    Args:
        run: the context.
        stages: in order.
    """
    with run.exits:
        for stage in stages:
            stage(run)
            if run.result is not None:
                return run.result
    raise AssertionError("the last stage makes the result")
