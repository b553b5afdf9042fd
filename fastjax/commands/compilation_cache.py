"""Compiled programs kept between commands: JAX's persistent compilation cache, in the user's cache folder.

JAX finds a program by its text, its options, the device and its own version, so a kept program is the one that
compiling would make again, and deleting the folder is always safe. A run with `training.deterministic` keeps none: its
kernels are chosen once, and stand beside its checkpoints.
"""

import argparse
import os
import tempfile
from pathlib import Path

from rich.console import Console

#: JAX's settings of the cache: its bytes, of which the least recently used go first, and the seconds worth a file.
_LIMITS = {"jax_compilation_cache_max_size": 2 * 2**30, "jax_persistent_cache_min_compile_time_secs": 0.05}

#: The option that switches the cache off.
OPTION = "--no_compilation_cache"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let a command's parser take the option."""
    where = "they are kept in ~/.cache/fastjax/programs, 2 GiB at most"
    parser.add_argument(OPTION, action="store_true", help=f"compile every program anew, keep none ({where})")


def keep_programs(wanted: bool) -> None:
    """Let JAX keep what this process compiles, and take what is kept; call it before anything is compiled.

    A cache that is set already, as by JAX_COMPILATION_CACHE_DIR, stays in force. A folder that cannot be written is a
    warning: the command goes on without a cache.

    Args:
        wanted: False: switch JAX's cache off, wherever it is.
    """
    import jax

    from fastjax.runs.messages import warn

    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastjax" / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        warn(Console(stderr=True), f"compiled programs are not kept for the next run: {error}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in _LIMITS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
