"""Qwen 3 Next: three of four layers with Gated DeltaNet, and mixtures of experts beside a gated shared one."""

from convert.families import gated_delta, qwen3_moe
from convert.families.family import NOT_COMPARED, Family
from convert.families.mixture import Mixture
from convert.families.qwen3_5 import CONSTANTS, quarter_rotary
from convert.model.layers import Mixer
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS


def _mixers(get: Reader, layers: int) -> tuple[Mixer, ...]:
    return gated_delta.layers_of(get, layers, gated_delta.read_delta(get, interleaved=True))


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    return qwen3_moe.mixture(get, layers, shared=get.integer("shared_expert_intermediate_size"))


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    defaults={
        **gated_delta.DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants=CONSTANTS,
    mixers=_mixers,
    rows=gated_delta.INTERLEAVED,
    mixture=Mixture(_mixture, dense=True),
    read=quarter_rotary,
    neutral=gated_delta.NEUTRAL,
    ignored=gated_delta.WITH_PREDICTOR,
    gguf=NOT_COMPARED,
)
