"""K-EXAONE: EXAONE 4's attention, and mixtures behind the first layers whose experts are chosen within groups."""

from convert.families.exaone4 import EXAONE4
from convert.families.family import IGNORED, NOT_COMPARED, Family, Ignored
from convert.families.mixture import GROUPED, Mixture, dense_first, grouped_mixture, listed_mixtures
from convert.model.reader import Reader


def _sparse(get: Reader, layers: int) -> tuple[bool, ...]:
    """Published files say the layers with mixtures twice more, in fields that transformers ignores."""
    sparse, first = listed_mixtures(dense_first)(get, layers), get.count("first_k_dense_replace")
    for name, meant in (("is_moe_layer", list(sparse)), ("first_last_k_dense_replace", first)):
        if get.value(name) not in (None, meant):
            raise get.wrong(name, f"{meant}, as mlp_layer_types and first_k_dense_replace say")
    return sparse


EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    classifier=None,
    defaults={
        **EXAONE4.defaults,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    constants={"qk_norm": "head"},
    mixture=Mixture(
        grouped_mixture(_sparse, experts=("num_experts",), shared="num_shared_experts"),
        dense=True,
        choice_bias="e_score_correction_bias",
        shared="shared_experts",
        held=(("choice_bias", "gate.e_score_correction_bias"),),
    ),
    read=EXAONE4.read,
    neutral=GROUPED,
    ignored=(*IGNORED, Ignored(r"mtp\..*", "of the module that predicts further tokens", copied=True)),
    gguf=NOT_COMPARED,
)
