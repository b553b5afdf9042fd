"""The profiler's trace of some steps of a run, by one of its processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import jax

from fastjax.errors import ConfigError
from fastjax.training.config import OutputSection
from fastjax.training.loop import Loop, Observer

#: Endings of a trace's files, for xprof and for Perfetto; before them stands the host's name.
_ENDINGS = (".xplane.pb", ".trace.json.gz")


def check_profile(output: OutputSection, total: int) -> None:
    """Refuse a trace of steps that a run does not have, or by a process that it does not have.

    Args:
        output: of the settings.
        total: steps of the run.

    Raises:
        ConfigError: the setting, what it may be, and what it is.
    """
    if output.profile_steps and output.profile_steps[-1] > total:
        raise ConfigError(f"output.profile_steps: expected steps from 1 to {total}, got {output.profile_steps}")
    if output.profile_rank >= (count := jax.process_count()):
        raise ConfigError(f"output.profile_rank: expected a rank of {count} processes, got {output.profile_rank}")


class StepProfile(Observer):
    """A context in which some steps are traced; one that ends before the last of them keeps those that were taken.

    A trace that cannot be made is told, and the run goes on.
    """

    def __init__(self, folder: Path, steps: Sequence[int], rank: int, tell: Callable[[int, str], None]):
        """Make it; the trace begins with the first step.

        Args:
            folder: of the traces, as xprof reads it.
            steps: the first and the last one; empty: none.
            rank: of this process, in the names of its files.
            tell: takes the step and a sentence about the trace.
        """
        self._folder, self._rank, self._tell = folder, rank, tell
        self._first, self._last = steps or (1, 0)
        self._running, self._begun = False, 0

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._running:
            self._stop(self._begun)

    def before(self, loop: Loop) -> None:
        """Begin the trace before its first step, or where a resumed run comes upon the others."""
        if not self._running and self._first <= loop.progress.step + 1 <= self._last:
            loop.read()  # the step ahead is over: the trace has whole steps
            loop.waits(None)
            self._start(loop.progress.step + 1)

    def after(self, loop: Loop) -> None:
        """End the trace after its last step."""
        if self._running and loop.progress.step == self._last:
            loop.read()
            loop.waits(None)
            self._stop(loop.progress.step)
            loop.waits(None)

    def _start(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python's would slow the host down
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except RuntimeError as error:
            self._fail(step, error)
        else:
            self._running, self._begun = True, step

    def _stop(self, step: int) -> None:
        """Write the trace, whose last step is this one."""
        self._running, before = False, set(self._folder.rglob("*"))
        try:
            jax.profiler.stop_trace()
            for path in set(self._folder.rglob("*")) - before:
                if ending := next((ending for ending in _ENDINGS if path.name.endswith(ending)), None):
                    path.rename(path.with_name(f"rank-{self._rank}{ending}"))
        except (RuntimeError, OSError) as error:
            self._fail(step, error)
        else:
            self._tell(step, f"trace of rank {self._rank}: {self._folder}")
        self._last = 0

    def _fail(self, step: int, error: Exception) -> None:
        self._last = 0
        self._tell(step, f"no trace of rank {self._rank}: {type(error).__name__}: {error}")
