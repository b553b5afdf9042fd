"""Loading: 4-bit folders as they are, 16-bit folders quantised on the way, and no more memory than said."""

import collections
import gc
import logging
import math
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from convert import saving
from convert import weights as convert_weights
from convert.errors import ConvertError
from convert.families import family_for
from convert.formats import nf4
from fastjax.execution import load, places
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.loading import load_opened
from fastjax.parallel import make_mesh
from fastjax.quantization import NF4Weight
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from tests.support import steps, tiny

WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 128}
ODD = {"hidden_size": 40, "intermediate_size": 72, "head_dim": 10}
#: What Unsloth's "dynamic" folders do: some projections, some layers, stay in 16 bits.
KEPT = ("layers.1.mlp.down_proj.weight", "layers.0.self_attn.v_proj.weight", "layers.2.self_attn.q_proj.weight")


def write_4bit(folder, config, *, nested, kept=()):
    """A folder in NF4 and one with the very numbers that it decodes to; both from the same random weights."""
    arrays = tiny.arrays(config)
    packed, decoded = [], {}
    for row in family_for(config).specs(config):
        array = arrays[row.name]
        if row.path.startswith("layers.") and row.path.endswith("_proj.weight"):
            if row.path in kept:
                array = array.astype(ml_dtypes.bfloat16)
            else:
                array = nf4.encode(array, nested=nested)
        packed.append((row.path, array))
        decoded[row.name] = nf4.decode(array, np.float32) if isinstance(array, nf4.NF4Tensor) else array
    saving.save(folder / "packed", packed, config)
    tiny.write_folder(folder / "decoded", config, decoded)
    tiny.write_tokenizer(folder / "packed", config)
    return folder / "packed", folder / "decoded"


def rows(config):
    return tiny.rows([tiny.documents(config, (30, 9)), tiny.documents(config, (40,))], 40)


@pytest.mark.exhaustive("whole blocks-dynamic-unroll-False", "blocks across rows-uniform-scan-True")
@pytest.mark.parametrize(("layer_loop", "nested"), [("scan", True), ("scan", False), ("unroll", False)])
@pytest.mark.parametrize("kept", [(), KEPT], ids=["uniform", "dynamic"])
@pytest.mark.parametrize("shapes", [WHOLE_BLOCKS, ODD], ids=["whole blocks", "blocks across rows"])
def test_a_4bit_folder_gives_the_logits_of_its_decoded_weights(tmp_path, shapes, kept, nested, layer_loop):
    config = tiny.config(**shapes)
    packed, decoded = write_4bit(tmp_path, config, nested=nested, kept=kept)
    tokens, _, segments, positions = rows(config)
    plain = tiny.model(decoded, config)
    ours = tiny.model(packed, config, load_in_4bit=True, layer_loop=layer_loop)
    weights = [leaf for leaf in leaves(ours.frozen) if isinstance(leaf, NF4Weight)]
    assert weights, "the weights stay packed"
    expected = tiny.logits(plain, tokens, positions, segments)
    # float32, logits of a few units: only the order of sums differs
    np.testing.assert_allclose(tiny.logits(ours, tokens, positions, segments), expected, rtol=0, atol=2e-5)


def test_in_16_bits_a_packed_weight_is_its_decoded_weight_rounded(tmp_path):
    config = tiny.config(**WHOLE_BLOCKS)
    packed, decoded = write_4bit(tmp_path, config, nested=True)
    tokens, _, segments, positions = rows(config)
    ours = tiny.model(packed, config, load_in_4bit=True, dtype="bfloat16")
    plain = tiny.model(decoded, config, dtype="bfloat16")
    found, expected = (tiny.logits(model, tokens, positions, segments) for model in (ours, plain))
    # the same bfloat16 numbers go into the same products; fusions may round an intermediate once more or less
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    exact = tiny.logits(tiny.model(decoded, config), tokens, positions, segments)
    assert np.linalg.norm(found - expected) < 0.5 * np.linalg.norm(found - exact)


def test_a_4bit_folder_loaded_in_16_bits_is_decoded(tmp_path):
    config = tiny.config(**WHOLE_BLOCKS)
    packed, decoded = write_4bit(tmp_path, config, nested=True, kept=KEPT)
    ours, plain = tiny.model(packed, config), tiny.model(decoded, config)
    assert ours.plan == plain.plan
    steps.assert_same(ours.frozen, plain.frozen)


@pytest.mark.exhaustive("blocks across rows")
@pytest.mark.parametrize("shapes", [WHOLE_BLOCKS, ODD], ids=["whole blocks", "blocks across rows"])
def test_quantising_while_loading_gives_the_4bit_folders_model(tmp_path, shapes):
    config = tiny.config(**shapes)
    packed, _ = write_4bit(tmp_path, config, nested=True)
    plain = tiny.write_folder(tmp_path / "plain", config, tiny.arrays(config))
    ours, stored = (tiny.model(folder, config, load_in_4bit=True) for folder in (plain, packed))
    assert ours.plan == stored.plan
    for mine, theirs in zip(leaves(ours.frozen), leaves(stored.frozen), strict=True):
        if isinstance(mine, NF4Weight):
            steps.assert_same(mine, theirs)
        else:
            assert np.array_equal(mine, theirs)


def test_no_array_is_looked_at_before_all_are_under_way(tmp_path, monkeypatch):
    config = tiny.config(**WHOLE_BLOCKS)
    folder = tiny.write_folder(tmp_path / "model", config, tiny.arrays(config))
    joined, join = [], NF4Weight.concatenate
    monkeypatch.setattr(NF4Weight, "concatenate", lambda self, others: joined.append(len(others)) or join(self, others))
    monkeypatch.setattr(np, "array_equal", lambda *_: pytest.fail("the parts' maps are fetched to be compared"))
    tiny.model(folder, config, load_in_4bit=True)
    assert set(joined) == {1, 2}  # gate and up, queries and keys and values


@pytest.mark.parametrize(("ahead", "waits"), [(0, True), (2**29, False)])
def test_what_is_being_sent_is_bounded(tmp_path, monkeypatch, ahead, waits):
    config = tiny.config(**WHOLE_BLOCKS)
    folder = tiny.write_folder(tmp_path / "model", config, tiny.arrays(config))
    waited = []

    class Sent:
        def __init__(self, array):
            self.array = array

        def block_until_ready(self):
            waited.append(self.array.block_until_ready())

        def __array__(self, *_, **__):
            return np.asarray(self.array)

    looked_at = load._is_finite
    monkeypatch.setattr(load, "_is_finite", lambda arrays: Sent(looked_at(arrays)))
    monkeypatch.setattr(load, "_AHEAD", ahead)
    tiny.model(folder, config, load_in_4bit=True)
    assert len(waited) == (len(tiny.arrays(config)) - 1 if waits else 0)


def test_blocks_of_another_size_are_refused_by_name(tmp_path):
    config = tiny.config(**WHOLE_BLOCKS)
    packed, _ = write_4bit(tmp_path, config, nested=True)
    original = convert_weights.stream(packed)

    def rewritten():
        for path, tensor in original:
            if path == "layers.1.self_attn.k_proj.weight":
                scales = tensor.absmax[::2]
                tensor = nf4.NF4Tensor(
                    tensor.codes,
                    nf4.decode_absmax(tensor)[::2].copy(),
                    tensor.quant_map,
                    tensor.shape,
                    tensor.dtype,
                    128,
                )
                assert len(scales) * 128 == tensor.codes.size * 2
            yield path, tensor

    saving.save(tmp_path / "other", rewritten(), source=packed)
    with pytest.raises(ConvertError, match=r"other: layers\.1\.self_attn\.k_proj\.weight: .*expected blocks of 64"):
        tiny.model(tmp_path / "other", config, load_in_4bit=True)


@pytest.mark.exhaustive("4 bits-unroll")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
@pytest.mark.parametrize("source", ["16 bits", "4 bits"])
def test_device_memory_stays_at_the_4bit_model_and_one_layer(tmp_path, monkeypatch, layer_loop, source):
    config = tiny.config(hidden_size=128, intermediate_size=256, num_hidden_layers=8)
    if source == "4 bits":
        folder, _ = write_4bit(tmp_path, config, nested=True)
    else:
        folder = tiny.write_folder(tmp_path / "plain", config, tiny.arrays(config))
    layer = sum(array.nbytes for name, array in tiny.arrays(config).items() if "layers.3." in name)
    gc.collect()
    others = [weakref.ref(array) for array in jax.live_arrays()]
    known = {id(ref()) for ref in others}
    seen = []

    def watched(place, *arguments):
        result = place(*arguments)
        seen.append(sum(array.nbytes for array in jax.live_arrays() if id(array) not in known))
        return result

    place, quantize = places.Places.put, load.quantize_matrix
    monkeypatch.setattr(places.Places, "put", lambda *arguments: watched(place, *arguments))
    monkeypatch.setattr(load, "quantize_matrix", lambda *arguments: watched(quantize, *arguments))
    model = tiny.model(folder, config, load_in_4bit=True, layer_loop=layer_loop)
    whole = sum(array.nbytes for array in jax.tree.leaves(model.frozen))
    assert len(seen) == (8 if source == "4 bits" else 64)
    assert whole < 8 * layer / 4, "the model is in 4 bits"
    assert max(seen) <= whole + layer


def bytes_by_device(arrays):
    """Bytes of arrays on each device."""
    found = collections.Counter()
    for array in arrays:
        part = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        found.update(dict.fromkeys(array.sharding.device_set, part))
    return found


@pytest.mark.exhaustive("4 bits-scan")
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
@pytest.mark.parametrize("load_in_4bit", [True, False], ids=["4 bits", "32 bits"])
def test_no_device_holds_the_model_while_it_is_loaded_onto_a_mesh(tmp_path, monkeypatch, load_in_4bit, layer_loop):
    """Beside its share of the model, a device holds its share of a layer; the first one a layer, as it is read."""
    config = tiny.config(hidden_size=128, intermediate_size=256, num_hidden_layers=8, vocab_size=128)
    arrays = tiny.arrays(config)
    folder = tiny.write_folder(tmp_path / "model", config, arrays)
    gc.collect()
    others = [weakref.ref(array) for array in jax.live_arrays()]
    known = {id(ref()) for ref in others}
    peak = collections.Counter()

    def watched(function):
        def call(*arguments):
            nonlocal peak
            result = function(*arguments)
            peak |= bytes_by_device(array for array in jax.live_arrays() if id(array) not in known)  # the larger
            return result

        return call

    for owner, name in (
        (load, "_is_finite"),
        (places, "fuse_layer"),
        (places.Places, "spread"),
        (places.Places, "put"),
    ):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    options = {"dtype": "float32", "load_in_4bit": load_in_4bit, "layer_loop": layer_loop}
    model = load_opened(*tiny.opened(folder, **options), make_mesh(fsdp=8))
    whole = sum(array.nbytes for array in jax.tree.leaves(model.frozen))
    share = max(bytes_by_device(jax.tree.leaves(model.frozen)).values())
    layer = sum(array.nbytes for name, array in arrays.items() if "layers.3." in name)
    first, *rest = (peak[device] for device in jax.devices())
    assert len(rest) == 7 and share < whole / 4, "vectors and the maps of codes are on every device"
    assert max(rest) < share + layer / 7
    # Parts, and what they are joined to: of a layer in 4 bits both are less than one that is not.
    assert first < share + layer * (1 if load_in_4bit else 2)
    assert first < whole


def test_a_checkpoint_of_trained_weights_does_not_know_its_mesh(tmp_path):
    """Over `tensor` frozen weights of several projections are held apart; trained ones are what the state names."""
    folder = tiny.write_folder(tmp_path / "model", config := tiny.config(), tiny.arrays(config))
    options = {"dtype": "float32", "load_in_4bit": False, "full_finetuning": True}
    meshes = {"one": None, "tensor": make_mesh(fsdp=2, tensor=2)}
    models = {name: load_opened(*tiny.opened(folder, **options), mesh).trainable for name, mesh in meshes.items()}
    for name, other in (("one", "tensor"), ("tensor", "one")):
        checkpoints = Checkpoints(tmp_path / name)
        checkpoints.save(models[name], Progress(1))
        checkpoints.wait()
        found = checkpoints.load(1, jax.tree.map(lambda array: array * 0, models[other]))
        checkpoints.close()
        for new, old, whole in zip(*map(jax.tree.leaves, (found, models[other], models["one"])), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
            np.testing.assert_array_equal(new, whole)


def test_host_memory_stays_at_one_shard(tmp_path, monkeypatch):
    config = tiny.config(hidden_size=128, intermediate_size=256, num_hidden_layers=8)
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny.arrays(config).items()}
    shard = 300_000
    folder = tiny.write_folder(tmp_path, config, arrays, max_shard_bytes=shard)
    assert len(list(folder.glob("*.safetensors"))) > 5
    alive, seen = [], []
    read = convert_weights.Checkpoint.read

    def watched(checkpoint, name):
        array = read(checkpoint, name)
        alive.append(weakref.ref(array))
        seen.append(sum(found.nbytes for ref in alive if (found := ref()) is not None))
        return array

    monkeypatch.setattr(convert_weights.Checkpoint, "read", watched)
    monkeypatch.setattr(load, "_AHEAD", shard // 3)
    tiny.model(folder, config, load_in_4bit=True)
    assert len(seen) == len(arrays)
    assert max(seen) <= shard < sum(array.nbytes for array in arrays.values()) / 5


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_both_loops_hold_the_same_random_model(load_in_4bit):
    scan, unroll = (
        FastLanguageModel.from_config(tiny.CONFIG, load_in_4bit=load_in_4bit, layer_loop=loop, dtype="float32")
        for loop in ("scan", "unroll")
    )
    steps.assert_same(tiny.by_layer(scan.frozen, scan.plan), tiny.by_layer(unroll.frozen, unroll.plan))
    trained, total = scan.num_parameters()
    expected = sum(array.size for array in tiny.arrays(tiny.CONFIG).values())
    assert (trained, total) == (0, expected)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, NF4Weight))


def test_no_array_has_a_program_of_its_own_to_be_sent_or_placed(tmp_path, caplog):
    """Of shapes that no other test has; `jnp.asarray` of a NumPy array would be one, `jnp.zeros` another."""
    config = tiny.config(hidden_size=56, intermediate_size=88, vocab_size=103)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        tiny.model(tmp_path, config)
    names = [record.message for record in caplog.records if record.message.startswith("Compiling")]
    assert any("_put" in name for name in names)
    assert not [name for name in names if "stage" in name or "broadcast_in_dim" in name]
