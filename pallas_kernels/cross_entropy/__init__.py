"""Cross-entropy over a large vocabulary without the whole logits."""

from pallas_kernels.cross_entropy.api import chunked_cross_entropy
from pallas_kernels.cross_entropy.config import chunk_size_for
from pallas_kernels.cross_entropy.log_probs import token_log_probs
from pallas_kernels.cross_entropy.reference import IGNORE_INDEX, CrossEntropy

__all__ = ["IGNORE_INDEX", "CrossEntropy", "chunk_size_for", "chunked_cross_entropy", "token_log_probs"]
