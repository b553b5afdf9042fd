"""What a file may ask for: limits far above every model there is, so that a hostile file costs no hours and no memory.

Sizes that the stored tensors bound are not listed here: a model cannot have more layers than its files have tensors.
"""

LAYERS = 100_000
"""Of a model."""
DIMENSIONS = 32
"""Of a tensor; NumPy takes 64."""
PATTERNS = 4_000
"""Names or regular expressions in one setting of an adapter."""
PATTERN_LENGTH = 20_000
"""Characters of one of them."""
MATCH_SECONDS = 1.0
"""Of processor time that one regular expression may take, over all modules of a model."""
LISTED = 40
"""Names that a message lists before it counts the rest."""
