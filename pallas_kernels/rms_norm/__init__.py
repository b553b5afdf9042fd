"""Root mean square normalisation."""

from pallas_kernels.rms_norm.api import REGISTRY, rms_norm, rms_norm_in_stream

__all__ = ["REGISTRY", "rms_norm", "rms_norm_in_stream"]
