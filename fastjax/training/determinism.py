"""Equal runs, bit for bit, on a GPU.

Some of XLA's GPU operations add in the order in which threads arrive (scatters, some convolutions), and autotuning may
choose another kernel in another process. Deterministic operations exclude the first, autotuning results kept in the
run's folder the second, for a resumed run and for one repeated in the same place. On a CPU neither exists.
"""

from pathlib import Path
from typing import Any

import jax

#: XLA's option for operations that add in one order.
DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}
#: In the output folder.
KERNELS = "kernels"


def compiler_options(deterministic: bool, folder: Path) -> dict[str, Any] | None:
    """XLA's options for the steps of a run.

    Args:
        deterministic: make the run reproducible bit for bit.
        folder: the run's, for the results of the autotuning.

    Returns:
        For `jax.jit(compiler_options=…)`; None: nothing to set.
    """
    if not deterministic or jax.default_backend() != "gpu":
        return None
    kept = folder / KERNELS
    kept.mkdir(parents=True, exist_ok=True)
    return {
        **DETERMINISTIC,
        "xla_gpu_per_fusion_autotune_cache_dir": str(kept.absolute()),
    }
