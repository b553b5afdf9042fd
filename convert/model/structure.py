"""Which modules a layer has, by the config: groups of projections, and normalisations, with their shapes.

Files, adapters, settings and the decoder all name modules as this table does.
"""

from typing import NamedTuple

from convert.model.config import ModelConfig


class Group(NamedTuple):
    """Projections of one input, which are one weight in memory.

    Attributes:
        parts: (name, output rows) of each, from the top row down.
        columns: width of the input.
        bias: whether they have biases.
    """

    parts: tuple[tuple[str, int], ...]
    columns: int
    bias: bool

    @property
    def rows(self) -> int:
        """Output rows of all parts."""
        return sum(rows for _, rows in self.parts)

    def place(self, part: str) -> tuple[int, slice]:
        """A part's number and its rows."""
        start = 0
        for number, (name, rows) in enumerate(self.parts):
            if name == part:
                return number, slice(start, start + rows)
            start += rows
        raise KeyError(part)


def groups(config: ModelConfig) -> dict[str, Group]:
    """The projections of a layer, "block.group" -> group, in the order of the computation."""
    width, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    qkv = (("qkv_proj", q + 2 * kv),) if config.fused else (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    gate_up = (("gate_up_proj", 2 * inner),) if config.fused else (("gate_proj", inner), ("up_proj", inner))
    found = {
        "self_attn.qkv": (qkv, width),
        "self_attn.o": ((("o_proj", width),), q),
        "mlp.gate_up": (gate_up, width),
        "mlp.down": ((("down_proj", width),), inner),
    }
    return {name: Group(parts, columns, name in config.biases) for name, (parts, columns) in found.items()}


def group_of(config: ModelConfig, module: str) -> tuple[str, Group]:
    """The group of a projection, by its name in the layer ("self_attn.q_proj")."""
    block, part = module.split(".")
    return next(
        (name, group)
        for name, group in groups(config).items()
        if name.startswith(f"{block}.") and part in dict(group.parts)
    )


def norms(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The normalisations of a layer, by their names in it, with the shapes of their scales."""
    around = dict.fromkeys(name for name in (*config.attention_norms, *config.mlp_norms) if name is not None)
    shapes: dict[str, tuple[int, ...]] = {name: (config.hidden_size,) for name in around}
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    if config.qk_norm is not None:
        size = config.head_dim
        for name, count in heads.items():
            kinds = {"head": (size,), "heads": (count, size), "projection": (count * size,)}
            shapes[f"self_attn.{name}"] = kinds[config.qk_norm]
    return shapes


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layer by its name in it, with its shape."""
    found = {f"{name}.weight": shape for name, shape in norms(config).items()}
    for name, group in groups(config).items():
        for part, rows in group.parts:
            module = f"{name.split('.')[0]}.{part}"
            found[f"{module}.weight"] = (rows, group.columns)
            if group.bias:
                found[f"{module}.bias"] = (rows,)
    return found
