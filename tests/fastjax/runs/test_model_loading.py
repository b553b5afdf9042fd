"""A run's model from a thread is the one from the caller's own."""

import threading

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.errors import ConvertError
from fastjax.parallel import MeshShape
from fastjax.runs import model_loading
from fastjax.runs.model import load_model
from fastjax.runs.model_loading import ModelLoading
from fastjax.runs.opening import open_model
from fastjax.runs.steps import with_policy
from tests.support import chat
from tests.support.runs import config

ONE = MeshShape()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat.write_model(tmp_path_factory.mktemp("loading") / "model")


def settings(folder):
    model = {"model_name": str(folder), "max_seq_length": 48, "load_in_4bit": False}
    return config(model=model, data={"train": "none.jsonl"}, lora={"r": 4}, output={"output_dir": "none"})


def leaves(model):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((model.trainable, model.frozen))]


@pytest.mark.parametrize("policy", ["projections", "projections:1"])
def test_it_is_the_same(folder, policy):
    run = settings(folder)
    opened = open_model(run)
    with ModelLoading(run, opened) as loading:
        loading.start(ONE)
        model = loading.take(policy, ONE)
    expected = load_model(with_policy(run, policy), opened)
    assert model.graphdef == expected.graphdef and model.execution.remat == policy and leaves(model) == leaves(expected)
    assert 0 <= loading.overlap_seconds < loading.load_seconds


def test_what_is_wrong_is_raised_where_the_model_is_taken(folder, tmp_path):
    broken = chat.write_model(tmp_path / "model")
    file = broken / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, file)
    with ModelLoading(settings(broken), open_model(settings(broken))) as loading:
        loading.start(ONE)
        loading.wait()
        with pytest.raises(ConvertError, match=r"model\.norm\.weight.*NaN"):
            loading.take("full", ONE)


def test_nothing_goes_on_when_the_context_is_left(folder, monkeypatch):
    run, reading, read = settings(folder), threading.Event(), []

    def load(settings, opened, shape):
        for path, _ in opened.weights.stream():
            read.append(path)
            reading.set()
            loading._stopped.wait(60)

    monkeypatch.setattr(model_loading, "load_model", load)
    with pytest.raises(KeyError, match="compiling"), ModelLoading(run, open_model(run)) as loading:
        loading.start(ONE)
        assert reading.wait(60)
        raise KeyError("compiling")
    assert len(read) == 1 and "load" not in {thread.name for thread in threading.enumerate()}
