"""The result of several processes: all gather one tensor at a time, and the first alone keeps and writes it.

Here one process has all devices, and takes their arrays for ones that it shares with another.
"""

import jax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from convert.tensor_file import read_header
from fastjax.language_model import saving
from fastjax.lora import export
from fastjax.parallel import make_mesh, place, placing
from fastjax.training.placement import weight_shardings
from tests.support import tiny
from tests.support.runs import contents

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


class Gathers:
    """The arrays that are made whole on the devices, and those that come to the host.

    Attributes:
        whole: shapes of the former.
        hosted: of the latter, those that are kept.
    """

    def __init__(self, monkeypatch):
        self.whole, self.hosted = [], []
        placed, fetched = placing._placed, placing.fetched

        def recorded(sharding):
            def gather(array):
                self.whole.append(array.shape)
                return placed(sharding)(array)

            return gather

        def kept(array, keep=True):
            found = fetched(array, keep)
            self.hosted += [] if found is None else [found.shape]
            return found

        monkeypatch.setattr(placing, "_placed", recorded)
        for module in (placing, saving, export):
            monkeypatch.setattr(module, "spans_processes", spans)
            if module is not placing:
                monkeypatch.setattr(module, "fetched", kept)


def spans(tree):
    places = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return any(not isinstance(place, SingleDeviceSharding | None) for place in places)


@pytest.fixture(scope="module", params=["whole model", "adapter"])
def model(request, tmp_path_factory):
    """One in a single stack of three layers, whose trained matrices are split over eight devices."""
    folder, mesh, config = tmp_path_factory.mktemp("model"), make_mesh(fsdp=8), tiny.config(**SIZES)
    if request.param == "adapter":
        base = tiny.model(folder, config, layer_loop="scan")
        found = tiny.adapted(base, r=8, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
        split = NamedSharding(mesh, P(None, "fsdp"))
        return found.replace(trainable=jax.tree.map(lambda array: place(array, split), found.trainable))
    found = tiny.model(folder, config, full_finetuning=True, layer_loop="scan")
    return found.replace(trainable=place(found.trainable, weight_shardings(found.trainable, found.config, mesh)))


def test_one_tensor_at_a_time_is_gathered_and_the_first_process_alone_keeps_it(model, monkeypatch, tmp_path):
    stacks = [leaf for leaf in jax.tree.leaves(model.trainable["layers"]) if leaf.ndim == 3]
    assert stacks and not any(leaf.is_fully_replicated for leaf in stacks)
    model.save_pretrained(tmp_path / "alone" / "saved")
    expected = contents(tmp_path / "alone" / "saved")
    found = Gathers(monkeypatch)
    model.save_pretrained(tmp_path / "first" / "saved")
    assert contents(tmp_path / "first" / "saved") == expected
    (file,) = (tmp_path / "first" / "saved").glob("*.safetensors")
    tensors = {info.shape for info in read_header(file).values()}
    assert found.whole and {*found.whole, *found.hosted} <= tensors and len(found.hosted) == len(read_header(file))

    gathered, found.whole, found.hosted = found.whole, [], []
    monkeypatch.setattr(saving, "is_primary", lambda: False)
    model.save_pretrained(tmp_path / "other")
    assert found.whole == gathered and not found.hosted and not (tmp_path / "other").exists()


def test_a_process_that_keeps_nothing_waits_for_the_gather(monkeypatch):
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda array: waited.append(array.shape) or wait(array))
    monkeypatch.setattr(placing, "spans_processes", spans)
    array = jax.device_put(jax.numpy.ones((8, 2)), NamedSharding(make_mesh(fsdp=8), P("fsdp")))
    assert placing.fetched(array, keep=False) is None and waited == [(8, 2)]
    assert placing.fetched(array).shape == (8, 2)
