"""Names of other versions and libraries in LoRA files: an adapter's own, prefixes, routers and experts one by one."""

import functools

import numpy as np
import pytest

from convert.adapter_config import rank_and_alpha, tuned_name
from convert.adapters import open_adapter, write_adapter
from convert.errors import ConvertError
from convert.families import FAMILIES
from convert.inspect import inspect
from convert.merge import merge
from convert.model.paths import WeightPath
from convert.weights import open_weights
from tests.support.family_mixtures import MIXTURES
from tests.support.folders import read_adapter, write_checkpoint, write_peft
from tests.support.tiny import arrays

PATHS = [f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"]
#: What other versions put before the names of a text model -> a regular expression for these modules.
STARTS = {
    "model.": r"model\.layers\.\d+\.self_attn\.[qv]_proj",
    "model.language_model.": r"(?i)(?:.*?(?:Language|text).*?SELF_ATTN.*?[qv]_proj)",
    "language_model.model.": r"language_model\..*",
    "language_model.": ["language_model.layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "q_proj", "v_proj"],
}


write = functools.partial(write_peft, r=2, lora_alpha=6)


def pairs(names, sizes=(8, 8), rank=2, middle=""):
    rng, (rows, columns) = np.random.default_rng(0), sizes
    shapes = {f"lora_A{middle}.weight": (rank, columns), f"lora_B{middle}.weight": (rows, rank)}
    return {f"{name}.{leaf}": rng.random(shape, np.float32) for name in names for leaf, shape in shapes.items()}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("start", STARTS)
def test_a_text_model_inside_another(start, family, tmp_path):
    """Rank and alpha by the file's names, and the same in a folder that is written again."""
    names, family = [path.replace("layers", f"{start}layers", 1) for path in PATHS], FAMILIES[family]
    settings = {"target_modules": STARTS[start], "alpha_pattern": {rf"{start}layers.1.self_attn.q_proj": 9}}
    saved = {"modules_to_save": [f"{start}embed_tokens"]} if start != "model." else {}
    table = np.ones((5, 8), np.float32)
    tensors = pairs(names) | ({f"{start}embed_tokens.weight": table} if saved else {})
    config, found = read_adapter(write(tmp_path / "one", tensors, **settings, **saved), family=family)
    expected = {f"{path}.lora_{side}" for path in PATHS for side in "AB"}
    assert found.keys() == expected | ({"embed_tokens.modules_to_save.weight"} if saved else set())
    alphas = {path: rank_and_alpha(config, tuned_name(path, family)) for path in PATHS}
    assert alphas == dict.fromkeys(PATHS, (2, 6)) | {"layers.1.self_attn.q_proj": (2, 9)}
    write_adapter(tmp_path / "two", config, found, family=family)
    again, same = read_adapter(tmp_path / "two", family=family)
    assert all(np.array_equal(same[name], found[name]) for name in found) and same.keys() == found.keys()
    assert {path: rank_and_alpha(again, tuned_name(path, family)) for path in PATHS} == alphas


def test_an_adapters_own_name_is_left_out(tmp_path):
    names = [f"model.{path}" for path in PATHS]
    tensors = pairs(names, middle=".default") | {f"{names[0]}.lora_magnitude_vector.default.weight": np.ones(8, "f4")}
    folder = write(tmp_path / "one", tensors, target_modules=["q_proj", "v_proj"], use_dora=True)
    with pytest.raises(ConvertError, match=r"layers.0.self_attn.v_proj \(needs lora_magnitude_vector"):
        read_adapter(folder)
    tensors |= {f"{name}.lora_magnitude_vector.default.weight": np.ones(8, np.float32) for name in names}
    folder = write(tmp_path / "two", tensors, target_modules=["q_proj", "v_proj"], use_dora=True)
    assert len(read_adapter(folder)[1]) == 3 * len(PATHS)
    both = pairs(names[:1], middle=".one") | pairs(names[:1], middle=".other")
    with pytest.raises(ConvertError, match=r"one adapter's LoRA tensors .*, each once, got .*lora_B.other"):
        read_adapter(write(tmp_path / "both", both, target_modules=["q_proj"]))


def experts_one_by_one(weights, names, layer=1, rank=2, middle="mlp"):
    """Arrays of adapters on each expert of a layer, and s·B·A of each by its projection's path, for s = 1."""
    tensors, deltas = {}, {}
    for number, (part, own) in enumerate(names.items()):
        path = f"layers.{layer}.mlp.experts.{part}.weight"
        experts, *sizes = weights.specs[path].shape
        found = pairs([f"model.layers.{layer}.{middle}.experts.{x}.{own}" for x in range(experts)], sizes, rank)
        tensors |= {name: array * (number + 1) for name, array in found.items()}
        a, b = (np.stack([v for k, v in found.items() if f"lora_{side}" in k]) * (number + 1) for side in "AB")
        deltas[path] = b @ a
    return tensors, deltas


@pytest.mark.parametrize(
    ("family", "parts", "settings"),
    [
        ("olmoe", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}, {}),
        ("mixtral", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}, {"use_rslora": True}),
        ("olmoe", {"up_proj": "up_proj"}, {"target_modules": "all-linear"}),
    ],
)
def test_experts_one_by_one(family, parts, settings, tmp_path):
    config = MIXTURES[family]
    write_checkpoint(tmp_path / "model", arrays(config).items(), config)
    weights, middle = open_weights(tmp_path / "model"), "block_sparse_moe" if family == "mixtral" else "mlp"
    tensors, deltas = experts_one_by_one(weights, parts, middle=middle)
    router = weights.specs["layers.1.mlp.router.weight"].shape
    one = pairs([f"model.layers.1.{middle}.gate"], router)
    a, b = one.values()
    settings = {"target_modules": [*parts.values(), "gate"], "lora_dropout": 0.1, **settings}
    folder = write(tmp_path / "adapter", tensors | one, layers_to_transform=None, **settings)
    assert inspect(folder).parameters == sum(array.size for array in (tensors | one).values())
    merge(tmp_path / "model", folder, tmp_path / "merged")
    merged, scale = open_weights(tmp_path / "merged"), 6 / 2**0.5 if settings.get("use_rslora") else 3.0
    for path, delta in (deltas | {"layers.1.mlp.router.weight": b @ a}).items():
        change = merged.read(path) - weights.read(path)
        np.testing.assert_allclose(change, delta * np.float32(scale), rtol=0, atol=1e-4)  # float32, up to 100
    opened = open_adapter(folder, family=weights.family, specs=weights.specs.values())
    assert opened.config.lora_dropout == 0 and len(opened.stored) == len(tensors) + 2
    write_adapter(tmp_path / "again", opened.config, {path: opened.read(path) for path in opened.tensors},
                  family=weights.family)  # fmt: skip
    merge(tmp_path / "model", tmp_path / "again", tmp_path / "merged again")
    for path in deltas:
        np.testing.assert_array_equal(open_weights(tmp_path / "merged again").read(path), merged.read(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.1.up_proj.lora_B.weight"), "a B .* each of the experts 0 to"),
        (lambda t: t.update(pairs(["model.layers.1.mlp.experts.99999999.up_proj"])), "each of the experts 0 to"),
        (lambda t: t.update(pairs(["model.layers.1.mlp.experts.0.up_proj"], rank=3)), "of one shape and dtype"),
    ],
)
def test_experts_that_are_not_alike_are_refused(change, message, tmp_path):
    config = MIXTURES["olmoe"]
    write_checkpoint(tmp_path / "model", arrays(config).items(), config)
    tensors, _ = experts_one_by_one(open_weights(tmp_path / "model"), {"up_proj": "up_proj"})
    change(tensors)
    with pytest.raises(ConvertError, match=f"layers.1.mlp.experts.gate_up_proj: expected .*{message}"):
        open_adapter(write(tmp_path / "adapter", tensors, target_modules=["up_proj"]), family=FAMILIES["olmoe"])


def test_experts_of_other_scales_are_refused(tmp_path):
    config = MIXTURES["olmoe"]
    write_checkpoint(tmp_path / "model", arrays(config).items(), config)
    tensors, _ = experts_one_by_one(open_weights(tmp_path / "model"), {"up_proj": "up_proj"})
    settings = {"target_modules": ["up_proj"], "alpha_pattern": {"experts.1.up_proj": 8}}
    message = r"one rank and lora_alpha for the experts of a layer, got rank 2 with lora_alpha 6, rank 2 with .* 8"
    with pytest.raises(ConvertError, match=message):
        open_adapter(write(tmp_path / "adapter", tensors, **settings), family=FAMILIES["olmoe"])
    assert FAMILIES["gpt_oss"].expert_of("model.layers.1.mlp.experts.1.up_proj") is None  # rows by turns
    assert FAMILIES["olmoe"].module_path("model.layers.1.mlp.gate") == WeightPath(1, "mlp", "router", "")
