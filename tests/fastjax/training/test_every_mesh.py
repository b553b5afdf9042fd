"""One step on meshes of eight devices against one device, loss and gradient by gradient.

A sample of the meshes; all of them with `--every-mesh`: every way to write 8 as a product of the five axes.
"""

import functools
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fastjax.data.batches import Batch
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape, make_mesh
from fastjax.parallel.checks import check_mesh
from tests.fastjax.training.test_step_on_mesh import EXPERTS, MIXTURE
from tests.support import steps, tiny

#: float32, relative, in the Euclidean norm: of the loss and of all gradients together.
TOLERANCE = 1e-6
#: Likewise of one array's gradient: sums in any order. Of the same step in float64 one device and eight are 1e-6 off
#: each; of the adapters of queries and keys, of whose gradients softmax leaves 2% of the whole, 2e-6.
OF_AN_ARRAY, OF_QUERIES_AND_KEYS = 2e-6, 4e-6
QUERIES_AND_KEYS = tuple(f"['{part}']['lora_{matrix}']" for part in ("q_proj", "k_proj") for matrix in "AB")
AXES = MeshShape._fields
#: Heads, features, words and blocks of 64 that eight devices can share.
CHANGES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
CONFIG = tiny.config(**CHANGES)
EXPERTS_OF_EIGHT = MIXTURE | {"num_experts": 8} | {name: CHANGES[name] for name in ("vocab_size", "initializer_range")}
LENGTH = 48
KINDS = ("lora", "qlora", "full", "mixture")
#: Trained weights over three axes; other tests of the default tier have steps of the other kinds and axes.
TELLING = "full", {"data": 2, "fsdp": 2, "tensor": 2}
#: One mesh an axis, and four mixed.
SAMPLE = [
    ("mixture", {"data": 8}),
    ("qlora", {"fsdp": 8}),
    ("mixture", {"expert": 8}),
    ("full", {"context": 8}),
    ("qlora", {"tensor": 8}),
    ("lora", {"data": 2, "fsdp": 2, "context": 2}),
    ("full", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("qlora", {"data": 2, "context": 2, "tensor": 2}),
    ("mixture", {"data": 2, "fsdp": 2, "expert": 2}),
]


def every_mesh():
    """All factorisations of 8 over the axes."""
    sizes = [numbers for numbers in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if math.prod(numbers) == 8]
    return [{axis: n for axis, n in zip(AXES, numbers, strict=True) if n > 1} for numbers in sizes]


def named(mesh):
    return " ".join(f"{axis}={size}" for axis, size in mesh.items())


def pytest_generate_tests(metafunc):
    if "mesh" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-mesh")
        cases = list(itertools.product(KINDS, every_mesh())) if every else SAMPLE
        others = () if every else pytest.mark.exhaustive(by=metafunc.function.__name__)
        parameters = [
            pytest.param(*case, id=f"{case[0]}, {named(case[1])}", marks=() if case == TELLING else others)
            for case in cases
        ]
        metafunc.parametrize(("kind", "mesh"), parameters)


@functools.cache
def model(kind):
    if kind == "mixture":
        with tempfile.TemporaryDirectory() as folder:
            return tiny.adapted(tiny.model(Path(folder), EXPERTS_OF_EIGHT), target_parameters=EXPERTS)
    folder = tiny.shared_folder(**CHANGES)
    base = tiny.model(folder, CONFIG, load_in_4bit=kind == "qlora", full_finetuning=kind == "full")
    return base if kind == "full" else tiny.adapted(base, target_modules="all-linear")


@functools.cache
def batch():
    """Eight packed rows, one of them empty."""
    lengths = [(17, 23), (3, 30), (48,), (5, 5), (40,), (), (9, 9, 9, 9), (2, 46)]
    rows = tiny.rows([tiny.documents(CONFIG, row, seed=number) for number, row in enumerate(lengths)], LENGTH)
    return Batch(*(np.stack([array]) for array in rows))


@functools.cache
def alone(kind):
    metrics, gradients = steps.gradients(model(kind), batch())
    return metrics, steps.named(gradients)


def test_eight_devices_have_the_loss_and_every_gradient_of_one(kind, mesh):
    ours, shape = model(kind), MeshShape(**mesh)
    unserved = ("context", "tensor") if kind == "mixture" else ("expert",)
    if refused := [axis for axis in mesh if axis in unserved]:
        expected = rf"parallel\.{refused[0]}: expected 1 of a model with(out)? mixtures of experts"
        with pytest.raises(ConfigError, match=expected):
            check_mesh(ours.config, shape)
        return
    check_mesh(ours.config, shape)
    expected, gradients = alone(kind)
    metrics, found = steps.gradients(ours, batch(), mesh=make_mesh(**mesh))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=TOLERANCE)
    assert metrics["num_targets"] == expected["num_targets"] and metrics["num_correct"] == expected["num_correct"]
    found = steps.named(found)
    assert found.keys() == gradients.keys()
    sizes = {name: np.linalg.norm(leaf) for name, leaf in gradients.items()}
    off = {name: np.linalg.norm(found[name] - leaf) for name, leaf in gradients.items()}
    whole = math.hypot(*off.values()) / math.hypot(*sizes.values())
    parts = {name: off[name] / sizes[name] for name in off}
    worst = max(parts, key=parts.__getitem__)
    print(f"{kind}, {named(mesh)}: all off by {whole:.1e}, {worst} by {parts[worst]:.1e}")
    assert whole < TOLERANCE
    for name, part in parts.items():
        few = name.endswith(QUERIES_AND_KEYS)
        assert part < (OF_QUERIES_AND_KEYS if few else OF_AN_ARRAY), name
