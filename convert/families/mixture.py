"""Mixtures of experts of a family: their settings in config.json and their tensors in files.

Files have an expert's projections as tensors of their own ("apart"), or all experts' in one: gate's and up's rows one
after the other, [X, 2F, E] ("merged"; transformers 5 in memory), or by turns and transposed, [X, E, 2F]
("interleaved"; gpt-oss). In the tree gate, up and down are one weight each, [X, out, in].
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from convert.errors import unexpected
from convert.limits import EXPERTS as MOST_EXPERTS
from convert.model.layers import MOE
from convert.model.moe import MoeConfig, RouterConfig
from convert.model.paths import EXPERTS, ROUTER, WeightPath
from convert.model.reader import Reader
from convert.model.spec import APART, EXPERTS_DOWN, EXPERTS_GATE_UP, MERGED, SHARED_DOWN, SHARED_GATE_UP, Row

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
#: Fields beside `grouped_mixture`'s in published files -> their values without effect.
GROUPED = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32",),
}
#: Projection -> its dimensions, its group, and its tensor where all experts share one.
_EXPERTS = {
    "gate_proj": (("X", "EF", "E"), EXPERTS_GATE_UP, "gate_up_proj"),
    "up_proj": (("X", "EF", "E"), EXPERTS_GATE_UP, "gate_up_proj"),
    "down_proj": (("X", "E", "EF"), EXPERTS_DOWN, "down_proj"),
}
_SHARED = {
    "gate_proj": (("SF", "E"), SHARED_GATE_UP),
    "up_proj": (("SF", "E"), SHARED_GATE_UP),
    "down_proj": (("E", "SF"), SHARED_DOWN),
}


@dataclass(frozen=True)
class Mixture:
    """A family's mixtures.

    Attributes:
        read: (reader, number of layers) -> the settings, and for each layer whether it is a mixture.
        dense: whether some layers may be dense.
        layout: of the experts' tensors: "apart", "merged" or "interleaved".
        block: the block's name in files.
        router: the router's.
        choice_bias: of the router's bias for the choice.
        choice_dims: its dimensions.
        shared: the shared expert's.
        projections: names of gate, up and down of an expert by itself.
        renamed: whether PEFT takes the names of projections and router for the experts (`convert.renamed_modules`).
        held: the names that differ as transformers 5 holds the mixture: (field here, name).
    """

    read: Callable[[Reader, int], tuple[MoeConfig, tuple[bool, ...]]]
    dense: bool = False
    layout: str = APART
    block: str = "mlp"
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    choice_dims: tuple[str, ...] = ("X",)
    shared: str = "shared_expert"
    projections: tuple[str, str, str] = PROJECTIONS
    renamed: bool = True
    held: tuple[tuple[str, str], ...] = ()

    @property
    def in_memory(self) -> "Mixture":
        """The mixture as transformers 5 holds it."""
        return dataclasses.replace(self, **{"layout": MERGED, "block": "mlp", **dict(self.held)})

    @property
    def router_name(self) -> str:
        """The last part of the router's name."""
        return WeightPath.parse(self.router).part

    def rows(self) -> tuple[Row, ...]:
        """The tensors of one layer's mixture."""
        return (*self._router(), *self._experts(), *self._shared())

    def _router(self) -> tuple[Row, ...]:
        start = f"{self.block}.{self.router}"
        return (
            _row(f"{start}.weight", "mlp", ROUTER, "weight", "X", "E", kind="router"),
            _row(f"{start}.bias", "mlp", ROUTER, "bias", "X", kind="bias", when="router bias"),
            _row(
                f"{self.block}.{self.choice_bias}",
                *("mlp", ROUTER, "choice_bias", *self.choice_dims),
                kind="choice_bias",
                when="choice bias",
            ),
        )

    def _experts(self) -> tuple[Row, ...]:
        rows = []
        for part, name_in_files in zip(PROJECTIONS, self.projections, strict=True):
            dims, group, together = _EXPERTS[part]
            for leaf, kind, axes in (("weight", "experts", dims), ("bias", "bias", dims[:2])):
                if self.layout == APART:
                    name = f"{self.block}.experts.{{x}}.{name_in_files}.{leaf}"
                else:
                    name = f"{self.block}.experts.{together}{'' if leaf == 'weight' else '_bias'}"
                when = None if leaf == "weight" else "experts bias"
                row = _row(name, EXPERTS, part, leaf, *axes, kind=kind, group=group, when=when)
                rows.append(row._replace(layout=self.layout))
        return tuple(rows)

    def _shared(self) -> tuple[Row, ...]:
        start = f"{self.block}.{self.shared}"
        return (
            *(
                _row(
                    f"{start}.{part}.{leaf}", "mlp.shared_expert", part, leaf, *axes, kind=kind, group=group, when=when
                )
                for part, (dims, group) in _SHARED.items()
                for leaf, kind, axes, when in (("weight", "matrix", dims, None), ("bias", "bias", dims[:1], group))
            ),
            _row(
                f"{start}_gate.weight",
                *("mlp", "shared_expert_gate", "weight", "1", "E"),
                kind="gate",
                when="shared gate",
            ),
        )


def _row(
    name: str,
    block: str,
    part: str,
    leaf: str,
    *dims: str,
    kind: str,
    group: str | None = None,
    when: str | None = None,
) -> Row:
    return Row(f"model.layers.{{i}}.{name}", WeightPath(0, block, part, leaf), dims, kind, group, when, ffn=MOE)


def number_of_experts(get: Reader, *names: str) -> int:
    """The number of experts, under one of several names.

    Raises:
        ConvertError: two of them disagree, or it is no positive integer.
    """
    given = [name for name in names if get.config.get(name) is not None]
    count = get.integer(given[0] if given else names[0])
    for name in names:
        get.asked.add(name)
        if name in given and get.value(name) != count:
            raise get.wrong(name, f"{count}, as {given[0]} says")
    if count > MOST_EXPERTS:
        raise get.wrong(given[0] if given else names[0], f"at most {MOST_EXPERTS}")
    return count


def chosen_experts(get: Reader, experts: int, name: str = "num_experts_per_tok") -> int:
    """The number of a token's experts, at most that of all."""
    chosen = get.integer(name)
    if chosen > experts:
        raise get.wrong(name, f"at most the number of experts, {experts}")
    return chosen


def sigmoid_router(get: Reader, *names: str, scale: float = 1.0) -> RouterConfig:
    """A router by sigmoids, with a bias for the choice, whose chosen weights are divided by their sum.

    Args:
        get: the config.json.
        names: of the number of experts.
        scale: factor of the weights.
    """
    experts = number_of_experts(get, *names)
    chosen = chosen_experts(get, experts)
    return RouterConfig(experts, chosen, score="sigmoid", normalize=True, scale=scale, choice_bias=True)


def with_shared(get: Reader, router: RouterConfig, name: str) -> MoeConfig:
    """Experts of `moe_intermediate_size`, and a shared one as wide as several.

    Args:
        get: the config.json.
        router: of the experts.
        name: of the number of the shared expert's widths.
    """
    size = get.integer("moe_intermediate_size")
    shared = size * get.integer(name)
    if shared >= 2**31:
        raise unexpected(get.where, name, "a width below 2³¹", shared)
    return MoeConfig(router, size, shared)


def softmax_router(get: Reader, *names: str, normalize: bool | None = None) -> RouterConfig:
    """A router by softmax over all experts.

    Args:
        get: the config.json.
        names: of the number of experts.
        normalize: whether the chosen weights are divided by their sum; None: `norm_topk_prob`.
    """
    experts = number_of_experts(get, *names)
    normalize = get.flag("norm_topk_prob") if normalize is None else normalize
    return RouterConfig(experts, chosen_experts(get, experts), normalize=normalize)


def softmax_mixture(
    *names: str, normalize: bool | None = None
) -> Callable[[Reader, int], tuple[MoeConfig, tuple[bool, ...]]]:
    """Experts of `intermediate_size` in every layer, with a router as of `softmax_router`."""

    def read(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
        router = softmax_router(get, *names, normalize=normalize)
        return MoeConfig(router, get.integer("intermediate_size")), everywhere(layers)

    return read


def grouped_mixture(
    layers_of: Callable[[Reader, int], tuple[bool, ...]] | None = None,
    score: str = "sigmoid",
    *,
    experts: tuple[str, ...] = ("n_routed_experts", "num_local_experts"),
    shared: str = "n_shared_experts",
) -> Callable[[Reader, int], tuple[MoeConfig, tuple[bool, ...]]]:
    """Mixtures whose experts are chosen within the best of their groups (DeepSeek-V3, arXiv 2412.19437).

    Args:
        layers_of: (reader, number of layers) -> which layers have one; None: all behind `first_k_dense_replace`.
        score: as in `RouterConfig`; a sigmoid has a bias for the choice.
        experts: names of the number of experts.
        shared: name of the number of the shared expert's widths.
    """

    def read(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
        moe = with_shared(get, _grouped_router(get, number_of_experts(get, *experts), score), shared)
        return moe, (layers_of or dense_first)(get, layers)

    return read


def _grouped_router(get: Reader, experts: int, score: str) -> RouterConfig:
    get.asked |= {"num_nextn_predict_layers", "num_mtp_layers"}
    chosen, groups = chosen_experts(get, experts), get.integer("n_group")
    if experts % groups or (experts < 2 * groups):
        raise get.wrong("n_group", f"a divisor of {experts} experts, two or more a group")
    allowed = get.integer("topk_group")
    if allowed > groups:
        raise get.wrong("topk_group", f"at most n_group, {groups}")
    if chosen > allowed * (experts // groups):
        raise get.wrong(
            "num_experts_per_tok", f"at most the {allowed * (experts // groups)} experts of {allowed} groups"
        )
    return RouterConfig(
        experts,
        chosen,
        score=score,
        normalize=get.flag("norm_topk_prob"),
        scale=get.positive("routed_scaling_factor"),
        groups=groups,
        groups_per_token=allowed,
        choice_bias=score == "sigmoid",
    )


def dense_first(get: Reader, layers: int, name: str = "first_k_dense_replace") -> tuple[bool, ...]:
    """A mixture in every layer behind the first ones, which a field counts."""
    dense = get.count(name, layers - 1)
    return tuple(number >= dense for number in range(layers))


def first_dense(get: Reader, layers: int) -> tuple[bool, ...]:
    """A mixture in every layer but the first."""
    return (False, *everywhere(layers - 1))


def listed_mixtures(
    unlisted: Callable[[Reader, int], tuple[bool, ...]],
) -> Callable[[Reader, int], tuple[bool, ...]]:
    """Mixtures in the layers that `mlp_layer_types` names "sparse".

    Args:
        unlisted: (reader, number of layers) -> which layers have one without a list.
    """

    def read(get: Reader, layers: int) -> tuple[bool, ...]:
        kinds = get.value("mlp_layer_types")
        if kinds is None:
            return unlisted(get, layers)
        get.asked.add("first_k_dense_replace")
        named = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
        if not named or len(kinds) != layers or "sparse" not in kinds:
            raise get.wrong("mlp_layer_types", f"{layers} of dense and sparse, one of them sparse")
        return tuple(kind == "sparse" for kind in kinds)

    return read


def everywhere(layers: int) -> tuple[bool, ...]:
    """A mixture in every layer."""
    return (True,) * layers


def sparse_steps(get: Reader, layers: int) -> tuple[bool, ...]:
    """A mixture in every `decoder_sparse_step`-th layer, except in `mlp_only_layers` (Qwen)."""
    step, dense = get.integer("decoder_sparse_step"), get.value("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise get.wrong("mlp_only_layers", "a list of layer numbers")
    sparse = tuple(number not in dense and (number + 1) % step == 0 for number in range(layers))
    if not any(sparse):
        where, given = "decoder_sparse_step, mlp_only_layers", (step, dense)
        raise unexpected(get.where, where, "a mixture in at least one layer", given)
    return sparse
