"""A run's model, loaded by a thread while XLA reads the compiled step back: neither needs Python for long."""

import contextvars
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from convert.weights import Weights
from fastjax.execution.opening import OpenModel
from fastjax.language_model import LanguageModel
from fastjax.language_model.variants import with_checkpointing
from fastjax.parallel import MeshShape
from fastjax.runs.model import load_model, with_start
from fastjax.runs.steps import with_policy
from fastjax.training.config import TrainConfig

#: Models that are loaded with this policy take any other that treats all layers alike.
_ANY = "full"


class ModelLoading:
    """The loading of a run's model, before or after its policy of rematerialisation is known.

    On leaving the context a thread that is still at work ends at its next weight.

    Attributes:
        load_seconds: that it took.
        waited_seconds: of these, in `wait`.
    """

    def __init__(self, config: TrainConfig, opened: OpenModel):
        """Remember what to load.

        Args:
            config: the run.
            opened: its folders.
        """
        self.load_seconds = self.waited_seconds = self._thread_seconds = 0.0
        self._config, self._opened = config, opened
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._model: LanguageModel | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "ModelLoading":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stopped.set()
        self.wait()

    @property
    def overlap_seconds(self) -> float:
        """Seconds of the thread's in which nobody waited for it."""
        return max(self._thread_seconds - self.waited_seconds, 0.0)

    def start(self, shape: MeshShape) -> None:
        """Begin, on a thread, unless it has begun.

        Args:
            shape: of the mesh, of one process.
        """
        if self._thread is not None:
            return
        # A thread has none of the context managers that its caller is in.
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        context = contextvars.copy_context()

        def work() -> None:
            try:
                with jax.default_device(device):
                    self._model = context.run(self._load, _ANY, shape)
                self._thread_seconds = self.load_seconds
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="load", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread, if there is one, has ended. What it raised `take` raises."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self.waited_seconds += time.perf_counter() - began

    def take(self, policy: str, shape: MeshShape) -> LanguageModel:
        """The model; what was not loaded is loaded now.

        Args:
            policy: of rematerialisation.
            shape: of the mesh.

        Raises:
            Exception: what `load_model` raises.
        """
        self.wait()
        error, model, self._error, self._model = self._error, self._model, None, None
        if error is not None:
            raise error
        if model is not None and ":" not in policy:
            return with_checkpointing(model, policy)
        del model  # its layers lie in other stacks
        return self._load(policy, shape)

    def _load(self, policy: str, shape: MeshShape) -> LanguageModel:
        began = time.perf_counter()
        opened = self._opened
        if opened.weights is not None:
            opened = dataclasses.replace(opened, weights=_Stoppable.of(opened.weights, self._stopped))
        model = load_model(with_policy(self._config, policy), opened, shape)
        model = with_start(model, self._config)
        self.load_seconds += time.perf_counter() - began
        return model


@dataclasses.dataclass(frozen=True)
class _Stoppable(Weights):
    """A folder's weights, whose stream ends with an error once nobody waits for it."""

    stopped: threading.Event

    @classmethod
    def of(cls, weights: Weights, stopped: threading.Event) -> "_Stoppable":
        fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(Weights)}
        return cls(**fields, stopped=stopped)

    def stream(self, **options: Any) -> Iterator[Any]:
        """Read the tensors as `Weights` does, until nobody waits for them."""
        for each in super().stream(**options):
            if self.stopped.is_set():
                raise InterruptedError("the model is not waited for any more")
            yield each
