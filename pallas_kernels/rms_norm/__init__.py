"""Root mean square normalisation."""

from pallas_kernels.rms_norm.api import rms_norm, rms_norm_in_stream
from pallas_kernels.rms_norm.implementations import REGISTRY

__all__ = ["REGISTRY", "rms_norm", "rms_norm_in_stream"]
