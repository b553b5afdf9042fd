"""The count against the known number of parameters of Llama 3."""

from fastjax.bench.step import PRESETS
from fastjax.models.config import ModelConfig
from fastjax.training.flops import matrix_parameters, step_flops


def test_llama_3_8b():
    config = ModelConfig.from_hf(PRESETS["llama3-8b"])
    # 8,030,261,248 parameters, of which the embedding table (128256 x 4096) and 65 norms multiply nothing.
    assert matrix_parameters(config) == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    flops = step_flops(config, tokens=8192, document_length=2048, adapter_parameters=0)
    assert flops / 8192 == 4 * matrix_parameters(config) + 32 * 6 * 2048 * 32 * 128
    whole = step_flops(config, tokens=1, document_length=0, adapter_parameters=0, frozen=False)
    assert whole == 6 * matrix_parameters(config)
