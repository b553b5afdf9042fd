"""Checkpoints: what goes in comes out bit for bit, only whole ones are found, the right ones are kept."""

import copy
import gc
import json
import resource
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints, SaveFailed, named_arrays
from fastjax.training.checkpoint_store import Unreadable, seal
from fastjax.training.loss_scale import LossScale
from fastjax.training.optimizers import OptimizerConfig, make_optimizer, rates_by_step
from tests.support import steps


class State(NamedTuple):
    trainable: dict
    moments: tuple
    key: jax.Array
    scale: LossScale | None


def state(seed=0, scale=True):
    rng = np.random.default_rng(seed)
    return State(
        {"layers": {0: jnp.asarray(rng.normal(size=(3, 4)), jnp.bfloat16)}, "none": jnp.zeros((0, 3))},
        (jnp.asarray(rng.integers(0, 255, 7), jnp.uint8), jnp.float32(rng.normal())),
        jax.random.key(seed),
        LossScale.start(2.0**15) if scale else None,
    )


@pytest.fixture
def made():
    found = []

    def make(folder, **options):
        found.append(Checkpoints(folder, **options))
        return found[-1]

    yield make
    for checkpoints in found:
        checkpoints.close()


def save(checkpoints, step, **progress):
    checkpoints.save(state(step), Progress(step, **progress))
    assert checkpoints.wait() == step


def test_round_trip(tmp_path, made):
    folder = tmp_path / "c %20#?ä"
    checkpoints = made(folder, extra=lambda step: {"position": {"step": step}, "text": "ä"})
    progress = Progress(12, 1.25, 8, 3, 4.5)
    checkpoints.save(state(1), progress)
    checkpoints.wait()
    again = made(folder)
    assert again.steps() == [12]
    found = again.metadata(12)
    assert Progress(**found["progress"]) == progress
    assert found["position"] == {"step": 12} and found["text"] == "ä"
    steps.assert_same(named_arrays(again.load(12, state(2))), named_arrays(state(1)))
    assert jax.random.key_impl(again.load(12, state(2)).key) == jax.random.key_impl(jax.random.key(0))


@pytest.mark.exhaustive(by="test_round_trip")
def test_orbax_reads_a_checkpoint(tmp_path, made):
    """Whoever trains in JAX opens it without this library."""
    import orbax.checkpoint as orbax

    save(made(tmp_path), 3)
    item = orbax.args.Composite(state=orbax.args.PyTreeRestore())
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler(state=orbax.PyTreeCheckpointHandler())) as reader:
        found = reader.restore(tmp_path / "3", args=item)["state"]
    wanted = {name: array for name, array in named_arrays(state(3)).items() if array.size}
    steps.assert_same(found, wanted)


def test_learning_rates_are_those_of_the_settings(tmp_path, made):
    """Checkpoints of before the optimizer's state held them have the same names."""
    params = {"w": jnp.ones((2, 2))}
    configs = [OptimizerConfig(learning_rate=rate, lr_scheduler_type="constant") for rate in (1.0, 0.25)]
    first, second = (make_optimizer(config, 10) for config in configs)
    _, stored = first.update(params, first.init(params), params)
    checkpoints = made(tmp_path)
    checkpoints.save(stored, Progress(1))
    checkpoints.wait()
    assert set(checkpoints.metadata(1)["arrays"]) == {"1.count", "1.mu.w", "1.nu.w", "3"}
    again = checkpoints.load(1, second.init(params))
    steps.assert_same(named_arrays(again), named_arrays(stored))
    np.testing.assert_array_equal(again[-1].by_step[:10], rates_by_step(configs[1], 10)[:10])


def test_moments_of_layers_one_by_one_are_read_into_their_stacks(tmp_path, made):
    """Until 2026-11-24 an optimizer held the moments of unrolled layers one by one."""

    def layers(count, **others):
        whole = np.random.default_rng(count).normal(size=(count, 3, 4)).astype(np.float32)
        return {number: {0: {"mlp": {"lora_A": part, **others}}} for number, part in enumerate(map(jnp.asarray, whole))}

    old = {"trainable": {"layers": layers(12)}, "mu": {"layers": layers(12, bias=jnp.ones(5))}}
    first = old["mu"]["layers"][0][0]["mlp"]
    stack = jnp.stack([layer[0]["mlp"]["lora_A"] for layer in old["mu"]["layers"].values()])
    stacks = {"layers": {0: {0: {"mlp": {"lora_A": stack, "bias": jnp.ones((12, 5))}}}}}
    new = {"trainable": old["trainable"], "mu": stacks}
    checkpoints = made(tmp_path)
    checkpoints.save(old, Progress(1))
    checkpoints.wait()
    found = checkpoints.load(1, jax.tree.map(jnp.zeros_like, new))
    steps.assert_same(named_arrays(found), named_arrays(new))
    assert first["lora_A"].shape == (3, 4)
    other = {"trainable": old["trainable"], "mu": {"layers": {0: {0: {"mlp": {"lora_A": stack[:11]}}}}}}
    with pytest.raises(
        ConfigError, match=r"mu\.layers\.0\.0\.mlp\.lora_A: expected float32\[11, 3, 4\], got float32\[3, 4\]"
    ):
        checkpoints.load(1, other)


def test_a_state_that_is_donated_after_the_call_is_saved_as_it_was(tmp_path, made):
    """The write goes on while the next step overwrites the arrays."""
    checkpoints, array = made(tmp_path), jnp.arange(3_000_000, dtype=jnp.float32)
    expected = np.array(array)
    checkpoints.save({"a": array}, Progress(1))
    jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array))
    checkpoints.wait()
    found = checkpoints.load(1, {"a": jnp.zeros(3_000_000)})
    np.testing.assert_array_equal(found["a"], expected)


def test_the_newest_and_the_best_are_kept(tmp_path, made):
    checkpoints = made(tmp_path, keep=2)
    save(checkpoints, 10, best_step=10)
    for step in (20, 30, 40):
        save(checkpoints, step, best_step=10)
    assert checkpoints.steps() == [40, 30, 10]
    save(checkpoints, 50, best_step=50)
    assert checkpoints.steps() == [50, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["40", "50"]


def test_later_steps_take_no_place_of_the_newest(tmp_path, made):
    """They are damaged, or the run would have gone on from them; the one that it went on from stays."""
    checkpoints = made(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        (tmp_path / str(step)).mkdir()
    save(checkpoints, 25, best_step=10)
    assert checkpoints.steps() == [40, 30, 25, 20, 10]
    save(checkpoints, 28)
    assert checkpoints.steps() == [40, 30, 28, 25]
    save(checkpoints, 30)  # in the place of the damaged one
    assert checkpoints.steps() == [40, 30, 28]
    steps.assert_same(named_arrays(checkpoints.load(30, state(2))), named_arrays(state(30)))


def test_what_a_killed_run_left_is_neither_found_nor_kept(tmp_path, made):
    save(made(tmp_path), 3)
    for name in ("4.unfinished", "5.orbax-checkpoint-tmp", "2.deleted"):
        shutil.copytree(tmp_path / "3", tmp_path / name)
    assert made(tmp_path).steps() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, made):
    checkpoints = made(tmp_path)
    save(checkpoints, 1)
    other = state()._replace(trainable={"layers": {0: jnp.zeros((3, 5), jnp.bfloat16)}}, scale=None)
    with pytest.raises(ConfigError) as error:
        checkpoints.load(1, other)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/1 is a checkpoint of another model or adapter: ")
    assert "trainable.layers.0: expected bfloat16[3, 5], got bfloat16[3, 4]" in message
    assert "scale.scale: expected nothing, got float32[]" in message


def test_a_write_that_fails_says_so_and_leaves_the_others(tmp_path, made):
    """The folder turns into a file behind the writer's back."""
    checkpoints = made(tmp_path / "c")
    save(checkpoints, 1)
    kept = tmp_path / "kept"
    (tmp_path / "c").rename(kept)
    (tmp_path / "c").write_text("in the way")
    with pytest.raises(SaveFailed, match=r"^the checkpoint of step 2 could not be written to .*/c: "):
        checkpoints.save(state(2), Progress(2))
        checkpoints.wait()
    (tmp_path / "c").unlink()
    kept.rename(tmp_path / "c")
    save(checkpoints, 3)
    assert made(tmp_path / "c").steps() == [3]


def test_a_disk_that_takes_no_more_is_told_without_tracebacks(tmp_path, made, capfd, caplog):
    """All arrays are written at once: none may be at work when the folder is removed."""
    checkpoints = made(tmp_path)
    noise = np.random.default_rng(0).normal(size=(20, 200, 200)).astype(np.float32)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            checkpoints.save({str(index): jnp.asarray(array) for index, array in enumerate(noise)}, Progress(1))
            with pytest.raises(SaveFailed, match=f"^the checkpoint of step 1 could not be written to {tmp_path}: "):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        gc.collect()
    assert capfd.readouterr() == ("", "")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_of_an_array_is_found_and_the_array_named(tmp_path, made):
    """Compression alone keeps no checksum: the array would come back with other values."""
    checkpoints = made(tmp_path)
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float32)
    mixed = {"noisy": {"array": noise}, "plain": {"array": jnp.ones(1)}}
    checkpoints.save(mixed, Progress(1))
    checkpoints.wait()
    file = max((tmp_path / "1").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(
        Unreadable, match=f"^{tmp_path}/1 cannot be read: the array noisy.array is damaged: .*Digest mismatch"
    ):
        checkpoints.load(1, mixed)
    with pytest.raises(Unreadable, match="the array noisy.array is damaged"):
        checkpoints.load(1, mixed["noisy"], "noisy")
    np.testing.assert_array_equal(checkpoints.load(1, mixed["plain"], "plain")["array"], [1.0])


@pytest.fixture
def metadata_of(tmp_path, made):
    """A checkpoint of step 1, and a function that gives its metadata another content."""
    checkpoints = made(tmp_path, extra=lambda step: {"config": {"lora": {"r": 16}}, "text": "ä"})
    save(checkpoints, 1)
    file = tmp_path / "1" / "_CHECKPOINT_METADATA"
    original = json.loads(file.read_text())

    def change(edit):
        content = copy.deepcopy(original)
        edit(content["custom_metadata"])
        file.write_text(json.dumps(content))
        return checkpoints

    return change


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["progress"].update(step=0),
        lambda m: m["config"]["lora"].update(r=17),
        lambda m: m["arrays"].update({"key": [[3], "uint32"]}),
        lambda m: m.update(format=3),
        lambda m: m.pop("format"),
        lambda m: m.pop("checksum"),
        lambda m: m.pop("arrays"),
        lambda m: m.clear(),
    ],
)
def test_metadata_that_were_changed_are_unreadable(tmp_path, metadata_of, edit):
    """Whatever they say, of another version too: only metadata whose checksum fits say anything."""
    with pytest.raises(Unreadable, match=rf"^{tmp_path}/1 cannot be read: _CHECKPOINT_METADATA is damaged: "):
        metadata_of(edit).metadata(1)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", bytes(545), b"[" * 100_000, b'{"a": 1}'])
def test_metadata_that_are_none_are_unreadable(tmp_path, made, content):
    (tmp_path / "999").mkdir()
    if content is not None:
        (tmp_path / "999" / "_CHECKPOINT_METADATA").write_bytes(content)
    with pytest.raises(Unreadable, match=rf"^{tmp_path}/999 cannot be read: _CHECKPOINT_METADATA is (damaged|missing)"):
        made(tmp_path).metadata(999)


def test_a_checkpoint_under_the_name_of_another_step_is_unreadable(tmp_path, metadata_of):
    shutil.copytree(tmp_path / "1", tmp_path / "5")
    with pytest.raises(Unreadable, match=f"^{tmp_path}/5 cannot be read: _CHECKPOINT_METADATA is damaged: .* step 1"):
        metadata_of(lambda m: None).metadata(5)


def test_whole_metadata_of_a_later_format_are_refused(tmp_path, metadata_of):
    def later(found):
        found |= {"format": 5, "another": "field"}
        found["checksum"] = seal(found)

    with pytest.raises(ConfigError, match=f"^{tmp_path}/1: expected a checkpoint of format 4 or before, got 5"):
        metadata_of(later).metadata(1)
