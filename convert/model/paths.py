"""Paths in the model's tree with their parts; dotted paths are split here alone.

A path names a tensor ("layers.3.self_attn.q_proj.weight"), an array of an adapter ("layers.3.self_attn.q_proj.lora_A")
or a module ("layers.3.self_attn.q_proj"). It is a string, for files, messages and dictionaries, and carries its parts,
so that nobody parses it.
"""

#: Ends of array paths, the longest first.
LEAVES = (
    *("modules_to_save.weight", "modules_to_save.bias", "base_layer.weight", "trainable_tokens_delta"),
    *(
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "lora_A",
        "lora_B",
        "weight",
        "choice_bias",
        "bias",
    ),
    *("alpha_p", "alpha_n", "beta", "eps"),
)
EMBEDDING, HEAD, NORM = "embed_tokens", "lm_head", "norm"
#: The head of a reward model, in the place of `HEAD`.
SCORE = "score"
#: The block of a mixture's experts, and the part of the block "mlp" that chooses among them.
EXPERTS, ROUTER = "mlp.experts", "router"
#: The modules with one row per token.
TABLES = (EMBEDDING, HEAD)


class WeightPath(str):
    """The path of an array or a module.

    Attributes:
        layer: the layer's number; None outside the layers.
        block: "self_attn", "mlp", "mlp.experts" or "mlp.shared_expert"; "" directly in the layer or the model.
        part: the module's own name, such as "q_proj", "input_layernorm" or "embed_tokens".
        leaf: one of `LEAVES`; "" for the module itself.
    """

    __slots__ = ("block", "layer", "leaf", "part")
    layer: int | None
    block: str
    part: str
    leaf: str

    def __new__(cls, layer: int | None, block: str, part: str, leaf: str = "weight") -> "WeightPath":
        """Join the parts."""
        start = () if layer is None else ("layers", str(layer))
        path = super().__new__(cls, ".".join(name for name in (*start, block, part, leaf) if name))
        path.layer, path.block, path.part, path.leaf = layer, block, part, leaf
        return path

    def __reduce__(self):
        return _restored, (self.layer, self.block, self.part, self.leaf)

    @classmethod
    def parse(cls, text: str) -> "WeightPath":
        """Split a path into its parts."""
        if isinstance(text, WeightPath):
            return text
        leaf = next((leaf for leaf in LEAVES if text.endswith(f".{leaf}")), "")
        *names, part = (text.removesuffix(f".{leaf}") if leaf else text).split(".")
        layer = None
        if names[:1] == ["layers"] and len(names) > 1 and names[1].isdecimal() and len(names[1]) < 10:
            layer, names = int(names[1]), names[2:]
        return cls(layer, ".".join(names), part, leaf)

    @property
    def module(self) -> "WeightPath":
        """The module that holds the array."""
        return self.with_leaf("")

    @property
    def keys(self) -> tuple[str, ...]:
        """The names along the path, as the keys of nested trees."""
        return tuple(self.split("."))

    @property
    def of_experts(self) -> bool:
        """Whether the array has a leading axis of experts."""
        return self.block == EXPERTS

    @property
    def is_router(self) -> bool:
        """Whether it is the router of a mixture, or an array of it."""
        return (self.block, self.part) == ("mlp", ROUTER)

    @property
    def inside(self) -> "WeightPath":
        """The path inside its layer: "self_attn.q_proj.weight"."""
        return self.in_layer(None)

    def with_leaf(self, leaf: str) -> "WeightPath":
        """Another array of the same module."""
        return WeightPath(self.layer, self.block, self.part, leaf)

    def in_layer(self, layer: int | None) -> "WeightPath":
        """Path of this array in another layer."""
        return WeightPath(layer, self.block, self.part, self.leaf)


def _restored(layer: int | None, block: str, part: str, leaf: str) -> WeightPath:
    return WeightPath(layer, block, part, leaf)
