"""llama.cpp's architecture of a family, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from convert.model.spec import DOWN, GATE_UP, OUT, QKV

ALL_BIASES = (QKV, OUT, GATE_UP, DOWN)
SCALINGS = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    llama.cpp fixes by architecture what config.json can change: activation, windowed layers, biases, the scale of the
    scores. A deviating model is refused by the field's name.

    Attributes:
        paired: Whether it pairs neighbours in rotary positions where the family pairs halves: rows of q and k move.
        activation: The one that llama.cpp computes.
        biases: Groups of projections with biases.
        biased: Whether these always have them.
        norm_shift: Added to normalisations' scales.
        square: Whether all heads together must be as wide as the model.
        period: All layers but every `period`-th have a window; None: no windows.
        wide: Number of layers at which width per head replaces head size in the scale of the scores.
        query_scale: Whether the config has a scale of the scores; it must equal llama.cpp's.
        numbers: Field of config.json -> key for it, as `GGUFWriter.add_…` is called.
        optional: Further ones that may be null, and have no key then.
        scalings: Supported types of rotary scaling.
        scaling_named: Whether the absence of a scaling is a key of its own.
        original: Whether the original length is always a key.
        window: Whether the window is a key although llama.cpp ignores it.
        tied: Whether the head may be the embedding.
        qk_norm_from: Fewest layers with normalised queries and keys; None: as in the family.
        normalizes: Whether the weights of a token's experts are divided by their sum; None: no mixtures.
        grouped: Whether several query heads may share a key head.
        position_free: n: every n-th layer has no rotary positions; None: all have.
        recurrent: Whether layers have Gated DeltaNet (`convert.gguf_delta`).
    """

    name: str
    paired: bool = False
    activation: str = "silu"
    biases: tuple[str, ...] = ()
    biased: bool = False
    norm_shift: float = 0.0
    square: bool = False
    period: int | None = None
    wide: int | None = None
    query_scale: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[str, ...] = SCALINGS
    scaling_named: bool = False
    original: bool = False
    window: bool = False
    tied: bool = True
    qk_norm_from: int | None = None
    normalizes: bool | None = None
    grouped: bool = True
    position_free: int | None = None
    recurrent: bool = False
