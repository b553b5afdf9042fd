"""The count against the known number of parameters of Llama 3, and against products counted one by one."""

import numpy as np
import pytest

from convert.families.mapping import read_config
from fastjax.bench.presets import PRESETS
from fastjax.language_model import FastLanguageModel
from fastjax.training.flops import (
    attended_length,
    flops_per_token,
    matrix_parameters,
    step_flops,
)
from tests.support.family_mixtures import MIXTURES

CONFIG = read_config(PRESETS["llama3-8b"])


def test_llama_3_8b():
    # 8,030,261,248 parameters, of which the embedding table (128256 x 4096) and 65 norms multiply nothing.
    assert matrix_parameters(CONFIG) == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    flops = step_flops(CONFIG, tokens=8192, document_length=2048)
    assert flops / 8192 == 4 * matrix_parameters(CONFIG) + 32 * 6 * 2048 * 32 * 128
    own = matrix_parameters(CONFIG)
    assert step_flops(CONFIG, tokens=1, document_length=0, trained_parameters=own) == 6 * own


def test_trained_parts():
    frozen = step_flops(CONFIG, tokens=10, document_length=0)
    assert step_flops(CONFIG, tokens=10, document_length=0, adapter_parameters=7) - frozen == 10 * 6 * 7
    assert step_flops(CONFIG, tokens=10, document_length=0, trained_parameters=7) - frozen == 10 * 2 * 7


def test_a_mixture_counts_the_chosen_experts():
    """Three of four experts, a shared one with its gate, the router; a dense layer as it is."""
    hf = MIXTURES["qwen2_moe"] | {"num_hidden_layers": 2, "decoder_sparse_step": 2, "mlp_only_layers": []}
    full = FastLanguageModel.from_config(hf | {"layer_types": None}, full_finetuning=True)
    width, heads, keys, size = 32, 4 * 8, 2 * 8, 97
    attention = 2 * (2 * width * heads + 2 * width * keys)
    mixture = 3 * width * (3 * 12 + 20) + width + 4 * width
    assert matrix_parameters(full.config) == attention + 3 * width * 44 + mixture + size * width
    forward_and_back = step_flops(full.config, tokens=1, document_length=0)
    trained = flops_per_token(full.config, full.trainable, 0)
    assert trained - forward_and_back == 2 * matrix_parameters(full.config)


@pytest.mark.parametrize("tied", [True, False])
def test_by_what_is_trained(tied):
    """Full fine-tuning trains every matrix, an adapter its own, and a saved head is one of the model's."""
    hf = PRESETS["tiny"] | {"tie_word_embeddings": tied}
    full = FastLanguageModel.from_config(hf, full_finetuning=True)
    own = matrix_parameters(full.config)
    attention = step_flops(full.config, tokens=1, document_length=100) - 4 * own
    assert flops_per_token(full.config, full.trainable, 100) == 6 * own + attention
    base = FastLanguageModel.from_config(hf, load_in_4bit=False)
    lora = FastLanguageModel.get_peft_model(base, r=4, use_dora=True, target_modules=["q_proj", "down_proj"])
    adapter = 2 * 4 * (128 + 128 + 256 + 128)  # layers, rank, q_proj's and down_proj's in and out
    assert flops_per_token(lora.config, lora.trainable, 100) == 4 * own + 6 * adapter + attention
    saved = FastLanguageModel.get_peft_model(
        base, r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "embed_tokens"]
    )
    head = 512 * 128
    assert flops_per_token(saved.config, saved.trainable, 100) == 4 * own + 6 * adapter + 2 * head + attention


def test_packed_documents_cost_what_they_cost_alone():
    lengths = [3, 1000, 70, 2048]
    alone = [step_flops(CONFIG, tokens=n, document_length=n, adapter_parameters=5) for n in lengths]
    packed = step_flops(CONFIG, tokens=sum(lengths), document_length=attended_length(lengths), adapter_parameters=5)
    assert packed == pytest.approx(sum(alone), rel=1e-12)  # float64
    assert attended_length([8, 8, 8]) == 8
    assert attended_length(np.zeros(0, np.int64)) == 0
