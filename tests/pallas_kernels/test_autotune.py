"""Block sizes that were measured: which are looked up first, which are passed over, and no file is half-written."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import autotune
from pallas_kernels.attention.block_sizes import SHIPPED
from pallas_kernels.attention.mosaic_sm90 import config as mosaic
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.triton import config as triton
from pallas_kernels.autotune import Kernel, Table, best, cache_file, keep, read, ship, write


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int
    wide: bool = False


GUESS, OTHER, THIRD = Blocks(1), Blocks(2), Blocks(3, True)
CANDIDATES = [GUESS, OTHER, THIRD]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, platform="cuda"))):
        yield tmp_path


@pytest.fixture
def kernel(tmp_path):
    (tmp_path / "kernel.py").write_text("x = 1\n")
    return Kernel("op.kernel", (tmp_path / "kernel.py",), tmp_path / "shipped.json")


def test_measured_here_then_shipped_then_the_guess(kernel):
    assert best(kernel, "D=64", CANDIDATES) == GUESS
    ship(kernel.shipped, {(kernel, "D=64"): OTHER}, "2026-11-21")
    assert best(kernel, "D=64", CANDIDATES) == OTHER
    assert keep(kernel, "D=64", THIRD) == cache_file()
    assert best(kernel, "D=64", CANDIDATES) == THIRD
    assert best(kernel, "D=128", CANDIDATES) == GUESS


def test_another_card_another_jax_another_source_are_other_entries(kernel, monkeypatch, tmp_path):
    keep(kernel, "D=64", OTHER)
    card = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=card)):
        assert best(kernel, "D=64", CANDIDATES) == GUESS
    with monkeypatch.context() as patch:
        patch.setattr(autotune.jax, "__version__", "9.9.9")
        assert best(kernel, "D=64", CANDIDATES) == GUESS
    (tmp_path / "changed.py").write_text("x = 2\n")
    changed = dataclasses.replace(kernel, sources=(tmp_path / "changed.py",))
    assert best(changed, "D=64", CANDIDATES) == GUESS
    assert best(kernel, "D=64", CANDIDATES) == OTHER


def test_entries_are_added_and_shipped_beside_those_of_other_cards(kernel):
    keep(kernel, "D=64", OTHER), keep(kernel, "D=128", THIRD)
    assert [best(kernel, facts, CANDIDATES) for facts in ("D=64", "D=128")] == [OTHER, THIRD]
    write(kernel.shipped, Table({"NVIDIA X | op.kernel | D=64": {"rows": 9}}, {"NVIDIA X": "once"}))
    ship(kernel.shipped, {(kernel, "D=64"): OTHER}, "today")
    assert read(kernel.shipped).made == {"NVIDIA X": "once", "NVIDIA H200": "today"}
    ship(kernel.shipped, {(kernel, "D=128"): THIRD}, "later"), ship(kernel.shipped, {(kernel, "D=64"): OTHER}, "later")
    assert read(kernel.shipped).made["NVIDIA H200"] == "today; later"
    assert read(kernel.shipped).entries == {
        "NVIDIA X | op.kernel | D=64": {"rows": 9},
        "NVIDIA H200 | op.kernel | D=64": {"rows": 2, "wide": False},
        "NVIDIA H200 | op.kernel | D=128": {"rows": 3, "wide": True},
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "in JSON, got"),
        ('{"format": "fastjax block sizes 1", "entr', "in JSON, got"),
        ("\ufffd\x00", "in JSON, got"),
        ("[]", "got another file"),
        ('{"format": "other", "made": {}, "entries": {}}', "got another file"),
        ('{"format": "fastjax block sizes 1", "made": {}, "entries": []}', 'objects "entries" and "made"'),
    ],
)
def test_a_file_that_is_no_table_is_warned_of_once_and_never_overwritten(kernel, text, message):
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text)
    with pytest.warns(UserWarning, match=f"kernels run with their own guess: .*autotune.json: expected .*{message}"):
        assert best(kernel, "D=64", CANDIDATES) == GUESS
    assert best(kernel, "D=64", CANDIDATES) == GUESS
    with pytest.raises(ValueError, match=message):
        keep(kernel, "D=64", OTHER)
    assert cache_file().read_text() == text


def test_block_sizes_that_the_kernel_does_not_list_are_passed_over(kernel):
    keep(kernel, "D=64", Blocks(7))
    with pytest.warns(UserWarning, match=r"passed over {'rows': 7, .* not among the 3 block sizes .* --autotune"):
        assert best(kernel, "D=64", CANDIDATES) == GUESS


def test_a_cache_that_cannot_be_reached_is_none(kernel, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert best(kernel, "D=64", CANDIDATES) == GUESS
    with pytest.raises(OSError):
        keep(kernel, "D=64", OTHER)


def test_writing_is_all_or_nothing(kernel, monkeypatch):
    keep(kernel, "D=64", OTHER)
    before = cache_file().read_text()

    def broken(*paths):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space left"):
        keep(kernel, "D=64", THIRD)
    assert cache_file().read_text() == before
    assert [file.name for file in cache_file().parent.iterdir()] == ["autotune.json"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "fastjax" / "autotune.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "fastjax" / "autotune.json"


def test_what_is_shipped_for_attention_is_among_what_its_kernels_may_run_with():
    table = read(SHIPPED)
    for key, fields in table.entries.items():
        card, name, facts = key.split(" | ")
        assert card in table.made
        _, size, value_size, *flags = facts.split()
        size, value_size = int(size.removeprefix("D=")), int(value_size.removeprefix("Dv="))
        options = Options(
            1.0,
            causal="causal" in flags,
            sliding_window=1 if "window" in flags else None,
            logits_soft_cap=1.0 if "cap" in flags else None,
            dropout_rate=0.5 if "dropout" in flags else 0.0,
        )
        assert fields in [dataclasses.asdict(each) for each in listed(name, size, value_size, options, flags)], key


def listed(name, size, value_size, options, flags):
    """The block sizes that a kernel of attention may run with on Hopper."""
    _, implementation, kernel = name.split(".")
    if implementation == "triton":
        guess = triton.triton_config(size, value_size, options, (9, 0))
        return triton.candidates(kernel, getattr(guess, kernel))
    if kernel == "dkv":
        return mosaic.dkv_candidates(size, value_size, options)
    about = {"documents": "documents" in flags, "grouped": "grouped" in flags}
    if kernel == "forward":
        return mosaic.forward_candidates(size, value_size, options, **about)
    return mosaic.dq_candidates(size, value_size, options, **about)


@pytest.mark.parametrize("size", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("name", ["mosaic.forward", "mosaic.dq", "mosaic.dkv", "triton.forward", "triton.dkv"])
def test_candidates_are_different_and_begin_with_the_guess(name, size):
    options = Options(1.0)
    found = listed(f"attention.{name}", size, size, options, [])
    guesses = {
        "mosaic.forward": mosaic.forward_config(size, size, options, documents=False, grouped=False),
        "mosaic.dq": mosaic.dq_config(size, size, options, documents=False, grouped=False),
        "mosaic.dkv": mosaic.dkv_config(size, size, options),
        "triton.forward": triton.triton_config(size, size, options, (9, 0)).forward,
        "triton.dkv": triton.triton_config(size, size, options, (9, 0)).dkv,
    }
    assert found[0] == guesses[name]
    assert 2 < len(found) == len(set(found)) < 40
    pairs = listed(f"attention.{name}", size, size, options, ["grouped"])
    assert set(found) <= set(pairs) and pairs[0] == found[0]
    assert any(getattr(config, "heads", 1) == 2 for config in pairs) == (name in ("mosaic.forward", "mosaic.dq"))


def test_attention_runs_with_what_was_measured():
    """The kernels ask for the block sizes of their own call."""
    options = Options(128**-0.5)
    facts = "bfloat16 D=128 Dv=128 causal documents grouped"
    chosen = triton.candidates("dq", triton.triton_config(128, 128, options, (9, 0)).dq)[-1]
    keep(triton.KERNELS["dq"], facts, chosen)
    q, k = (jax.ShapeDtypeStruct((1, 64, heads, 128), jnp.bfloat16) for heads in (8, 2))
    assert triton.chosen_config(q, k, k, options, documents=True).dq == chosen
    assert triton.chosen_config(q, k, k, options, documents=False).dq != chosen
    assert triton.chosen_config(q, q, q, options, documents=True).dq != chosen
    assert json.loads(cache_file().read_text())["format"]
