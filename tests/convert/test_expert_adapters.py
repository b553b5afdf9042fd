"""Adapters on experts: PEFT's names, nesting and order, older versions, Unsloth's layout; merged expert by expert."""

import functools

import numpy as np
import pytest

from convert.adapter_config import AdapterConfig
from convert.adapters import open_adapter, write_adapter
from convert.errors import ConvertError
from convert.families import family_for
from convert.formats import nf4
from convert.inspect import inspect
from convert.merge import merge
from convert.tensor_file import read_header, read_tensor
from convert.weights import open_weights
from tests.support.family_mixtures import MIXTURES
from tests.support.folders import read_adapter, write_checkpoint, write_peft
from tests.support.tiny import arrays

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
RANK, ALPHA = 3, 8.0
#: A family whose classes hold an expert's matrix as [out, in], and the one that transposes it.
FAMILIES = ("qwen3_moe", "gpt_oss")


def model(folder, family, **changes):
    config = MIXTURES[family] | changes
    write_checkpoint(folder, arrays(config).items(), config)
    return open_weights(folder)


def shapes(weights, layer, parameter):
    """(X, out, in) of the adapted matrices."""
    parts = [f"layers.{layer}.mlp.experts.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
    found = [weights.specs[path].shape for path in (parts[:2] if parameter == GATE_UP else parts[2:])]
    return found[0][0], sum(shape[1] for shape in found), found[0][2]


def random(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


#: An adapter folder by PEFT's own names.
write_stored = functools.partial(
    write_peft,
    r=RANK,
    lora_alpha=ALPHA,
    peft_version="0.21.2",
    target_modules=[],
    target_parameters=[GATE_UP, DOWN],
)


@pytest.mark.parametrize("parameters", [(GATE_UP, DOWN), (DOWN,), (GATE_UP,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_by_pefts_definition(family, parameters, tmp_path):
    """delta = einsum("ore,eri->eoi") of the arrays in the file, gate's rows before up's in the tree."""
    weights, rng = model(tmp_path / "model", family), np.random.default_rng(0)
    layer = MIXTURES[family]["num_hidden_layers"] - 1
    stored, expected = {}, {}
    for parameter in parameters:
        experts, rows, columns = shapes(weights, layer, parameter)
        inner = ".base_layer" if parameter != parameters[-1] else ""
        start = f"model.layers.{layer}.mlp.experts{inner}"
        a, b = random(rng, experts * RANK, columns), random(rng, rows, RANK * experts)
        stored |= {f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": b}
        delta = np.einsum("ore,eri->eoi", b.reshape(rows, RANK, experts), a.reshape(experts, RANK, columns))
        if family == "gpt_oss" and parameter == GATE_UP:
            delta = np.concatenate([delta[:, ::2], delta[:, 1::2]], axis=1)
        expected[f"layers.{layer}.{parameter}"] = delta
    others = [number for number, one in enumerate(_sparse(weights)) if one and number != layer]
    for other in others:
        stored |= {name.replace(f".{layer}.", f".{other}."): array for name, array in list(stored.items())}
    folder = write_stored(tmp_path / "adapter", stored, target_parameters=list(parameters))
    config, found = read_adapter(folder, family=weights.family, specs=weights.specs.values())
    for module, delta in expected.items():
        a, b = found[f"{module}.lora_A"], found[f"{module}.lora_B"]
        assert a.ndim == b.ndim == 3
        np.testing.assert_allclose(b @ a, delta, rtol=0, atol=1e-5)  # float32, a sum of three
    write_adapter(tmp_path / "again", config, found, family=weights.family)
    names = {f"base_model.model.{name}": array for name, array in stored.items()}
    header = read_header(tmp_path / "again" / "adapter_model.safetensors")
    written = {name: read_tensor(name, info) for name, info in header.items()}
    assert written.keys() == names.keys() and all(np.array_equal(written[name], names[name]) for name in names)
    assert inspect(folder).kind == "adapter" and inspect(folder).unsupported == ()


def _sparse(weights):
    count = weights.checkpoint.config["num_hidden_layers"]
    return [f"layers.{number}.mlp.router.weight" in weights.specs for number in range(count)]


def _one(weights, layer, order, version="0.21.2", slowest=False, **changes):
    """A folder's tensors of an adapter on down_proj with sizes in `order`, and the delta that they mean."""
    experts, rows, columns = shapes(weights, layer, DOWN)
    rng = np.random.default_rng(1)
    a, b = random(rng, experts, RANK, columns), random(rng, experts, rows, RANK)
    delta = b @ a
    if order == "swapped":  # A on the outputs
        a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
    flat = b.transpose(1, 0, 2) if slowest else b.transpose(1, 2, 0)
    start = f"model.layers.{layer}.mlp.experts"
    tensors = {
        f"{start}.lora_A.weight": np.ascontiguousarray(a.reshape(-1, a.shape[2])),
        f"{start}.lora_B.weight": np.ascontiguousarray(flat.reshape(b.shape[1], -1)),
    }
    return tensors, delta, {"target_parameters": [DOWN], "peft_version": version, **changes}


@pytest.mark.parametrize("slowest", [False, True])
@pytest.mark.parametrize(
    ("order", "version", "square"),
    [
        ("now", "0.21.2", False),
        ("swapped", "0.18.1", False),
        ("swapped", None, False),  # sizes tell
        ("now", "0.19.0", True),
        ("swapped", "0.18.2.dev0", True),
    ],
)
def test_orders_of_peft_and_unsloth(order, version, square, slowest, tmp_path):
    changes = {"moe_intermediate_size": 32} if square else {}
    weights = model(tmp_path / "model", "qwen3_moe", **changes)
    tensors, delta, settings = _one(weights, 3, order, version, slowest)
    folder = write_stored(tmp_path / "adapter", tensors, **settings)
    _, found = read_adapter(folder, family=weights.family, specs=weights.specs.values(), unsloth_expert_layout=slowest)
    a, b = (found[f"layers.3.{DOWN}.{leaf}"] for leaf in ("lora_A", "lora_B"))
    np.testing.assert_allclose(b @ a, delta, rtol=0, atol=1e-5)
    merge(tmp_path / "model", folder, tmp_path / "merged", unsloth_expert_layout=slowest)
    path = f"layers.3.{DOWN}.weight"
    change = open_weights(tmp_path / "merged").read(path) - weights.read(path)
    np.testing.assert_allclose(change, delta * np.float32(ALPHA / RANK), rtol=0, atol=3e-5)  # changes of up to 20


@pytest.mark.parametrize("dtype", [None, "nf4", "over nf4"])
@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_merged_expert_by_expert(family, dtype, tmp_path):
    """Rank and alpha by pattern; attention beside the experts; plain, in NF4 and trained over it."""
    weights, rng = model(tmp_path / "model", family), np.random.default_rng(2)
    config = AdapterConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj"],
        target_parameters=[GATE_UP, DOWN],
        rank_pattern={"experts.down_proj": 2},
        alpha_pattern={r".*\.2\..*gate_up_proj": 5.0},
        use_rslora=True,
    )
    found, wanted = {}, {}
    for path, spec in weights.specs.items():
        if path.endswith("q_proj.weight"):
            found[spec.path.with_leaf("lora_A")] = random(rng, RANK, spec.shape[1])
            found[spec.path.with_leaf("lora_B")] = random(rng, spec.shape[0], RANK)
    for layer in [number for number, one in enumerate(_sparse(weights)) if one]:
        for parameter in (GATE_UP, DOWN):
            experts, rows, columns = shapes(weights, layer, parameter)
            rank = 2 if parameter == DOWN else RANK
            a, b = random(rng, experts, rank, columns), random(rng, experts, rows, rank)
            found |= {f"layers.{layer}.{parameter}.lora_A": a, f"layers.{layer}.{parameter}.lora_B": b}
            alpha = 5.0 if parameter == GATE_UP and layer == 2 else ALPHA
            delta = np.float32(alpha / rank**0.5) * (b @ a)
            names = ("down_proj",) if parameter == DOWN else ("gate_proj", "up_proj")
            for part, change in zip(names, np.split(delta, len(names), axis=1), strict=True):
                wanted[f"layers.{layer}.mlp.experts.{part}.weight"] = change
    write_adapter(tmp_path / "adapter", config, found, family=family_for(MIXTURES[family]))
    if family == "gpt_oss" and dtype == "nf4":
        with pytest.raises(ConvertError, match="gpt_oss has no tensors of single experts"):
            merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged", dtype=dtype)
        return
    options = {"base_in_nf4": True} if dtype == "over nf4" else {"dtype": dtype}
    result = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged", **options)
    assert any("do not load this folder" in note for note in result.notes) == (dtype == "nf4")
    merged = open_weights(tmp_path / "merged")
    for path, change in wanted.items():
        before = weights.read(path)
        if dtype == "over nf4":
            before = np.stack([nf4.decode(nf4.encode(expert, nested=True)) for expert in before])
        expected = before + change
        if dtype == "nf4":
            expected = np.stack([nf4.decode(nf4.encode(expert, nested=True)) for expert in expected])
            error = np.abs(merged.read(path, packed=False) - expected)
            assert np.quantile(error, 0.99) < 1e-5  # rounded sums may be on either side of a bound
        else:
            np.testing.assert_allclose(merged.read(path), expected, rtol=0, atol=1e-5)
    path = "layers.2.self_attn.k_proj.weight"
    assert dtype is not None or np.array_equal(merged.read(path), weights.read(path))


def test_what_does_not_fit_is_named(tmp_path):
    weights = model(tmp_path / "model", "qwen3_moe", moe_intermediate_size=32)
    read = {"family": weights.family, "specs": weights.specs.values()}
    square, _, settings = _one(weights, 3, "now", version=None)
    with pytest.raises(ConvertError, match="experts.down_proj: peft_version: expected a version, .* got None"):
        open_adapter(write_stored(tmp_path / "square", square, **settings), **read)
    cut = {name: array[:, :-1] if "lora_A" in name else array for name, array in square.items()}
    with pytest.raises(ConvertError, match=r"expected A \[12, 32\] and B \[32, 12\] \(4 experts, rank 3\), got"):
        open_adapter(write_stored(tmp_path / "cut", cut, **settings), **read)
    inner = {name.replace("experts.", "experts.base_layer."): array for name, array in square.items()}
    with pytest.raises(ConvertError, match="expected only LoRA tensors of qwen3_moe modules"):
        open_adapter(write_stored(tmp_path / "inner", inner, **settings), **read)
    both = write_stored(tmp_path / "both", square, target_parameters=[GATE_UP, DOWN])
    with pytest.raises(ConvertError, match="experts.gate_up_proj: a target of adapter_config.json without arrays"):
        merge(tmp_path / "model", both, tmp_path / "merged")
    for fields in ({"use_dora": True}, {"lora_dropout": 0.1}, {"target_parameters": "experts"}):
        with pytest.raises(ConvertError, match=f"{next(iter(fields))}: expected"):
            AdapterConfig(**{"target_parameters": [DOWN], **fields})
    opened = open_adapter(write_stored(tmp_path / "listed", square, **settings), family=weights.family)
    with pytest.raises(ConvertError, match="expected an adapter opened with its model's weights"):
        opened.read(f"layers.3.{DOWN}.lora_A")
