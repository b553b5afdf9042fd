"""A layer's kind: its mixer, which moves values between tokens, and its feed-forward part, which sees one at a time."""

import dataclasses
from typing import ClassVar, NamedTuple, Protocol

#: Feed-forward parts: an MLP, or a mixture of experts.
MLP, MOE = "mlp", "moe"


class Mixer(Protocol):
    """The settings of a mixer, hashable: layers with equal ones share a traced body.

    Attributes:
        block: name of its block in paths, as transformers has it.
    """

    block: ClassVar[str]

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of its weights that a `ModelConfig` does not have, keys of `spec.AXES`."""
        ...


@dataclasses.dataclass(frozen=True)
class Attention:
    """Softmax attention.

    Attributes:
        sliding_window: tokens in the window, the current one included; None: all earlier ones.
        rope: the `ModelConfig` field of its rotary positions, "rope" or "local_rope"; None: no rotary positions.
    """

    sliding_window: int | None = None
    rope: str | None = "rope"
    block: ClassVar[str] = "self_attn"

    @property
    def sizes(self) -> dict[str, int]:
        """None: a `ModelConfig` has all dimensions."""
        return {}


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet (Yang et al., arXiv 2412.06464), a linear attention whose state is one matrix a head.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, gates and states, as many for each key head.
        key_dim: size of a key head.
        value_dim: size of a value head.
        taps: inputs that the convolution over queries, keys and values reads, the current one included.
        activation: of the convolution's output.
        interleaved: whether the input's projections are two, whose rows go by key heads: query, key, values and output
            gates of one, then those of the next; and of its update and decay likewise.
        largest_update: beta is this times a sigmoid: 1, or 2 for negative eigenvalues (arXiv 2411.12537).
        norm_eps: of the output's normalisation; None: the model's.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    activation: str = "silu"
    interleaved: bool = False
    largest_update: float = 1.0
    norm_eps: float | None = None
    block: ClassVar[str] = "linear_attn"

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of its weights."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return {
            "C": self.taps,
            "J*P": keys,
            "G": self.value_heads,
            "U": self.value_dim,
            "G*U": values,
            "2J*P+G*U": 2 * keys + values,
            "2J*P+2G*U": 2 * keys + 2 * values,
            "2G": 2 * self.value_heads,
        }

    @property
    def matrices(self) -> int:
        """Numbers in the matrices of a row's state."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def inputs(self) -> int:
        """Numbers in the inputs that a row's state keeps for the convolution."""
        return (self.taps - 1) * self.sizes["2J*P+G*U"]


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Softmax attention whose keys and values are projections of one latent (DeepSeek-V2, arXiv 2405.04434).

    A query or key has features without positions and rotary ones; the latter are one key for all heads.

    Attributes:
        num_heads: H.
        q_lora_rank: width of the queries' latent; 0: queries are projections of the layer's input.
        kv_lora_rank: width of the keys' and values' latent.
        qk_nope_head_dim: a head's features without positions.
        qk_rope_head_dim: rotary ones.
        v_head_dim: features of a value.
        index_topk: the most tokens of a row, of which an indexer would choose so many; None: there is none.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int | None = None
    block: ClassVar[str] = "self_attn"
    sliding_window: ClassVar[None] = None
    rope: ClassVar[str] = "rope"
    #: Added to the latents' mean squares, whatever the other normalisations add.
    norm_eps: ClassVar[float] = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Features of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of its weights."""
        queries = self.num_heads * self.qk_head_dim
        return {
            "Q": self.q_lora_rank,
            "Z": self.kv_lora_rank,
            "Z+R": self.kv_lora_rank + self.qk_rope_head_dim,
            "H*(N+R)": queries,
            "H*(N+R) of E": 0 if self.q_lora_rank else queries,
            "H*(N+Dv)": self.num_heads * (self.qk_nope_head_dim + self.v_head_dim),
            "H*Dv": self.num_heads * self.v_head_dim,
        }


class Layer(NamedTuple):
    """A layer's kind.

    Attributes:
        mixer: settings of its mixer.
        ffn: `MLP` or `MOE`.
    """

    mixer: Mixer = Attention()
    ffn: str = MLP
