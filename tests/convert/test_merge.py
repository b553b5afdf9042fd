"""Merged folders: every kind of adapter against plain NumPy, every format of the base, what goes along."""

import json

import ml_dtypes
import numpy as np
import pytest

from convert.adapters import AdapterConfig, rank_and_alpha, saves_whole, scaling, targets, write_adapter
from convert.card import Card, Training, read_training, write_card
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.families import family_for
from convert.families.llama import LLAMA as FAMILY
from convert.formats import nf4
from convert.merge import merge
from convert.merged_values import product
from convert.quantize import quantize
from convert.saving import save
from convert.weights import open_weights, stream
from tests.convert.conftest import CONFIG
from tests.support.families import CONFIGS as FAMILIES_CONFIGS
from tests.support.folders import lora_arrays, write_checkpoint

V, E, R = CONFIG["vocab_size"], CONFIG["hidden_size"], 3
BOTH = ["embed_tokens", "lm_head"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rows(config=CONFIG):
    return {row.path: row.shape for row in FAMILY.specs(config)}


def arrays(config, adapter, seed=1):
    """Random arrays of an adapter, of every module that its settings mean."""
    rng = np.random.default_rng(seed)
    shapes = {path: shape for path, shape in rows(config).items() if path.endswith(".weight")}
    shapes["lm_head.weight"] = (V, E)
    found = lora_arrays(adapter, ((path, shape) for path, shape in shapes.items() if path != "embed_tokens.weight"))
    for path, shape in shapes.items():
        module = path.removesuffix(".weight")
        name = FAMILY.module_name(module)
        if module == "embed_tokens" and targets(adapter, name):
            rank = rank_and_alpha(adapter, name)[0]
            found[f"{module}.lora_embedding_A"] = rng.standard_normal((rank, shape[0]))
            found[f"{module}.lora_embedding_B"] = rng.standard_normal((shape[1], rank))
        if len(shape) == 2 and adapter.use_dora and targets(adapter, name):
            size = shape[1] if module == "embed_tokens" else shape[0]
            found[f"{module}.lora_magnitude_vector"] = rng.uniform(1, 2, size)
        if saves_whole(adapter, name):
            found[f"{module}.modules_to_save.weight"] = rng.standard_normal(shape)
    return {path: array.astype(np.float32) for path, array in found.items()}


def expected(base, found, adapter, path):
    """The merged tensor in float64."""
    module = path.rpartition(".")[0]
    weight = np.asarray(base, np.float64)
    if path.endswith(".bias"):
        return weight
    scale = scaling(adapter, FAMILY.module_name(module))
    get = {key.removeprefix(module + "."): np.asarray(v, np.float64) for key, v in found.items() if module + "." in key}
    if "modules_to_save.weight" in get:
        return get["modules_to_save.weight"]
    axis = 1
    if "lora_embedding_A" in get:
        weight, axis = weight + scale * (get["lora_embedding_B"] @ get["lora_embedding_A"]).T, 0
    elif "lora_A" in get:
        weight = weight + scale * get["lora_B"] @ get["lora_A"]
    if "lora_magnitude_vector" in get:
        norm = np.linalg.norm(weight, axis=axis)
        weight = weight * np.expand_dims(get["lora_magnitude_vector"] / norm, axis)
    return weight


def check(folder, base, found, adapter, dtype):
    """Every tensor of a merged folder against `expected`, to one rounding of its dtype."""
    spacing = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    small = max(spacing * 2e-2, 2e-6)  # where terms of up to 10 cancel in float32
    for path, array in stream(folder):
        origin = base["embed_tokens.weight" if path == "lm_head.weight" and path not in base else path]
        right = expected(origin, found, adapter, path)
        assert array.dtype.name == dtype
        np.testing.assert_allclose(array.astype(np.float64), right, rtol=spacing, atol=small, err_msg=path)


CASES = {
    "plain": {"target_modules": ALL},
    "rsLoRA": {"target_modules": ALL, "use_rslora": True},
    "DoRA": {"target_modules": ALL, "use_dora": True},
    "patterns": {
        "target_modules": ALL,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "up_proj": 6},
        "alpha_pattern": {"k_proj": 3.5},
        "layers_to_transform": [1, 2],
    },
    "embedding and head": {"target_modules": ["v_proj", *BOTH]},
    "embedding and head with DoRA": {"target_modules": BOTH, "use_dora": True},
    "whole modules": {"target_modules": ["v_proj"], "modules_to_save": BOTH},
    "whole norms": {"target_modules": ["v_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    "head alone": {"target_modules": ["v_proj", "lm_head"]},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_adapter(make_folder, tmp_path, name, tied, monkeypatch):
    monkeypatch.setattr("convert.blocks.ELEMENTS", 128)  # a few rows a block
    adapter = AdapterConfig(r=R, lora_alpha=7, **CASES[name])
    config = CONFIG | {"tie_word_embeddings": tied}
    folder, _ = make_folder(config=config, max_shard_bytes=4000)
    base, found = dict(stream(folder)), arrays(config, adapter)
    write_adapter(tmp_path / "adapter", adapter, found)
    result = merge(folder, tmp_path / "adapter", tmp_path / "out", max_shard_bytes=3000)
    untied = tied and ("head" in name or name == "whole modules")
    assert result.untied == untied
    check(tmp_path / "out", base, found, adapter, "bfloat16")
    merged = open_weights(tmp_path / "out")
    assert ("lm_head.weight" in merged.specs) == (untied or not tied)
    assert merged.checkpoint.config["tie_word_embeddings"] == (tied and not untied)
    assert result.changed + result.copied == len(merged.specs) == result.written.tensors
    for path, array in stream(tmp_path / "out"):
        if not any(key.startswith(path.removesuffix("weight")) for key in found) and path in base:
            assert array.tobytes() == base[path].tobytes(), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_the_result(make_folder, tmp_path, dtype):
    adapter = AdapterConfig(r=R, target_modules=ALL)
    folder, _ = make_folder(config=CONFIG | {"torch_dtype": "float32"}, dtype=np.float32)
    found = arrays(CONFIG, adapter)
    write_adapter(tmp_path / "adapter", adapter, found)
    merge(folder, tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    check(tmp_path / "out", dict(stream(folder)), found, adapter, dtype)
    assert open_checkpoint(tmp_path / "out").config["torch_dtype"] == dtype


@pytest.mark.parametrize("nested", [False, True])
def test_a_4_bit_base_is_decoded_and_may_be_packed_again(make_folder, tmp_path, nested, monkeypatch):
    monkeypatch.setattr("convert.blocks.ELEMENTS", 128)
    folder, _ = make_folder("original")
    packed = (
        (path, nf4.encode(array, nested=nested) if "mlp" in path and array.ndim == 2 else array)
        for path, array in stream(folder)
    )
    save(tmp_path / "base", packed, source=folder)
    adapter = AdapterConfig(r=R, target_modules=["up_proj", "q_proj"])
    found = arrays(CONFIG, adapter)
    write_adapter(tmp_path / "adapter", adapter, found)
    base = {p: nf4.decode(t) if isinstance(t, nf4.NF4Tensor) else t for p, t in stream(tmp_path / "base")}
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    check(tmp_path / "out", base, found, adapter, "bfloat16")
    assert "quantization_config" not in open_checkpoint(tmp_path / "out").config

    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "again", dtype="nf4")
    plain = dict(stream(tmp_path / "out"))
    stored = dict(stream(tmp_path / "base"))
    for path, tensor in stream(tmp_path / "again"):
        assert isinstance(tensor, nf4.NF4Tensor) == isinstance(stored[path], nf4.NF4Tensor)
        if not isinstance(tensor, nf4.NF4Tensor):
            assert tensor.tobytes() == plain[path].tobytes()
            continue
        right = nf4.encode(plain[path], nested=nested) if "up_proj" in path else stored[path]
        assert tensor.nested == nested
        assert tensor.codes.tobytes() == right.codes.tobytes() and tensor.absmax.tobytes() == right.absmax.tobytes()
    assert open_checkpoint(tmp_path / "again").config == open_checkpoint(tmp_path / "base").config


def test_a_16_bit_base_that_was_trained_over_in_4_bits(make_folder, tmp_path, monkeypatch):
    """The same as quantising the base first; every layer's matrix is that of the quantised base."""
    monkeypatch.setattr("convert.blocks.ELEMENTS", 128)
    folder, _ = make_folder("original")
    quantized = (
        (path, nf4.encode(array, nested=True) if path.startswith("layers.") and array.ndim == 2 else array)
        for path, array in stream(folder)
    )
    save(tmp_path / "quantized", quantized, source=folder)
    adapter = AdapterConfig(r=R, target_modules=["up_proj", "q_proj"])
    write_adapter(tmp_path / "adapter", adapter, arrays(CONFIG, adapter))
    merge(tmp_path / "quantized", tmp_path / "adapter", tmp_path / "one")
    merge(folder, tmp_path / "adapter", tmp_path / "two", base_in_nf4=True)
    other = dict(stream(tmp_path / "two"))
    for path, array in stream(tmp_path / "one"):
        assert array.tobytes() == other[path].tobytes(), path
    skip = ["layers.0.mlp.down_proj", "layers.1.mlp.up_proj"]  # as the run's float32_modules
    merge(folder, tmp_path / "adapter", tmp_path / "kept", base_in_nf4=True, skip=skip)
    merge(folder, tmp_path / "adapter", tmp_path / "plain")
    kept, plain = dict(stream(tmp_path / "kept")), dict(stream(tmp_path / "plain"))
    for path, array in kept.items():
        assert array.tobytes() == (plain if path.removesuffix(".weight") in skip else other)[path].tobytes(), path
    merge(folder, tmp_path / "adapter", tmp_path / "three", dtype="nf4")
    written = open_weights(tmp_path / "three")
    assert {written.format(path) for path in written.specs if "proj.weight" in path} == {"nf4-nested"}
    settings = written.checkpoint.config["quantization_config"]
    assert settings["llm_int8_skip_modules"] == ["lm_head"] and settings["bnb_4bit_use_double_quant"]
    merge(folder, tmp_path / "adapter", tmp_path / "four", dtype="nf4", skip=["up_proj", "layers.0.self_attn.q_proj"])
    written, plain = open_weights(tmp_path / "four"), {"layers.0.self_attn.q_proj.weight"}
    plain |= {path for path in written.specs if path.endswith("up_proj.weight")}
    assert {path for path in written.specs if "proj.weight" in path and written.format(path) != "nf4-nested"} == plain
    skipped = written.checkpoint.config["quantization_config"]["llm_int8_skip_modules"]
    assert {f"{name.removeprefix('model.')}.weight" for name in skipped} == plain | {"lm_head.weight"}
    for options, message in (
        ({"dtype": "nf4", "skip": ["gate"]}, "skip: no module is named gate"),
        ({"dtype": "float32", "skip": ["up_proj"]}, "skip: expected no module, unless dtype is one of nf4"),
    ):
        with pytest.raises(ConvertError, match=message):
            merge(folder, tmp_path / "adapter", tmp_path / "five", **options)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_tokens_and_a_grown_vocabulary(make_folder, tmp_path, tied):
    config = CONFIG | {"tie_word_embeddings": tied}
    folder, _ = make_folder(config=config)
    base = dict(stream(folder))
    ids = [4, V + 1, V]
    given = ids if tied else dict.fromkeys(BOTH, ids)
    adapter = AdapterConfig(r=R, target_modules=["q_proj"], trainable_token_indices=given)
    found = arrays(config, adapter)
    tables = BOTH[:1] if tied else BOTH
    for table in tables:
        found[f"{table}.trainable_tokens_delta"] = np.random.default_rng(2).standard_normal((3, E)).astype(np.float32)
    write_adapter(tmp_path / "adapter", adapter, found)
    result = merge(folder, tmp_path / "adapter", tmp_path / "out")
    assert result.vocabulary == V + 2 and not result.untied and len(result.notes) == 1
    assert open_checkpoint(tmp_path / "out").config["vocab_size"] == V + 2
    merged = dict(stream(tmp_path / "out"))
    for table in tables:
        right = np.concatenate([base[f"{table}.weight"], np.zeros((2, E), ml_dtypes.bfloat16)])
        right[ids] = found[f"{table}.trainable_tokens_delta"].astype(ml_dtypes.bfloat16)
        assert merged[f"{table}.weight"].tobytes() == right.tobytes()


@pytest.mark.parametrize(("base", "named"), [("org/other", True), ("models/other", False), ("/home/me/other", False)])
def test_the_card_names_a_base_of_the_hub_alone(make_folder, tmp_path, monkeypatch, base, named):
    """Not a folder of this machine."""
    folder, _ = make_folder()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "other").mkdir(parents=True)
    adapter = AdapterConfig(r=R, target_modules=["q_proj"], base_model_name_or_path=base)
    write_adapter(tmp_path / "adapter", adapter, arrays(CONFIG, adapter))
    merge(folder, tmp_path / "adapter", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text().splitlines()
    assert (card[1] == f"base_model: {base}") is named and "# other, fine-tuned" in card


def test_new_rows_without_values_are_refused(make_folder, tmp_path):
    folder, _ = make_folder()
    adapter = AdapterConfig(r=R, target_modules=["q_proj"], trainable_token_indices=[V + 1])
    found = arrays(CONFIG, adapter) | {"embed_tokens.trainable_tokens_delta": np.ones((1, E), np.float32)}
    write_adapter(tmp_path / "adapter", adapter, found)
    with pytest.raises(ConvertError, match=rf"expected values for the rows \[{V}\], which .*model does not have"):
        merge(folder, tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize(
    ("base", "adapter", "merged"),
    [
        ({"eos_token_id": 3, "top_k": 5}, [3, 4, 2], {"eos_token_id": [3, 4, 2], "top_k": 5}),
        ({"eos_token_id": [3, 4]}, 4, {"eos_token_id": [3, 4]}),
        ({"top_k": 5}, 4, {"top_k": 5, "eos_token_id": [7, 4]}),
        (None, 7, None),
        (None, [7, 2], {"eos_token_id": [7, 2]}),
    ],
)
def test_ends_that_the_adapter_learnt_are_named(make_folder, tmp_path, base, adapter, merged):
    """The base's config.json counts where there is no generation_config.json."""
    folder, _ = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    if base is not None:
        (folder / "generation_config.json").write_text(json.dumps(base))
    settings = AdapterConfig(r=R, target_modules=["q_proj"])
    write_adapter(tmp_path / "adapter", settings, arrays(CONFIG, settings))
    (tmp_path / "adapter" / "generation_config.json").write_text(json.dumps({"eos_token_id": adapter}))
    notes = merge(folder, tmp_path / "adapter", tmp_path / "out").notes
    file = tmp_path / "out" / "generation_config.json"
    assert (json.loads(file.read_text()) if file.exists() else None) == merged
    assert any("generation_config.json names" in note for note in notes) == (merged != base)


def test_what_goes_along(make_folder, tmp_path):
    folder, _ = make_folder()
    adapter = AdapterConfig(r=R, target_modules=["q_proj"], base_model_name_or_path="org/other")
    write_adapter(tmp_path / "adapter", adapter, arrays(CONFIG, adapter))
    for name in ("generation_config.json", "chat_template.jinja", "LICENSE", "tokenizer_config.json"):
        (folder / name).write_text(f"base {name}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA base.\n")
    training = Training("500 steps\n\n## More", ("org/data",))
    write_card(tmp_path / "adapter", Card("org/other", "peft", ["An adapter."], adapter, training))
    assert read_training(tmp_path / "adapter") == training
    merge(folder, tmp_path / "adapter", tmp_path / "one")
    names = {"config.json", "model.safetensors", "README.md", "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    names |= {"generation_config.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == names
    assert (tmp_path / "one" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    card = (tmp_path / "one" / "README.md").read_text()
    assert card.endswith("## Training\n\n500 steps\n\n## More\n") and "datasets:\n- org/data\n" in card
    assert '"r": 3' in card and "The adapter names org/other as its base" in card and "\nlicense: mit\n" in card
    assert 'AutoModelForCausalLM.from_pretrained("one")' in card and "vllm serve one" in card
    quantize(tmp_path / "one", tmp_path / "small", scheme="int8")
    card = (tmp_path / "small" / "README.md").read_text()
    assert "\nQuantised to int8.\n" in card and "vllm serve small\n" in card and "500 steps" in card
    own = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5}]}
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(own))
    (tmp_path / "adapter" / "chat_template.jinja").write_text("adapter")
    merge(folder, tmp_path / "adapter", tmp_path / "two")
    assert json.loads((tmp_path / "two" / "tokenizer.json").read_text()) == own
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "adapter"
    assert not (tmp_path / "two" / "tokenizer_config.json").exists()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 7}}}))
    merge(folder, tmp_path / "adapter", tmp_path / "three")
    assert (tmp_path / "three" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_ignored_tensors_are_copied_and_a_stale_copy_of_the_head_is_not(make_folder, tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    buffer = np.arange(4, dtype=np.float32)
    folder, tensors = make_folder(config=config, extra={"rotary_emb.inv_freq": buffer})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_checkpoint(folder, tensors.items(), config)
    for name, settings in {
        "one": {"target_modules": ["q_proj"]},
        "two": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    }.items():
        adapter = AdapterConfig(r=R, **settings)
        write_adapter(tmp_path / f"adapter {name}", adapter, arrays(config, adapter))
        merge(folder, tmp_path / f"adapter {name}", tmp_path / name)
        merged = open_checkpoint(tmp_path / name)
        assert merged.read("rotary_emb.inv_freq").tobytes() == buffer.tobytes()
        assert ("lm_head.weight" in merged.names) == (name == "one")


WRONG = {
    "another rank": ({"layers.0.self_attn.q_proj": ("lora_A", (R, E + 1))}, r"q_proj\.lora_A: expected \[3, 24\], got"),
    "too few rows": ({"layers.1.self_attn.q_proj": ("lora_B", (19, R))}, r"q_proj\.lora_B: expected \[20, 3\], got"),
    "another layer": ({"layers.7.self_attn.q_proj": ("lora_A", (R, E))}, r"layers\.7.*: the model has no such tensor"),
    "a target left out": ({"layers.0.self_attn.q_proj": None}, r"layers\.0\.self_attn\.q_proj: a target of .*without"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_adapter_of_another_model(make_folder, tmp_path, name):
    changed, message = WRONG[name]
    folder, _ = make_folder()
    adapter = AdapterConfig(r=R, target_modules=["q_proj"])
    found = arrays(CONFIG, adapter)
    for module, what in changed.items():
        if what is None:
            found = {path: array for path, array in found.items() if not path.startswith(module)}
            continue
        found[f"{module}.{what[0]}"] = np.zeros(what[1], np.float32)
        other = "lora_B" if what[0] == "lora_A" else "lora_A"
        found.setdefault(f"{module}.{other}", np.zeros((20, R), np.float32))
    write_adapter(tmp_path / "adapter", adapter, found)
    with pytest.raises(ConvertError, match=message) as caught:
        merge(folder, tmp_path / "adapter", tmp_path / "out")
    assert str(tmp_path / "adapter") in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


@pytest.mark.parametrize("where", ["base", "adapter", "overflow"])
def test_values_that_are_not_finite_are_refused_and_reported(make_folder, tmp_path, where):
    dtype = np.float16 if where == "overflow" else np.float32
    folder, tensors = make_folder(dtype=dtype)
    adapter = AdapterConfig(r=R, target_modules=["q_proj"])
    found = arrays(CONFIG, adapter)
    name = "model.layers.1.self_attn.q_proj.weight"
    if where == "base":
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][3, 3] = np.nan
        write_checkpoint(folder, tensors.items(), CONFIG)
    elif where == "adapter":
        found["layers.1.self_attn.q_proj.lora_B"][0, 0] = np.inf
    else:
        found["layers.1.self_attn.q_proj.lora_B"][:] = 1e5
    write_adapter(tmp_path / "adapter", adapter, found)
    message = "lora_B: expected finite" if where == "adapter" else f"model.*{name}: expected finite values, got NaN"
    with pytest.raises(ConvertError, match=message):
        merge(folder, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    result = merge(folder, tmp_path / "adapter", tmp_path / "out", allow_nonfinite=True)
    assert result.written.nonfinite == [name]
    if where == "base":
        for allow in (False, True):
            with pytest.raises(ConvertError, match=f"{name}: expected finite values.*NF4 cannot hold them"):
                merge(folder, tmp_path / "adapter", tmp_path / "4", base_in_nf4=True, allow_nonfinite=allow)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (16, 16, 1024), (37, 16, 2500), (5, 64, 300), (40, 300, 70), (3, 2**15, 5)]
)
def test_products_in_small_pieces(shape):
    rows, rank, columns = shape
    rng = np.random.default_rng(0)
    left = rng.standard_normal((rows, rank)).astype(np.float32)
    right = rng.standard_normal((rank, columns)).astype(np.float32)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    np.testing.assert_allclose(product(left, right), exact, atol=1e-6 * rank)  # float32 sums of `rank` terms


@pytest.mark.parametrize("beside", ["", "model."], ids=["as on the hub", "by class"])
def test_beside_a_vision_tower(tmp_path, beside):
    """The text half is merged and quantised under the names that these checkpoints have; the tower is copied."""
    text = FAMILIES_CONFIGS["gemma3_text"]
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    tower = f"{beside}vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"
    layers = "model.language_model.layers." if beside else "language_model.model.layers."
    family = family_for(config).named_as([f"{layers}0.self_attn.q_proj.weight", tower])
    rng = np.random.default_rng(0)
    tensors = {row.name: rng.standard_normal(row.shape).astype(np.float32) for row in family.specs(config)}
    assert any(name.startswith(layers) for name in tensors)
    tensors[tower] = rng.standard_normal((4, 4)).astype(np.float32)
    write_checkpoint(tmp_path / "base", tensors.items(), config)
    weights = open_weights(tmp_path / "base")
    matrices = [path for path in weights.specs if path.endswith("_proj.weight")]
    assert [path for path, row in weights.specs.items() if row.kind == "matrix"] == matrices
    adapter = AdapterConfig(r=R, target_modules="all-linear")
    found = lora_arrays(adapter, ((path, spec.shape) for path, spec in weights.specs.items()), family)
    assert len(found) == 2 * len(matrices)
    write_adapter(tmp_path / "adapter", adapter, found, family=family)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    merged = open_weights(tmp_path / "out")
    assert merged.checkpoint.names == weights.checkpoint.names
    assert merged.checkpoint.read(tower).tobytes() == tensors[tower].tobytes()
    for path in weights.specs:
        module = path.removesuffix(".weight")
        right = weights.read(path).astype(np.float64)
        if f"{module}.lora_A" in found:
            scale = adapter.lora_alpha / R
            right = right + scale * found[f"{module}.lora_B"].astype(np.float64) @ found[f"{module}.lora_A"]
        np.testing.assert_allclose(merged.read(path), right, rtol=2e-6, atol=5e-6)  # a few terms of up to 10
