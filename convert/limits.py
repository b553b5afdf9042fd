"""Limits on files' contents, far above every model, against hostile files that cost hours or memory.

The stored tensors bound the other sizes: a model cannot have more layers than its files have tensors.
"""

LAYERS = 100_000
"""Layers of a model."""
EXPERTS = 8_192
"""Experts of a layer."""
DIMENSIONS = 32
"""Dimensions of a tensor; NumPy takes 64."""
PATTERNS = 4_000
"""Names or regular expressions in one setting of an adapter."""
PATTERN_LENGTH = 20_000
"""Characters of one of them."""
MATCH_SECONDS = 1.0
"""Processor time that one regular expression may take, over all modules of a model."""
LISTED = 40
"""Names that a message lists before it counts the rest."""
