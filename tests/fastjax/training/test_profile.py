"""The trace of some steps: which steps it has, what its files are called, and what is told where there is none."""

import jax
import pytest

from fastjax.errors import ConfigError, TrainingError
from fastjax.training.cadence import Progress
from fastjax.training.config import OutputSection
from fastjax.training.profile import StepProfile, check_profile
from tests.fastjax.training.test_loop import batch, run


def traced(folder):
    """The numbers of the steps in the one trace of a folder."""
    (file,) = folder.rglob("*.xplane.pb")
    assert file.name == "rank-3.xplane.pb" and file.with_name("rank-3.trace.json.gz").exists()
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    events = [event for line in lines for event in line.events if event.name == "train"]
    return sorted(dict(event.stats)["step_num"] for event in events)


@pytest.mark.filterwarnings("ignore")  # the reader's own types are not quite Python's
@pytest.mark.parametrize(("start", "given", "steps"), [(0, 6, [3, 4]), (3, 3, [4]), (0, 3, [3])])
def test_the_trace_has_the_steps_asked_for(tmp_path, start, given, steps):
    """In a whole run, in one that is resumed among them, and in one that ends among them."""
    told = []
    with StepProfile(tmp_path, [3, 4], 3, lambda *what: told.append(what)) as profile:
        options = {"start": Progress(start), "batches": [batch()] * given, "others": [profile]}
        if start + given < 6:
            with pytest.raises(TrainingError, match="the data ended after 3 steps"):
                run(6, **options)
        else:
            run(6, **options)
    assert traced(tmp_path) == steps and told == [(steps[-1], f"trace of rank 3: {tmp_path}")]


def test_a_trace_that_cannot_be_made_does_not_end_the_run(tmp_path):
    told = []
    jax.profiler.start_trace(tmp_path / "other")
    try:
        with StepProfile(tmp_path, [2, 3], 0, lambda *what: told.append(what)) as profile:
            fitted, _ = run(4, others=[profile])
    finally:
        jax.profiler.stop_trace()
    assert fitted.complete and len(told) == 1
    assert told[0][0] == 2 and told[0][1].startswith("no trace of rank 0: RuntimeError: ")


def test_steps_and_ranks_that_a_run_does_not_have_are_refused():
    check_profile(OutputSection("o", profile_steps=[3, 4]), 4)
    with pytest.raises(ConfigError, match=r"^output.profile_steps: expected steps from 1 to 3, got \[3, 4\]$"):
        check_profile(OutputSection("o", profile_steps=[3, 4]), 3)
    with pytest.raises(ConfigError, match=r"^output.profile_rank: expected a rank of 1 processes, got 1$"):
        check_profile(OutputSection("o", profile_steps=[3, 4], profile_rank=1), 4)
