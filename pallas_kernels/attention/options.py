"""The static options of an attention call: hashable, shared by every implementation."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call.

    Attributes:
        scale: factor of the logits.
        causal: key t is visible to query s only if t <= s + query_offset.
        sliding_window: a query sees the keys t > s + query_offset − sliding_window only, that is with ``causal`` its
            own and the sliding_window − 1 before it; without ``causal`` also only t < s + query_offset +
            sliding_window, as many behind it as before. None: no window.
        logits_soft_cap: logits become cap · tanh(logits / cap); None: no cap.
        dropout_rate: probability that a weight is dropped; 0: no dropout.
        query_offset: the position of every row's first query among the keys where it is known; None: in the mask.
    """

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    query_offset: int | None = None
