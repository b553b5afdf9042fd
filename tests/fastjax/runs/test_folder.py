"""The output folder: whose it is, what is cleared, what is left alone."""

import dataclasses

import pytest

from fastjax.errors import ConfigError
from fastjax.runs.folder import RUN_FILES, claimed
from fastjax.training.config import DataSection, ModelSection, OutputSection, TrainConfig


def config(folder, **output):
    return TrainConfig(ModelSection("m"), DataSection("d"), OutputSection(str(folder), **output))


def test_two_runs_are_not_in_one_folder(tmp_path):
    with claimed(config(tmp_path / "run"), resume=False):
        with pytest.raises(ConfigError, match="expected a folder that no run is at work in"):
            with claimed(config(tmp_path / "run"), resume=True):
                pass
    with claimed(config(tmp_path / "run"), resume=False) as folder:
        assert folder.path.is_dir()


@pytest.mark.parametrize("name", RUN_FILES)
def test_what_an_earlier_run_left_is_not_taken_over(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"an earlier run, got .*, which holds {name}; go on with that run"):
        with claimed(config(tmp_path), resume=False):
            pass
    with claimed(config(tmp_path, overwrite_output_dir=True), resume=False):
        assert (tmp_path / name).exists()  # nothing is lost before the new run is sure to start


def test_clearing_leaves_the_result_and_what_is_not_ours(tmp_path):
    for name in (*RUN_FILES, "notes"):
        (tmp_path / name).mkdir()
    with claimed(config(tmp_path, overwrite_output_dir=True), resume=False) as folder:
        folder.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "adapter", "notes"]


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    left = [tmp_path / place / ".adapter.123-0123abcd.partial" for place in ("", "adapter")]
    other = tmp_path / ".other.partial"
    for folder in (*left, other):
        folder.mkdir(parents=True)
    with claimed(config(tmp_path), resume=True):
        assert not any(folder.exists() for folder in left) and other.exists()


def test_settings_are_read_back(tmp_path):
    with claimed(config(tmp_path, run_name="ä"), resume=False) as folder:
        assert folder.read_settings() is None
        folder.write_settings(config(tmp_path, run_name="ä"))
        assert folder.read_settings() == dataclasses.asdict(config(tmp_path, run_name="ä"))
        for torn in ("model: [", "mod", ""):
            folder.settings.write_text(torn)
            assert folder.read_settings() is None
