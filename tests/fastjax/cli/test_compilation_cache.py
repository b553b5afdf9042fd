"""Where commands keep compiled programs, and when they keep none."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fastjax.commands.compilation_cache import keep_programs
from fastjax.commands.train import main

NAMES = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    """A user's cache folder; JAX's cache as in a new process, and afterwards as it was."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # of the environment: it stays in force
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compiled(number):
    """Compile and run a program that only this number makes."""
    return int(jax.jit(lambda x: x * number + 1)(jnp.int32(2)))


def test_programs_are_kept_in_bounds(caches):
    keep_programs(True)
    assert compiled(7001) == 14003
    assert [file for file in (caches / "fastjax" / "programs").iterdir() if "lambda" in file.name]
    assert jax.config.jax_compilation_cache_max_size == 2 * 2**30
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_a_folder_that_cannot_be_written_is_a_warning(caches, capsys):
    caches.write_text("a file")
    keep_programs(True)
    assert compiled(7002) == 14005
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: compiled programs are not kept for the next run:") and str(caches) in line


def test_a_cache_that_is_set_stays(caches, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    keep_programs(True)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_compilation_cache_max_size == -1


@pytest.mark.parametrize("option", ["--no_compilation_cache", "--training.deterministic=true"])
def test_none_is_kept(option, caches, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    needed = ["--model.model_name=no/such", "--data.train=none.jsonl", "--output.output_dir=run"]
    with pytest.raises(Exception, match="no/such"):
        main([*needed, option])
    assert not jax.config.jax_enable_compilation_cache
    assert not caches.exists()
