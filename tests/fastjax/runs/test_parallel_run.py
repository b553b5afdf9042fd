"""A run on several fake devices is the run on one: its figures, its result, and its checkpoints on other meshes."""

from types import SimpleNamespace

import numpy as np
import pytest

from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape
from fastjax.runs import checkpointing
from fastjax.runs.fine_tune import fine_tune
from fastjax.runs.mesh import check_model, mesh_shapes
from fastjax.training.config import ParallelSection
from tests.support import chat, tiny
from tests.support.runs import config, figures, rows

#: float32: a sum over devices is another order of the same terms, which Adam's division carries on.
TOLERANCE = 1e-5
ALONE = {"data": 1, "fsdp": 1}
ALL = "parallel: expected a product of 8, all devices of 2 processes, got"


@pytest.mark.parametrize(
    ("section", "devices", "shapes"),
    [
        ({}, 8, [MeshShape(8), MeshShape(fsdp=8)]),
        ({}, 1, [MeshShape()]),
        ({"fsdp": 4}, 8, [MeshShape(2, 4)]),
        ({"data": 2}, 8, [MeshShape(2, 4)]),
        ({"data": 1, "fsdp": 1}, 8, [MeshShape()]),
        ({"tensor": 2}, 8, [MeshShape(4, tensor=2), MeshShape(fsdp=4, tensor=2)]),
        ({"fsdp": 3}, 8, [MeshShape(2, 3)]),
        ({"gradient_exchange": "int8"}, 8, [MeshShape(8)]),
    ],
)
def test_auto_takes_the_devices_that_are_left(section, devices, shapes):
    assert list(mesh_shapes(ParallelSection(**section), devices)) == shapes


@pytest.mark.parametrize(
    ("section", "processes", "message"),
    [
        ({"data": 3, "fsdp": 4}, 1, "parallel: expected a product of at most 8, got data 3 × fsdp 4"),
        (
            {"data": 2, "fsdp": 2},
            2,
            "parallel: expected a product of 8, all devices of 2 processes, got data 2 × fsdp 2",
        ),
        ({"fsdp": 3}, 2, "parallel: expected a product of 8, all devices of 2 processes, got fsdp 3"),
    ],
)
def test_sizes_that_the_devices_do_not_suit(section, processes, message):
    with pytest.raises(ConfigError) as error:
        mesh_shapes(ParallelSection(**section), 8, processes)
    assert str(error.value) == message


def test_what_only_one_device_serves_is_refused_with_the_way_out():
    opened = SimpleNamespace(config=read_config(tiny.CONFIG))
    for settings in ({"model": {"offload_layers": True}}, {"training": {"offload_optimizer": True}}):
        ((section, keys),) = settings.items()
        with pytest.raises(ConfigError, match=rf"^{section}\.{next(iter(keys))}: expected false on 8 dev.* takes one$"):
            check_model(config(**settings), opened, (MeshShape(8),))
        check_model(config(**settings), opened, (MeshShape(),))


@pytest.mark.parametrize(
    ("keys", "shape", "message"),
    [
        ({"max_seq_length": 66}, MeshShape(context=2, tensor=2), "max_seq_length: expected a multiple of 8 with"),
        (
            {"max_seq_length": 64, "mlp_chunk": 32},
            MeshShape(tensor=2),
            "mlp_chunk: expected auto or null with tensor 2",
        ),
    ],
)
def test_rows_and_chunks_that_do_not_suit_a_mesh_are_refused_before_the_data(keys, shape, message):
    opened = SimpleNamespace(config=read_config(tiny.CONFIG))
    with pytest.raises(ConfigError, match=rf"^model\.{message}"):
        check_model(config(model=keys), opened, (shape,))
    check_model(config(model={"max_seq_length": 64}), opened, (shape,))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of QLoRA, held-out data and dropout, in the same folder of files; eight rows a step."""
    folder = tmp_path_factory.mktemp("world")
    model = chat.write_model(folder / "model")
    data = str(chat.write_chats(folder / "chats.jsonl"))

    def train(name, steps, mesh, *, resume=False, rows=8, **options):
        devices = 8 if "auto" in mesh.values() else mesh["data"] * mesh["fsdp"]
        sections = {
            "model": {"model_name": str(model), "max_seq_length": 48, "use_gradient_checkpointing": True} | options,
            "data": {"train": data, "eval": data, "cache_dir": None},
            "lora": {"r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]},
            "optimizer": {"lr_scheduler_type": "constant", "adam_epsilon": 1e-3},
            "training": {"max_steps": steps, "per_device_train_batch_size": rows // devices},
            "output": {"output_dir": str(folder / name), "save_steps": 2},
            "parallel": mesh,
        }
        return fine_tune(config(**sections), resume=resume)

    train.folder = folder
    return train


@pytest.fixture(scope="module")
def whole(run):
    """The figures of four steps on one device."""
    run("whole", 4, ALONE)
    return figures(run.folder / "whole")


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.array(one, np.float64), np.array(other, np.float64), rtol=TOLERANCE, equal_nan=True
        )


def assert_equal_to_whole(found, whole):
    close([row for row in found if row[1] is not None], [row for row in whole if row[1] is not None])
    close(found[-1:], whole[-1:])  # the last evaluation


@pytest.mark.exhaustive(
    by="test_the_memory_of_a_device_decides, "
    "tests/fastjax/training/test_checkpoint_parts.py::test_a_checkpoint_goes_on_on_any_mesh, "
    "tests/fastjax/runs/test_settings_changes.py::test_what_makes_another_state_is_refused"
)
def test_the_same_rows_on_other_meshes(run, whole):
    """Begun on a mesh, data parallel and sharded, resumed on one device: the figures of one device to the end."""
    run("moved", 2, {"data": 2, "fsdp": 2})
    run("moved", 4, ALONE, resume=True)
    assert_equal_to_whole(figures(run.folder / "moved"), whole)
    with pytest.raises(ConfigError, match="the rows of a step: expected 8, got 16"):
        run("moved", 8, {"data": 4, "fsdp": 1}, resume=True, rows=16)


@pytest.mark.exhaustive(
    by="test_the_memory_of_a_device_decides, "
    "tests/fastjax/training/test_checkpoint_parts.py::test_a_checkpoint_goes_on_on_any_mesh"
)
def test_a_run_of_one_device_goes_on_on_eight(run, whole):
    run("spread", 2, ALONE)
    run("spread", 4, {"data": 1, "fsdp": 8}, resume=True)
    assert_equal_to_whole(figures(run.folder / "spread"), whole)


@pytest.mark.exhaustive("fsdp 8")
@pytest.mark.parametrize(
    ("limit", "shape"), [pytest.param(2**40, "data 8", id="data 8"), pytest.param(2**20, "fsdp 8", id="fsdp 8")]
)
def test_the_memory_of_a_device_decides(run, whole, monkeypatch, capsys, limit, shape):
    monkeypatch.setattr(checkpointing, "device_stats", lambda: {"bytes_limit": limit, "bytes_in_use": 0})
    model = run(shape, 2, {"data": "auto", "fsdp": "auto"}).model
    told = capsys.readouterr().out
    assert f"on 8 × cpu ({shape}), float32\n" in told
    assert ("the model does not fit on one device: fsdp 8\n" in told) == (shape == "fsdp 8")
    codes = model.frozen["layers"][0][0]["mlp"]["down"]["weight"].codes
    assert codes.addressable_shards[0].data.nbytes == codes.nbytes // (8 if shape == "fsdp 8" else 1)
    found = [row["loss"] for row in rows(run.folder / shape) if "loss" in row]
    np.testing.assert_allclose(found, [row[1] for row in whole if row[1] is not None][:2], rtol=TOLERANCE)
