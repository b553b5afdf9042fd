"""The policies that a run chooses from, and what it could set to hold less."""

import json

import jax
import pytest

from fastjax.execution.policies import candidates, holds_more
from fastjax.parallel import MeshShape
from fastjax.runs.model import run_shapes
from fastjax.runs.opening import open_shapes
from fastjax.runs.policies import less_memory, run_candidates, way_out
from tests.support import tiny
from tests.support.runs import config

ONE, TWO = MeshShape(), MeshShape(fsdp=2)
POLICY = "model.use_gradient_checkpointing: "
HOST = ["model.offload_layers: true", "model.offload_embedding: true", "training.offload_optimizer: true"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Settings of models of scanned layers whose table is the head's too, or not."""
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        (folder / str(tied)).mkdir()
        shape = tiny.config(num_hidden_layers=4, max_position_embeddings=2**16, tie_word_embeddings=tied)
        (folder / str(tied) / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.fixture
def ways(folders):
    """The settings for a run's step, by its policy, its sections and its mesh."""

    def of(policy, *others, shape=ONE, tied=False, **sections):
        model = {"model_name": str(folders / str(tied)), "max_seq_length": 64, "load_in_4bit": False}
        own = config(**{**sections, "model": {**model, **sections.get("model", {})}})
        return less_memory(own, run_shapes(own, open_shapes(own)), shape, policy, others)

    return of


def test_the_order_is_of_copies_that_are_hidden():
    """Copies are hidden in scanned layers on one device alone."""
    apart, own = candidates(hidden=False), {"model_name": "m"}
    assert run_candidates(config(model=own), ONE) == candidates(hidden=True) != apart
    assert run_candidates(config(model=own), TWO) == apart
    assert run_candidates(config(model={**own, "layer_loop": "unroll"}), ONE) == apart


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", "projections"),
        ("projections", "attention"),
        ("attention", "offload_projections"),
        ("full", "offload_projections"),
        ("offload_projections", "offload_attention"),
        ("offload_attention", "offload"),
        ("offload", None),
        ("projections:2", "full"),
        ("offload:2", "offload"),
        ("offload_projections:2", "offload"),
        ("offload_attention:2", "offload"),
    ],
)
def test_the_next_policy_holds_less(ways, policy, expected):
    """By what was measured and planned of 8B: at 1×65,536 offload_projections takes more than offload_attention."""
    found = ways(policy)
    assert found[0] == (HOST[0] if expected is None else POLICY + expected)
    if expected is not None and ":" not in policy:
        assert holds_more(policy, expected) and not holds_more(expected, policy)


def test_what_does_not_fit_or_does_not_suit_is_not_named(ways):
    assert ways("full", "offload")[0] == HOST[0], "all else holds more"
    assert ways("full", "offload_attention")[0] == POLICY + "offload", "offload_projections holds more"
    assert ways("full", "offload", "offload_attention")[0] == HOST[0]
    unrolled = ways("full", model={"layer_loop": "unroll"})
    assert (POLICY + "offload" in unrolled) == (jax.__version_info__ >= (0, 11))
    assert HOST[0] not in unrolled, "no layers are scanned"


def test_only_what_the_run_could_use_and_has_not_set(ways):
    assert ways("offload") == HOST
    assert ways("offload", tied=True) == [HOST[0], HOST[2]]
    assert ways("offload", shape=TWO) == []
    assert ways("offload", model={"offload_layers": True, "offload_embedding": True}) == [HOST[2]]
    assert ways("offload", training={"offload_optimizer": True}) == HOST[:2]
    assert ways("offload", optimizer={"name": "lion"}) == HOST[:2], "it has no second moments"
    assert ways("offload", model={"full_finetuning": True}) == [HOST[2]], "the weights are trained"


def test_mlps_by_chunks_where_they_cost_no_products(ways):
    chunk = "model.mlp_chunk: 2048"
    rows = {"per_device_train_batch_size": 4}
    assert chunk in ways("full", training=rows, model={"max_seq_length": 1024})
    assert chunk not in ways("full", training=rows, model={"max_seq_length": 512}), "all tokens are one chunk"
    assert chunk not in ways("full", training=rows, model={"max_seq_length": 4096}), "auto has done it"
    assert chunk in ways("full", training=rows, model={"max_seq_length": 4096, "mlp_chunk": None})
    assert chunk not in ways("full", training=rows, model={"max_seq_length": 1024, "mlp_chunk": 512})
    assert chunk not in ways("projections", training=rows, model={"max_seq_length": 1024}), "it keeps what MLPs make"
    assert chunk not in ways("full", shape=MeshShape(tensor=2), training=rows, model={"max_seq_length": 1024})


def test_the_sentence():
    lower = "training.per_device_train_batch_size (and raise gradient_accumulation_steps as much) or "
    assert way_out([], 2) == way_out([]) == f"Lower {lower}model.max_seq_length"
    assert way_out(["a: 1", "b: 2"], 1) == "Set a: 1 or b: 2, or lower model.max_seq_length"
