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


class Layer(NamedTuple):
    """A layer's kind.

    Attributes:
        mixer: settings of its mixer.
        ffn: `MLP` or `MOE`.
    """

    mixer: Mixer = Attention()
    ffn: str = MLP
