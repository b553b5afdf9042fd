"""Shapes that tests and benchmarks share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """A product of routed rows with experts' matrices.

    Attributes:
        experts: number of matrices.
        tokens: before routing.
        experts_per_token: rows of each token.
        out: rows of a matrix.
        into: its columns.
    """

    experts: int
    tokens: int
    experts_per_token: int
    out: int
    into: int

    @property
    def rows(self) -> int:
        """Routed rows."""
        return self.tokens * self.experts_per_token

    @property
    def flops(self) -> float:
        """Operations of one product."""
        return 2.0 * self.rows * self.out * self.into

    def __str__(self) -> str:
        """For tables: "128 × 65536 × 2048→1536"."""
        return f"{self.experts} × {self.rows} × {self.into}→{self.out}"


#: Qwen3-30B-A3B's gate and up, its down, and Mixtral's gate or up.
BENCHMARK = (Shape(128, 8192, 8, 1536, 2048), Shape(128, 8192, 8, 2048, 768), Shape(8, 8192, 2, 14336, 4096))
#: A short batch, as in decoding.
FEW = Shape(128, 64, 8, 1536, 2048)
#: Gate and up of Qwen3-30B-A3B.
BLOCK = BENCHMARK[0]
