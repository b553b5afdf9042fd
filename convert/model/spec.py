"""The one description of a weight, for loading, adapters, export, sharding, quantisation and optimizers.

A family's table gives rows, in names of dimensions; a config.json fills in layer numbers and sizes.
Experts come as a leading axis ("expert"), further kinds of weights as further values of `kind`.

Dimension letters: V vocabulary, E width, F feed-forward width, H query heads, K key heads, D head size, L layers, X
experts, EF and SF feed-forward width of an expert and of the shared one, C taps of a convolution; of a recurrent state
J key heads of size P, and G value heads of size U; of latent attention Q rank of the queries' latent, Z that of keys
and values, N and R features of a head without positions and rotary ones.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from convert.model.layers import Layer
from convert.model.paths import EMBEDDING, HEAD, SCORE, WeightPath

#: Kind of a weight -> its initialisation: matrices, tables and sinks are drawn, scales start at one, biases at zero,
#: the constants of xIELU as its authors' (arXiv 2411.13010).
INITS: dict[str, str | float] = {
    **dict.fromkeys(("matrix", "table", "experts", "router", "gate", "sinks", "score", "taps"), "normal"),
    "norm": "ones",
    "scale": 1.0,
    **dict.fromkeys(("bias", "choice_bias", "decay"), "zeros"),
    **{"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3)), "beta": 0.5, "eps": -1e-6},
}
#: Kinds that are vectors in a layer, or one row per head or expert, or one number; the others are matrices.
VECTORS = frozenset(("norm", "scale", "bias", "choice_bias", "sinks", "decay", "alpha_p", "alpha_n", "beta", "eps"))
#: Kinds of a layer's matrices that are quantised.
QUANTIZED = frozenset(("matrix", "experts"))
#: Kinds that are linear modules in transformers' layers.
LINEAR = frozenset(("matrix", "gate"))
#: Kinds whose dtype stays when a model is cast: routers choose by small differences.
UNCAST = frozenset(("choice_bias",))
#: Kinds of modules that a quantised folder names where they are not quantised.
MODULES = QUANTIZED | LINEAR | {"router"}
#: Kinds of a layer's matrices of their own that adapters can be on.
ADAPTED = LINEAR | {"router"}
#: Dimension of a row -> its logical axis.
AXES = {
    "V": "vocabulary",
    "E": "embed",
    "F": "mlp",
    "2F": "mlp",
    "H": "heads",
    "K": "key_heads",
    "D": "head_dim",
    "H*D": "heads",
    "K*D": "key_heads",
    "(H+2K)*D": "heads",
    "2H*D": "heads",
    "X": "expert",
    "EF": "expert_mlp",
    "SF": "mlp",
    **dict.fromkeys(("Q", "Z", "Z+R"), "latent"),
    **dict.fromkeys(("H*(N+R)", "H*(N+R) of E", "H*(N+Dv)", "H*Dv"), "heads"),
    "C": "taps",
    "1": "gate",
    **dict.fromkeys(("J*P", "G", "U", "G*U", "2J*P+G*U", "2J*P+2G*U", "2G"), "state"),
}
#: Layouts of weights in files: as in the tree; one tensor an expert; all experts in one tensor, the rows of the weights
#: that share it one after the other; the same, each expert transposed and the weights' rows by turns.
WHOLE, APART, MERGED, INTERLEAVED = "whole", "apart", "merged", "interleaved"


class WeightSpec(NamedTuple):
    """One tensor of a model.

    Attributes:
        path: its place in the tree.
        name: the name of its tensor in the checkpoint, with ``{x}`` for the expert's number in the layout "apart".
        shape: its sizes in the tree.
        axes: the names of its logical axes.
        kind: "matrix" (in a layer: the target of adapters, quantisation and decay), "table" (one row per token),
            "norm", "scale" (of a normalisation without the family's offset), "bias", "experts" (the matrices of all
            experts), "router", "gate" (of a shared expert), "choice_bias" (of a router, for the choice alone), "sinks"
            (attention logits of no key, one a head), "taps" (of a convolution, a row a channel), "decay" (of a
            recurrent state), "score" (a reward model's head), "alpha_p", "alpha_n", "beta" or "eps" (of an
            activation, `models.mlp.XIELU`).
        group: its fused group of projections in memory, such as "self_attn.qkv"; None without one.
        layout: how it lies in files: "whole", "apart", "merged" or "interleaved".
    """

    path: WeightPath
    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    group: str | None = None
    layout: str = WHOLE

    @property
    def init(self) -> str | float:
        """Its initialisation: "normal", "ones" (less a family's offset), "zeros" or a number."""
        return INITS[self.kind]


class Row(NamedTuple):
    """A tensor in a family's table.

    Attributes:
        name: its name in the checkpoint, with ``{i}`` for the layer's number and ``{x}`` for the expert's.
        path: its path; in layer 0 if it is in a layer.
        dims: its dimensions, keys of `AXES`, whose sizes are those of `dimensions` and `MoeConfig.sizes`.
        kind: as in `WeightSpec`.
        group: as in `WeightSpec`.
        when: the config's flag for the tensor; None: it always exists.
        ffn: the feed-forward part of the layers that have it; None: either.
        layout: as in `WeightSpec`.
        mixer: the block of the mixer of the layers that have it; None: any.
    """

    name: str
    path: WeightPath
    dims: tuple[str, ...]
    kind: str
    group: str | None = None
    when: str | None = None
    ffn: str | None = None
    layout: str = WHOLE
    mixer: str | None = None

    def is_in(self, layer: Layer) -> bool:
        """Whether a layer has it."""
        block, mixer = self.path.block, layer.mixer.block
        mine = not block or block.startswith(("mlp", mixer))
        return mine and self.ffn in (None, layer.ffn) and self.mixer in (None, mixer)

    def spec(self, layer: int | None, sizes: dict[str, int]) -> WeightSpec:
        """Fill in a layer's number and the sizes."""
        shape, axes = tuple(sizes[dim] for dim in self.dims), tuple(AXES[dim] for dim in self.dims)
        name = self.name.replace("{i}", str(layer))
        return WeightSpec(self.path.in_layer(layer), name, shape, axes, self.kind, self.group, self.layout)


def dimensions(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
) -> dict[str, int]:
    """The sizes of a decoder's dimensions, by their names in rows."""
    heads, key_heads = num_attention_heads, num_key_value_heads
    return {
        "V": vocab_size,
        "E": hidden_size,
        "F": intermediate_size,
        "2F": 2 * intermediate_size,
        "H": heads,
        "K": key_heads,
        "D": head_dim,
        "H*D": heads * head_dim,
        "K*D": key_heads * head_dim,
        "(H+2K)*D": (heads + 2 * key_heads) * head_dim,
        "2H*D": 2 * heads * head_dim,
        "1": 1,
    }


def head_flag(*, scored: bool, tied: bool) -> str:
    """The flag of a model's head: "scored", "tied" (there is none of its own) or "untied"."""
    return "scored" if scored else "tied" if tied else "untied"


def qk_norm_flag(qk_norm: str | None) -> str:
    """The flag of scales of queries and keys that a family's config.json may leave out.

    Args:
        qk_norm: a key of `QK_NORMS`.
    """
    return f"qk_norm of {qk_norm}"


def fill_table(
    rows: Sequence[Row], sizes: dict[str, int], flags: Collection[str], layers: Sequence[Layer]
) -> tuple[WeightSpec, ...]:
    """Every weight of a model in order: embeddings, layer by layer, normalisation, head.

    Args:
        rows: the family's table.
        sizes: of the dimensions.
        flags: those that the config raises, of `Row.when`.
        layers: the layers' kinds; a mixer's alone have the rows of its block.

    A row with a dimension of size 0 is no tensor.
    """
    specs: list[WeightSpec] = []
    wanted = (row for row in rows if row.when is None or row.when in flags)
    for layered, group in itertools.groupby(wanted, key=lambda row: row.path.layer is not None):
        members = list(group)
        if not layered:
            specs += [row.spec(None, sizes) for row in members]
        for number, layer in enumerate(layers if layered else ()):
            here = (row.spec(number, sizes | layer.mixer.sizes) for row in members if row.is_in(layer))
            specs += [spec for spec in here if 0 not in spec.shape]
    return tuple(specs)


class Group(NamedTuple):
    """Projections of one input, stored as one weight.

    Attributes:
        block: "self_attn", "mlp", "mlp.experts" or "mlp.shared_expert".
        name: its name in the block: "qkv", "o", "gate_up" or "down".
        parts: (name, output rows) of each, from the top row down; of one expert.
        columns: width of the input.
        bias: whether they have biases.
        experts: number of experts, the weight's leading axis; None: there is no such axis.
    """

    block: str
    name: str
    parts: tuple[tuple[str, int], ...]
    columns: int
    bias: bool
    experts: int | None = None

    @property
    def path(self) -> WeightPath:
        """Its weight's path in its layer."""
        return WeightPath(None, self.block, self.name)

    @property
    def rows(self) -> int:
        """Output rows of all parts."""
        return sum(rows for _, rows in self.parts)

    def part_rows(self, part: str) -> slice:
        """The rows of a part."""
        start = 0
        for name, rows in self.parts:
            if name == part:
                return slice(start, start + rows)
            start += rows
        raise KeyError(part)


def groups(specs: Sequence[WeightSpec]) -> dict[str, Group]:
    """The projections of one layer, group -> its parts, in the order of the computation."""
    by_group: dict[str, list[WeightSpec]] = {}
    for spec in specs:
        if spec.group is not None:
            by_group.setdefault(spec.group, []).append(spec)
    return {group: _group(group, members) for group, members in by_group.items()}


def _group(group: str, members: Sequence[WeightSpec]) -> Group:
    matrices = [spec for spec in members if spec.path.leaf == "weight"]
    block, first = matrices[0].path.block, matrices[0]
    parts = tuple((spec.path.part, spec.shape[-2]) for spec in matrices)
    experts = first.shape[0] if first.kind == "experts" else None
    biased = len(matrices) < len(members)
    return Group(block, group.removeprefix(f"{block}."), parts, first.shape[-1], biased, experts)


def layer_row(name: str, *dims: str, kind: str, group: str | None = None, when: str | None = None) -> Row:
    """A tensor inside a layer, by its name there."""
    path = WeightPath.parse(f"layers.0.{name}")
    return Row(f"model.layers.{{i}}.{name}", path, dims, kind, group, when)


def norm(name: str, leaves: Collection[str] = ("weight",), *dims: str, kind: str = "norm") -> tuple[Row, ...]:
    """The scale of a normalisation, its bias or neither, by default over the model's width."""
    kinds = {"weight": kind, "bias": "bias"}
    return tuple(layer_row(f"{name}.{leaf}", *(dims or ("E",)), kind=kinds[leaf]) for leaf in leaves)


def _qk_norms(queries: tuple[str, ...], keys: tuple[str, ...]) -> tuple[Row, ...]:
    dims = {"q_norm": queries, "k_norm": keys}
    return tuple(row for name, of in dims.items() for row in norm(f"self_attn.{name}", ("weight",), *of))


def linear(name: str, out: str, into: str, group: str) -> tuple[Row, ...]:
    """A matrix [out, in], and its bias where the config gives the group one."""
    return (
        layer_row(f"{name}.weight", out, into, kind="matrix", group=group),
        layer_row(f"{name}.bias", out, kind="bias", group=group, when=group),
    )


def table(*layer: tuple[Row, ...], final: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a model: embeddings, layer, final normalisation, and the head if untied, or a reward model's."""
    return (
        Row("model.embed_tokens.weight", WeightPath(None, "", EMBEDDING), ("V", "E"), "table"),
        *(row for rows in layer for row in rows),
        *(row._replace(name=f"model.{row.path.inside}", path=row.path.inside) for row in final),
        Row("lm_head.weight", WeightPath(None, "", HEAD), ("V", "E"), "table", when="untied"),
        Row("lm_head.bias", WeightPath(None, "", HEAD, "bias"), ("V",), "bias", when=HEAD),
        Row("score.weight", WeightPath(None, "", SCORE), ("1", "E"), "score", when="scored"),
    )


QKV, OUT, GATE_UP, DOWN = "self_attn.qkv", "self_attn.o", "mlp.gate_up", "mlp.down"
EXPERTS_GATE_UP, EXPERTS_DOWN = "mlp.experts.gate_up", "mlp.experts.down"
SHARED_GATE_UP, SHARED_DOWN = "mlp.shared_expert.gate_up", "mlp.shared_expert.down"
#: Groups of projections in the attention, in the MLP and in the shared expert.
ATTENTION_GROUPS, MLP_GROUPS, SHARED_GROUPS = (QKV, OUT), (GATE_UP, DOWN), (SHARED_GATE_UP, SHARED_DOWN)
_ATTENTION = (
    *linear("self_attn.q_proj", "H*D", "E", QKV),
    *linear("self_attn.k_proj", "K*D", "E", QKV),
    *linear("self_attn.v_proj", "K*D", "E", QKV),
    *linear("self_attn.o_proj", "E", "H*D", OUT),
)
FUSED_ATTENTION = (
    *linear("self_attn.qkv_proj", "(H+2K)*D", "E", QKV),
    *linear("self_attn.o_proj", "E", "H*D", OUT),
)
#: Where the gates of the heads' outputs come from: nowhere, out of the queries' projection, behind each head's query,
#: or out of one of their own.
ATTENTION = {
    None: _ATTENTION,
    "queries": (*linear("self_attn.q_proj", "2H*D", "E", QKV), *_ATTENTION[2:]),
    "projection": (*_ATTENTION, *linear("self_attn.gate_proj", "H*D", "E", "self_attn.gate")),
}
MLP = (
    *linear("mlp.gate_proj", "F", "E", GATE_UP),
    *linear("mlp.up_proj", "F", "E", GATE_UP),
    *linear("mlp.down_proj", "E", "F", DOWN),
)
#: Latent attention: queries of a latent or of the layer's input, one latent of keys and values with the rotary key.
LATENT = (
    *linear("self_attn.q_a_proj", "Q", "E", QKV),
    *linear("self_attn.kv_a_proj_with_mqa", "Z+R", "E", QKV),
    *norm("self_attn.q_a_layernorm", ("weight",), "Q"),
    *norm("self_attn.kv_a_layernorm", ("weight",), "Z"),
    *linear("self_attn.q_proj", "H*(N+R) of E", "E", "self_attn.q"),
    *linear("self_attn.q_b_proj", "H*(N+R)", "Q", "self_attn.q"),
    *linear("self_attn.kv_b_proj", "H*(N+Dv)", "Z", "self_attn.kv"),
    *linear("self_attn.o_proj", "E", "H*Dv", OUT),
)
FUSED_MLP = (*linear("mlp.gate_up_proj", "2F", "E", GATE_UP), *linear("mlp.down_proj", "E", "F", DOWN))
PLAIN_MLP = (*linear("mlp.up_proj", "F", "E", GATE_UP), *linear("mlp.down_proj", "E", "F", DOWN))
#: Attention logits of no key, one a head, in the softmax's denominator.
SINKS = (Row("model.layers.{i}.self_attn.sinks", WeightPath(0, "self_attn", "sinks"), ("H",), "sinks"),)
#: Scales of queries and keys: none, one for each feature of a head, of all heads together, or of each head's own.
QK_NORMS = {
    None: (),
    "unscaled head": (),
    "head": _qk_norms(("D",), ("D",)),
    "projection": _qk_norms(("H*D",), ("K*D",)),
    "heads": _qk_norms(("H", "D"), ("K", "D")),
}
