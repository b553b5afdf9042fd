"""The shapes of a run's model, from headers or from config.json alone, are those of the model that is loaded."""

import jax
import pytest

from convert.quantize import quantize
from fastjax.language_model.loading import load_opened
from fastjax.language_model.saving import save_pretrained
from fastjax.runs.model import run_shapes, with_adapter
from fastjax.runs.opening import open_model, open_shapes
from tests.convert.test_experts import in_mxfp4
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES
from tests.support.runs import config

SERVED = ("int4-32", "int4-32-zeros", "int8", "nvfp4", "mxfp4")
WIDE = tiny.config(hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def plain(folder):
    tiny.write_folder(folder, WIDE, tiny.arrays(WIDE))


def nf4(folder):
    plain(folder.with_name("plain"))
    quantize(folder.with_name("plain"), folder, skip=["layers.1.mlp.down_proj"])


def fp8(folder):
    tiny.write_fp8_folder(folder, WIDE, (32, 32))


def served(scheme):
    def write(folder):
        plain(folder.with_name("plain"))
        quantize(folder.with_name("plain"), folder, scheme=scheme)

    return write


def mxfp4(folder):
    settings = MIXTURES["gpt_oss"] | {"hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    tiny.write_folder(folder, settings, in_mxfp4(tiny.arrays(settings))[0])


def described(model):
    trees = (model.trainable, model.frozen)
    return jax.tree.structure(trees), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trees)]


@pytest.mark.exhaustive("nf4", "fp8")
@pytest.mark.parametrize(
    ("write", "options", "lora", "stacks"),
    [
        (plain, {"new_tokens": ["<a>", "<b>"]}, {"r": 4, "use_dora": True, "init_lora_weights": "orthogonal"}, 1),
        (plain, {"use_gradient_checkpointing": "projections:1"}, {"r": 4}, 2),
        (plain, {"load_in_4bit": False, "full_finetuning": True}, {}, 1),
        (nf4, {"layer_loop": "unroll"}, {"r": 4}, 2),
        (fp8, {"load_in_4bit": False}, {"r": 4}, 1),
        (mxfp4, {}, {"r": 4, "target_modules": ["q_proj"]}, 1),
        *((served(scheme), {"load_in_4bit": scheme != "int8"}, {"r": 4}, 1) for scheme in SERVED),
    ],
    ids=["plain", "first layer", "whole", "nf4", "fp8", "mxfp4", *SERVED],
)
def test_shapes_are_those_of_the_loaded_model(write, options, lora, stacks, tmp_path):
    folder = tmp_path / "model"
    write(folder)
    settings = config(model={"model_name": str(folder), "max_seq_length": 48, **options}, lora=lora)
    opened = open_model(settings)
    loaded = with_adapter(load_opened(opened, settings.model), settings, opened)
    assert len(loaded.plan) == stacks
    assert described(run_shapes(settings, open_shapes(settings))) == described(loaded)
    for file in [*folder.glob("*.safetensors*"), *([] if "new_tokens" in options else folder.glob("tokenizer*"))]:
        file.unlink()
    assert described(run_shapes(settings, open_shapes(settings))) == described(loaded)


def test_shapes_of_an_adapter_to_start_from(tmp_path):
    base = config(model={"model_name": str(tiny.shared_folder()), "max_seq_length": 48}, lora={"r": 3})
    opened = open_model(base)
    started = with_adapter(load_opened(opened, base.model), base, opened)
    save_pretrained(started, tmp_path / "adapter")
    settings = config(model=vars(base.model), lora={"adapter": str(tmp_path / "adapter")})
    assert described(run_shapes(settings, open_shapes(settings))) == described(started)
