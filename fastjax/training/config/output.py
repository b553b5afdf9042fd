"""The section `output`: the output folder and its contents."""

import dataclasses
from typing import Literal

from fastjax.errors import ConfigError
from fastjax.training.config.checks import check_section, expect, expect_interval


@dataclasses.dataclass(frozen=True)
class OutputSection:
    """The output folder and its contents.

    Attributes:
        output_dir: folder of the run: `config.yaml`, `metrics.jsonl`, `checkpoints/`, `report.html`, `report.png`, and
            at the end `adapter/` (or `model/` after full fine-tuning).
        overwrite_output_dir: replace an earlier run in that folder.
        resume: go on from the newest whole checkpoint in that folder, and from the start where there is none, as
            `--resume` does: for jobs that are stopped and begun again with the same command.
        save_steps: write a checkpoint every so many steps; below 1: after such a share of the run's steps each time,
            rounded up; epoch: at the end of each; null: only when the run is stopped.
        save_total_limit: how many of the newest checkpoints are kept.
        load_best_model_at_end: keep the checkpoint with the lowest held-out loss too, and save that one as the result.
        sample_answers: let the trained model answer so many held-out prompts at the end, greedily; the report shows
            them beside what the data say.
        profile_steps: the first and the last step of a profiler's trace, for xprof and Perfetto, which goes into
            `profile/`; the first of a run compiles.
        profile_rank: of several processes the one that makes it.
        report_to: trackers that get the metrics beside metrics.jsonl: tensorboard, wandb.
        run_name: name of the run in trackers and the report; null: the folder's name.
        project: the project on Weights & Biases; null: that of WANDB_PROJECT, or fastjax.
        entity: its owner there, a user or a team; null: that of WANDB_ENTITY, or the account's own.
        tags: of the run there.
    """

    output_dir: str
    overwrite_output_dir: bool = False
    resume: bool = False
    save_steps: int | float | Literal["epoch"] | None = None
    save_total_limit: int = 2
    load_best_model_at_end: bool = False
    sample_answers: int = 0
    profile_steps: list[int] = dataclasses.field(default_factory=list)
    profile_rank: int = 0
    report_to: list[Literal["tensorboard", "wandb"]] = dataclasses.field(default_factory=list)
    run_name: str | None = None
    project: str | None = None
    entity: str | None = None
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        check_section("output", self)
        expect_interval("output.save_steps", self.save_steps)
        expect("output.sample_answers", self.sample_answers, 0 <= self.sample_answers <= 64, "from 0 to 64")
        steps, rank = self.profile_steps, self.profile_rank
        whole = not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1])
        expect("output.profile_steps", steps, whole, "of two steps from 1, the first and the last, or []")
        expect(
            "output.profile_rank",
            rank,
            rank >= 0 and (not rank or bool(steps)),
            "from 0; other than 0 with profile_steps only",
        )
        for name in ("project", "entity", "tags"):
            value = getattr(self, name)
            expect(
                f"output.{name}", value, not value or "wandb" in self.report_to, "with wandb in output.report_to only"
            )
        if self.resume and self.overwrite_output_dir:
            raise ConfigError("output.resume and output.overwrite_output_dir: expected one of them, got both true")
        expect("output.save_total_limit", self.save_total_limit, self.save_total_limit >= 1, "at least 1")
