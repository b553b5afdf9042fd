"""Every family: its config both ways, its folder there and back bit for bit, and one model however it is run."""

import copy
import dataclasses

import numpy as np
import pytest
from transformers import AutoConfig

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.families import FAMILIES, family_for
from convert.families.mapping import read_config
from convert.model.reader import ACTIVATIONS
from fastjax.execution import load
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.saving import trained_tensors
from fastjax.lora.export import export_adapters
from fastjax.models.rope_override import with_rope_scaling
from pallas_kernels.glu import ACTIVATIONS as FUNCTIONS
from tests.support import families, family_fields, tiny
from tests.support.families import BESIDE, CONFIGS, NESTED
from tests.support.family_mixtures import MIXTURES
from tests.support.family_variants import IDLE, MIXTURE_VARIANTS, SPELLINGS, VARIANTS
from tests.support.generation import answers_in_ids

EVERY = {**CONFIGS, **MIXTURES}
#: Ends of the names of what no run trains.
CONSTANT = ("e_score_correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps")


def theirs(config):
    """transformers' reading of a config.json."""
    fields = {name: value for name, value in copy.deepcopy(config).items() if name != "model_type"}
    return AutoConfig.for_model(config["model_type"], **fields)


@pytest.mark.parametrize("family", EVERY)
def test_every_field_is_off_its_default(family):
    kind = type(theirs(EVERY[family]))
    default, used = kind().to_dict(), theirs(EVERY[family]).to_dict()
    fields = {field.name for field in dataclasses.fields(kind)} - set(kind.attribute_map) | set(default)
    compared = {name for name in fields - set(family_fields.IRRELEVANT) if family_fields.refused(family, name) is None}
    same = sorted(name for name in compared if default.get(name) == used.get(name))
    assert not same, f"these fields are at {kind.__name__}'s default and prove nothing: {same}"


@pytest.mark.parametrize("family", EVERY)
def test_fields_that_are_not_supported_are_refused(family):
    fields = [field.name for field in dataclasses.fields(type(theirs(EVERY[family])))] + ["sliding_windows"]
    tried = [name for name in fields if family_fields.refused(family, name) is not None] + ["sliding_windows"]
    for name in tried:
        with pytest.raises(ConvertError, match=f"(do not support here: {name} = |: {name}: expected )"):
            read_config(EVERY[family] | {name: family_fields.refused(family, name) or 3})


@pytest.mark.parametrize("variant", [*VARIANTS, *SPELLINGS, *MIXTURE_VARIANTS])
def test_a_config_as_transformers_writes_it(variant):
    _, config = (VARIANTS | SPELLINGS | MIXTURE_VARIANTS)[variant]
    assert read_config(theirs(config).to_dict()) == read_config(config)


def test_fields_that_change_nothing_are_a_list():
    """What is on it may hold anything; what is not is refused, as are layers' types that transformers reads past."""
    config = families.LLAMA
    for name in IDLE:
        assert read_config(config | {name: IDLE[name]}) == read_config(config), name
    layer_types = {"layer_types": [families.FULL, families.SLIDING, families.FULL]}
    wrong = [{"rope_interleaved": True}, {"model_max_len": 77}, {"clip_qkv": 8.0}, layer_types]
    for fields in wrong:
        with pytest.raises(ConvertError, match=next(iter(fields))):
            read_config(config | fields)
    with pytest.raises(ConvertError, match="layer_types: expected sliding_attention for every layer"):
        read_config(CONFIGS["mistral"] | layer_types)


@pytest.mark.torch
def test_activations_are_transformers_functions():
    activations = pytest.importorskip("transformers.activations")
    torch = pytest.importorskip("torch")
    x = np.linspace(-6, 6, 401, dtype=np.float32)
    for name, own in ACTIVATIONS.items():
        expected = activations.ACT2FN[name](torch.from_numpy(x)).numpy()
        # float32, values to 6
        np.testing.assert_allclose(FUNCTIONS[own](x), expected, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("family", EVERY)
def test_what_is_left_out_is_transformers_default(family):
    kind = type(theirs(EVERY[family]))
    default = {name: value for name, value in kind().to_dict().items() if name not in family_fields.IRRELEVANT}
    default |= {"model_type": family} | family_fields.DIVISIBLE.get(family, {})
    expected = read_config(default)
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    bare = {name: default[name] for name in (needed | {"model_type"}) & default.keys()}
    assert read_config(bare) == expected
    shapes = [[row.shape for row in family_for(config).specs(config)] for config in (bare, default)]
    assert shapes[0] == shapes[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Function that gives a family's folder, written once."""
    made = {}

    def folder(family):
        if family not in made:
            config = EVERY[family]
            path = tmp_path_factory.mktemp(family)
            made[family] = tiny.write_folder(path, config, tiny.arrays(config))
        return made[family]

    return folder


# Parts of one tensor, kinds of layers by turns, a tensor of all experts, constants, norms of other names.
@pytest.mark.exhaustive("gemma3_text", "phi3", "cohere", "exaone4", "starcoder2", "qwen2_moe", "gpt_oss", "hy_v3")
@pytest.mark.parametrize("family", EVERY)
def test_a_folder_there_and_back_bit_for_bit(family, folders, tmp_path):
    model = tiny.model(folders(family), None, full_finetuning=True)
    model.save_pretrained(tmp_path / "saved")
    before, after = (open_checkpoint(folder) for folder in (folders(family), tmp_path / "saved"))
    assert after.config == before.config and set(after.names) == set(before.names)
    for name in before.names:
        assert before.read(name).tobytes() == after.read(name).tobytes(), name
    sizes = {name: array.size for name, array in tiny.arrays(EVERY[family]).items()}
    constant = sum(size for name, size in sizes.items() if name.endswith(CONSTANT))
    assert model.num_parameters() == (sum(sizes.values()) - constant, sum(sizes.values()))


@pytest.mark.exhaustive("phi3", "qwen2_moe", "glm4_moe")
@pytest.mark.parametrize("family", EVERY)
def test_an_adapter_there_and_back_bit_for_bit(family, folders, tmp_path):
    base = tiny.model(folders(family), None)
    saved = "embed_tokens" if base.config.biases & {"lm_head"} else "lm_head"
    model = tiny.adapted(base, target_modules="all-linear", modules_to_save=[saved])
    model.save_pretrained(tmp_path / "saved")
    again = FastLanguageModel.load_adapter(base, tmp_path / "saved")
    first, second = (export_adapters(found.trainable, found.plan, False) for found in (model, again))
    assert first.keys() == second.keys() and len(first) > 2 * 4 * base.config.num_hidden_layers
    assert all(np.array_equal(first[path], second[path]) for path in first)


# Windows by turns, rotations by the length of a row, layers without one, queries that grow with the position, experts,
# sinks; rotations of pairs and norms behind the rotation are in parity/test_families.py.
@pytest.mark.exhaustive("gemma3_text", "phi3", "smollm3", "ministral3", "gpt_oss")
@pytest.mark.parametrize("family", [*CONFIGS, "qwen2_moe", "gpt_oss", "hy_v3"])
def test_one_model_however_it_is_run(family, folders):
    """Scanned and unrolled, several documents a row and one."""
    scanned, unrolled = (tiny.model(folders(family), None, layer_loop=loop) for loop in ("scan", "unroll"))
    assert len(unrolled.plan) == EVERY[family]["num_hidden_layers"]
    documents = tiny.documents(EVERY[family], (33, 7, 12))
    tokens, _, segments, positions = tiny.rows([documents, *([document] for document in documents)], 55)
    found, again = (tiny.logits(model, tokens, positions, segments) for model in (scanned, unrolled))
    # float32 in another order, logits of a few units
    np.testing.assert_allclose(again[segments > 0], found[segments > 0], rtol=0, atol=1e-4)
    for number, document in enumerate(documents, start=1):
        packed, alone = found[0][segments[0] == number], found[number][: len(document)]
        np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-4)


@pytest.mark.exhaustive("gemma3_text")  # mixtures are in generation/test_engine.py and test_windows.py
@pytest.mark.parametrize(
    "family",
    [
        *("gemma3_text", "phi3", "granite", "smollm3", "cohere", "gpt_oss", "glm4_moe", "starcoder2", "olmo"),
        *("granite_swa", "minimax_m2", "exaone_moe"),
    ],
)
def test_greedy_answers_are_the_likeliest_tokens(family, folders):
    """Token by token through the cache, which turns a key once: so not with positions that change as a row grows."""
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}} if family == "granite" else {}
    model = tiny.model(folders(family), None, max_seq_length=64, **linear)
    (prompt,) = tiny.documents(EVERY[family], (33,))
    (answer,) = answers_in_ids(model, [prompt.tolist()], max_new_tokens=6, temperature=0.0)
    row = np.concatenate([prompt, np.asarray(answer, np.int32)])
    likeliest = tiny.logits(model, row[None])[0].argmax(-1)
    assert likeliest[len(prompt) - 1 : -1].tolist() == answer


#: How names begin in files on the Hub -> as the classes of transformers have been called since 4.52.
BY_CLASS = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}


@pytest.mark.exhaustive("gemma3-True", "mistral3-False")
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("kind", BESIDE)
def test_a_text_model_beside_a_vision_tower(tmp_path, kind, by_class):
    """It is the text model; the other tensors are read past, and stand in what is saved as they were."""
    config, family = BESIDE[kind], FAMILIES[kind]
    tensors, beside = tiny.arrays(config), "model." if by_class or not family.others else ""
    renamed = {name.replace("language_model.", "", 1): array for name, array in tensors.items()}
    for start, other in BY_CLASS.items() if by_class else ():
        tensors = {name.replace(start, other): array for name, array in tensors.items()}
    names = [f"{beside}{part.removeprefix('model.')}.a.weight" for part in family.beside]
    names += [name for name in ("mtp.layers.0.b",) if family.ignores(name, config)]
    other = {name: np.full((3, 2), 7, np.float32) for name in names}
    tiny.write_folder(tmp_path / "whole", config, tensors | other)
    model = tiny.model(tmp_path / "whole", None, full_finetuning=True)
    text = tiny.text_config(config)
    if text["model_type"] in FAMILIES:
        assert dataclasses.replace(model.config, model_type=text["model_type"]) == read_config(text)
        alone = tiny.model(tiny.write_folder(tmp_path / "text", text, renamed), None)
        tokens = tiny.documents(text, (20,))[0][None]
        assert np.array_equal(tiny.logits(model, tokens), tiny.logits(alone, tokens))
        assert read_config(config | {"tie_word_embeddings": not text["tie_word_embeddings"]}) != model.config
    model.save_pretrained(tmp_path / "saved")
    before, after = (open_checkpoint(tmp_path / name) for name in ("whole", "saved"))
    assert after.config == before.config and set(after.names) == set(before.names) == {*tensors, *other}
    assert all(before.read(name).tobytes() == after.read(name).tobytes() for name in before.names)
    with pytest.raises(ConvertError, match="vision_towers.x"):
        tiny.model(
            tiny.write_folder(tmp_path / "wrong", config, tensors | {"vision_towers.x": other.popitem()[1]}), None
        )
    wrong = {"tie_word_embeddings": "yes", "text_config": None, "audio_config": {}}
    for name, value in [*wrong.items(), ("text_config", CONFIGS["gemma3_text"])]:
        with pytest.raises(ConvertError, match=name):
            read_config(config | {name: value})


def test_scaling_is_replaced_where_the_layers_see_everything():
    for config, of in ((CONFIGS["gemma3_text"], lambda found: found), (NESTED, lambda found: found["text_config"])):
        changed = with_rope_scaling(config, {"rope_type": "linear", "factor": 3.0})
        before, after = read_config(config), read_config(changed)
        assert (after.rope.factor, after.rope.theta) == (3.0, before.rope.theta)
        assert after == dataclasses.replace(before, rope=after.rope)
        assert set(of(changed)) == set(of(config))


@pytest.mark.exhaustive("mistral", "gemma", "gpt_oss")
@pytest.mark.parametrize("family", EVERY)
def test_random_weights_fill_the_table(family):
    """Norms start as the identity's scale, whatever is added to their weights."""
    config = read_config(EVERY[family])
    model = FastLanguageModel.from_config(EVERY[family], dtype="float32", full_finetuning=True, max_seq_length=32)
    tensors = dict(trained_tensors(model))
    rows = {row.path: row.shape for row in family_for(EVERY[family]).specs(EVERY[family])}
    assert {path: array.shape for path, array in tensors.items()} == rows
    for path, array in tensors.items():
        if "norm" in path and path.endswith("weight"):
            assert np.all(array == 1.0 - config.norm_offset * (path.block != "linear_attn")), path


def test_random_weights_of_another_model_take_the_same_programs():
    options = {"dtype": "float32", "full_finetuning": True, "max_seq_length": 32}
    FastLanguageModel.from_config(EVERY["gemma3_text"], **options)
    made = load._normal._cache_size()
    FastLanguageModel.from_config(EVERY["gemma3_text"], **options)
    assert load._normal._cache_size() == made > 0


def test_every_table_has_a_mapping():
    assert {name for name, family in FAMILIES.items() if family.section is None} == {*EVERY, "llama", "kimi_k2"}
    assert {*BESIDE} <= {*FAMILIES}
