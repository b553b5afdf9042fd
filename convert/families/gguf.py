"""What llama.cpp computes of a family, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from convert.model.spec import DOWN, GATE_UP, OUT, QKV

ALL_BIASES = (QKV, OUT, GATE_UP, DOWN)
RMS_EPS = {"rms_norm_eps": "layer_norm_rms_eps"}
SCALINGS = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    llama.cpp fixes by architecture what config.json can change: activation, which layers have windows, biases, the
    scale of the scores. A model that differs there is refused by the name of the field.

    Attributes:
        name: In `gguf.MODEL_ARCH`.
        paired: Whether rotary positions pair neighbours where the family pairs halves: rows of q and k move.
        activation: The one that llama.cpp computes.
        biases: Groups of projections whose biases it adds.
        norm_shift: Added to the scales of normalisations.
        square: Whether all heads together must be as wide as the model.
        period: All layers but each so many-th have a window; None: llama.cpp knows none.
        wide: With so many layers the scores are scaled by the width a head instead of its size.
        query_scale: Whether the config has a scale of the scores, which must be llama.cpp's.
        numbers: Field of config.json -> key for it, as `GGUFWriter.add_…` is called.
        scalings: Types of rotary scaling that it computes.
        scaling_named: Whether the absence of a scaling is a key of its own.
        original: Whether the original length is always a key.
        window: Whether the window is a key though llama.cpp leaves it out.
        tied: Whether the head may be the embedding.
        qk_norm_from: With so many layers queries and keys are normalised, with fewer not; None: as the family has it.
        position_free: Each so many-th layer has no rotary positions; None: all have.
    """

    name: str
    paired: bool = False
    activation: str = "silu"
    biases: tuple[str, ...] = ()
    norm_shift: float = 0.0
    square: bool = False
    period: int | None = None
    wide: int | None = None
    query_scale: bool = False
    numbers: Mapping[str, str] = field(default_factory=lambda: RMS_EPS)
    scalings: tuple[str, ...] = SCALINGS
    scaling_named: bool = False
    original: bool = False
    window: bool = False
    tied: bool = True
    qk_norm_from: int | None = None
    position_free: int | None = None
