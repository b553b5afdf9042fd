"""Damage to a checkpoint's files: it is restored bit for bit, or refused by name and the one before is taken.

`pytest tests/fastjax/training/test_checkpoint_mutations.py --mutations 200 -rP` makes more and shows the counts.
"""

import collections
import io
import random
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fastjax.runs.resume import newest, restore
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints, named_arrays
from tests.support import hostile, steps


def state(seed):
    """Noise, which compression leaves as it is, and what it makes small."""
    rng = np.random.default_rng(seed)
    return {
        "noise": jnp.asarray(rng.normal(size=(64, 32)), jnp.float32),
        "halves": jnp.asarray(rng.normal(size=(4, 8, 16)), jnp.bfloat16),
        "codes": jnp.asarray(rng.integers(0, 255, 777), jnp.uint8),
        "zeros": jnp.zeros((30, 30)),
        "step": jnp.int32(seed),
        "halted": jnp.zeros((), bool),
        "key": jax.random.key(seed),
    }


def described(step):
    config = {"model": {"model_name": "m", "dtype": "float32"}, "lora": {"r": 16, "lora_alpha": 16.0}}
    return {"config": config, "model": "5f0c", "data": "a1b2", "weights": "77aa", "position": {"step": step, "row": 5}}


class Mutation:
    """One of several ways to change or remove a file."""

    def __init__(self, number: int, files: list[Path]):
        """Each file has its turn; what becomes of it is drawn."""
        draw, self.file = random.Random(number), files[number % len(files)]
        self.kind = draw.choice((*hostile.DAMAGE, "deleted", "emptied folder"))
        self.before = self.file.read_bytes()
        if self.kind == "emptied folder":
            shutil.rmtree(self.file.parent)
            self.file.parent.mkdir()
        elif self.kind == "deleted":
            self.file.unlink()
        else:
            self.file.write_bytes(hostile.damaged(draw, self.before, self.kind))


def test_every_mutation_is_restored_bit_for_bit_or_refused_by_name(tmp_path, pytestconfig):
    whole = tmp_path / "whole"
    checkpoints = Checkpoints(whole, keep=2, extra=described)
    for step in (1, 2):
        checkpoints.save(state(step), Progress(step, 0.5 * step, step))
        checkpoints.wait()
    checkpoints.close()
    files = [path.relative_to(whole) for path in (whole / "2").rglob("*") if path.is_file()]
    files.sort(key=lambda path: (path.parent, (whole / path).stat().st_size))  # TensorStore draws the names of some
    counts, number = collections.Counter(), pytestconfig.getoption("--mutations")
    for index in range(number):
        damaged = tmp_path / f"damaged {index}"
        shutil.copytree(whole, damaged)
        mutation = Mutation(index, [damaged / file for file in files])
        label = f"mutation {index}: {mutation.kind} of {mutation.file.relative_to(damaged)}"
        checkpoints, console = Checkpoints(damaged), Console(file=io.StringIO(), width=300)
        found = newest(checkpoints, console)
        assert found is not None, label
        found, restored = restore(checkpoints, found, partial(checkpoints.load, like=state(3)), console)
        checkpoints.close()
        step, told = found.progress.step, console.file.getvalue()
        assert step in (1, 2) and (f"{damaged}/2 cannot be read: " in told) == (step == 1), f"{label}: {told}"
        assert found.checked and found.progress == Progress(step, 0.5 * step, step), label
        assert {"config": found.config, "position": found.position} | found.identity._asdict() == {
            **dict.fromkeys(found.identity._fields),
            **described(step),
        }, label
        steps.assert_same(named_arrays(restored), named_arrays(state(step)))
        counts["restored bit for bit" if step == 2 else "refused, the one before taken", mutation.kind] += 1
        shutil.rmtree(damaged)
    for outcome in ("restored bit for bit", "refused, the one before taken"):
        kinds = {kind: count for (name, kind), count in sorted(counts.items()) if name == outcome}
        print(f"{outcome}: {sum(kinds.values())} of {number} {kinds}")
        assert number < 25 or len(kinds) > 1, "mutations that prove nothing"
