"""ERNIE 4.5 with mixtures of experts in some layers, by softmax with a bias for the choice, and a shared expert."""

from convert.families.ernie4_5 import DEFAULTS
from convert.families.family import IGNORED, NOT_COMPARED, Family, Ignored
from convert.families.mixture import Mixture, chosen_experts, number_of_experts, with_shared
from convert.model.moe import MoeConfig, RouterConfig
from convert.model.paths import HEAD
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS, MLP_GROUPS, SHARED_GROUPS

#: The largest `moe_norm_min` that no sum of a token's probabilities falls below.
_SMALL = 1e-6


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    get.asked |= {"moe_capacity", "num_nextn_predict_layers"}
    experts = number_of_experts(get, "moe_num_experts", "num_experts")
    router = RouterConfig(experts, chosen_experts(get, experts, "moe_k"), normalize=True, choice_bias=True)
    if get.number("moe_norm_min") > _SMALL:
        raise get.wrong("moe_norm_min", f"at most {_SMALL}, so that the chosen weights sum to 1")
    first, every = get.count("moe_layer_start_index"), get.integer("moe_layer_interval")
    last = layers - 1 if get.value("moe_layer_end_index") == -1 else get.count("moe_layer_end_index")
    sparse = tuple(first <= number <= last and (number + 1) % every == 0 for number in range(layers))
    if not any(sparse):
        raise get.wrong("moe_layer_start_index", "one from which on a layer has a mixture")
    if get.count("moe_num_shared_experts") == 0:
        return MoeConfig(router, get.integer("moe_intermediate_size")), sparse
    return with_shared(get, router, "moe_num_shared_experts"), sparse


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    classifier=None,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    switches={"use_bias": (*ATTENTION_GROUPS, *MLP_GROUPS, *SHARED_GROUPS, HEAD)},
    constants={"rope_interleaved": True},
    mixture=Mixture(
        _mixture,
        dense=True,
        choice_bias="moe_statics.e_score_correction_bias",
        choice_dims=("1", "X"),
        shared="shared_experts",
        held=(("choice_bias", "gate.moe_statics.e_score_correction_bias"),),
    ),
    neutral={"use_rmsnorm": (True,), "moe_gate": ("topk",), "moe_use_aux_free": (True,)},
    ignored=(*IGNORED, Ignored(r"model\.mtp_.*", "of the module that predicts further tokens", copied=True)),
    gguf=NOT_COMPARED,
)
