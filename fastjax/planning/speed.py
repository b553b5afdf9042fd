"""The time of a compiled step by the roofline (Williams et al., 10.1145/1498765.1498785): an estimate.

A product takes its FLOPs at a share of the card's peak, or its bytes at a share of its bandwidth if that is longer; any
other kernel its bytes. The FLOPs of attention and of the products that Pallas kernels compute are what the step's are
above those of cuBLAS. Copies of activations to and from the host's memory overlap with the rest in part, those of
layers' weights wholly.
"""

from collections.abc import Sequence

import numpy as np

from fastjax.planning.hlo import Kernel
from pallas_kernels.cards import Card, peak_flops

#: Share of the peak that products reach, and of the bandwidth that other kernels do.
PEAK_SHARE, BANDWIDTH_SHARE = 0.7, 0.7
#: Share of the time of copies to and from the host by which a step is longer: an H200, scanned
#: (docs/lab/long_rows.md).
EXPOSED_SHARE = 0.1
#: Share of the bus's bandwidth that large copies reach: 54 of 63 GB/s, beside an H200.
BUS_SHARE = 0.85


def step_seconds(
    kernels: Sequence[Kernel],
    *,
    flops: float,
    offloaded_bytes: float,
    streamed_bytes: float,
    card: Card,
    dtype: np.dtype,
) -> float:
    """Seconds of a step.

    Args:
        kernels: of the compiled step.
        flops: of the whole step, recomputation included.
        offloaded_bytes: of activations in the host's memory, written and read once a step.
        streamed_bytes: of layers' weights that a step fetches from the host's memory.
        card: the card.
        dtype: of the products that are not in float8; one that the card has no rate for is taken to run at float32's.
    """
    peak = peak_flops(card.device_kind, dtype) or peak_flops(card.device_kind, np.dtype(np.float32))
    assert peak is not None, f"{card.device_kind} is in PEAK_FLOPS"
    rate, bandwidth = PEAK_SHARE * peak, BANDWIDTH_SHARE * card.bandwidth
    rates = {False: rate, True: PEAK_SHARE * (peak_flops(card.device_kind, "float8") or peak)}
    known = sum(kernel.flops * kernel.times for kernel in kernels)
    seconds = sum(
        max(kernel.flops / rates[kernel.float8], kernel.moved / bandwidth) * kernel.times for kernel in kernels
    )
    seconds += max(0.0, flops - known) / rate
    copies = 2 * offloaded_bytes / card.host_bandwidth
    streams = streamed_bytes / (BUS_SHARE * card.host_bandwidth)
    return max(seconds + EXPOSED_SHARE * copies, copies + streams)
