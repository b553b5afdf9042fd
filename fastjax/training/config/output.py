"""The section `output`: the output folder and its contents."""

import dataclasses
from typing import Annotated, Literal

from annotated_types import Interval, Predicate

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.options import checked
from fastjax.options.kinds import Cadence, Count, Folder


def _first_and_last(steps: list[int]) -> bool:
    return not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1])


@checked("output")
class OutputSection:
    """The output folder and its contents."""

    output_dir: Folder
    """folder of the run: `config.yaml`, `metrics.jsonl`, `checkpoints/`, `report.html`, and at the end
    `adapter/` (or `model/` after full fine-tuning)."""
    overwrite_output_dir: bool = False
    """replace an earlier run in that folder."""
    resume: bool = False
    """go on from the newest whole checkpoint in that folder, and from the start where there is none, as `--resume`
    does: for jobs that are stopped and begun again with the same command."""
    save_steps: Cadence | None = None
    """write a checkpoint every so many steps; below 1: after such a share of the run's steps each time, rounded up;
    epoch: at the end of each; null: only when the run is stopped."""
    save_total_limit: Count = 2
    """how many of the newest checkpoints are kept."""
    load_best_model_at_end: bool = False
    """keep the checkpoint with the lowest held-out loss too, and save that one as the result."""
    sample_answers: Annotated[int, Interval(ge=0, le=64)] = 0
    """let the model answer so many held-out prompts before and after training, greedily; the report shows both beside
    what the data say."""
    profile_steps: Annotated[
        list[int], Predicate(_first_and_last), "a list of two steps from 1, the first and the last, or []"
    ] = dataclasses.field(default_factory=list)
    """the first and the last step of a profiler's trace, for xprof and Perfetto, which goes into `profile/`; the first
    of a run compiles."""
    profile_rank: Annotated[int, Interval(ge=0)] = 0
    """of several processes the one that makes it."""
    report_to: list[Literal["tensorboard", "wandb"]] = dataclasses.field(default_factory=list)
    """trackers that get the metrics beside metrics.jsonl: tensorboard, wandb."""
    run_name: str | None = None
    """name of the run in trackers and the report; null: the folder's name."""
    project: str | None = None
    """the project on Weights & Biases; null: that of WANDB_PROJECT, or fastjax."""
    entity: str | None = None
    """its owner there, a user or a team; null: that of WANDB_ENTITY, or the account's own."""
    tags: list[str] = dataclasses.field(default_factory=list)
    """of the run there."""

    def __post_init__(self) -> None:
        if self.profile_rank and not self.profile_steps:
            raise ConfigError(f"output.profile_rank: expected 0 without output.profile_steps, got {self.profile_rank}")
        for name in ("project", "entity", "tags"):
            value = getattr(self, name)
            if value and "wandb" not in self.report_to:
                raise ConfigError(
                    f"output.{name}: expected none without wandb in output.report_to, got {shown(value, 80)}"
                )
        if self.resume and self.overwrite_output_dir:
            raise ConfigError("output.resume and output.overwrite_output_dir: expected one of them, got both true")
