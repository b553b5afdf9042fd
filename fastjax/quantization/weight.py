"""The protocol of a frozen or trained matrix, whatever its format."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import few_rows, float8
from pallas_kernels.few_experts import Items
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dx
from pallas_kernels.tiles import RANKS

#: Logical axes of a weight's arrays: the weight itself with a PartitionSpec of logical names for each leaf.
Axes: TypeAlias = Any


W = TypeVar("W")
X = TypeVar("X")


class Float8Operand(NamedTuple):
    """A matrix or its transpose as an operand of a product in float8.

    Attributes:
        codes: float8_e4m3fn, the summed axis last.
        scales: float32, one a row of the codes.
        factors: float32, that the other operand is multiplied with before it is rounded, one for each term of the sum;
            None: it is not.
    """

    codes: Float[Array, "rows summed"]
    scales: Float[Array, " rows"]
    factors: Float[Array, " summed"] | None = None


class Weight(abc.ABC):
    """A matrix [out, in] in some format.

    A packed one is a registered dataclass. Its static fields describe one matrix of one layer, whatever axes its arrays
    lead with: the layer's in a stack, then the expert's in a mixture. The products over groups are those of a
    mixture's experts. What is not overridden here serves frozen matrices.

    Attributes:
        shape: (out, in).
        formats: the names of its formats in reports: "NF4", or a dtype.
    """

    shape: tuple[int, ...]
    formats: tuple[str, ...]

    def matmul(self, x: Float[Array, "B S in"]) -> Float[Array, "B S out"]:
        """x·Wᵀ in the dtype of x, accumulated in float32; in true float32 where x is float32."""
        return self.matmul_into(x, x.dtype)

    def matmul_into(self, x: Float[Array, "B S in"], dtype: DTypeLike) -> Float[Array, "B S out"]:
        """`matmul` whose result is in another dtype: for readers that add to it before it is rounded.

        Args:
            x: as of `matmul`.
            dtype: of the product.
        """
        x, matrix = decode_when_needed(x, self)
        return plain_product(x, matrix, 1, dtype)

    def in_place(self) -> "Weight":
        """Which of its arrays the products take as `shard_gather.Shared` too: a tree of bools."""
        return jax.tree.map(lambda _: False, self)

    def transposed(self, dy: Float[Array, "B S out"]) -> Float[Array, "B S in"]:
        """dy·W in the dtype of dy, the gradient that `matmul` passes to its input."""
        # The product is linear in x; it is not computed, only its transpose is.
        _, pullback = jax.vjp(self.matmul, jnp.zeros((*dy.shape[:-1], self.shape[1]), dy.dtype))
        return pullback(dy)[0]

    def matmul_scaled(
        self, x: Float[Array, "B S in"], dtype: DTypeLike | None = None
    ) -> Float[Array, "B S out"] | float8.Scaled:
        """`matmul`, whose reader applies the scales of a product in float8; no gradient flows through it.

        Args:
            x: as of `matmul`.
            dtype: of the product; None: that of x.
        """
        return self.matmul(x) if dtype is None else self.matmul_into(x, dtype)

    def addends(self, x: Float[Array, "N in"]) -> Float[Array, "C N out"]:
        """x·Wᵀ for a few rows on one device, for a reader that adds it up: one addend in the dtype of x, or several.

        Where the outputs are as few as ranks the kernel for rank products gives them.
        """
        out, into = self.shape
        if out in RANKS:
            parts = few_rows.Adapters((self.dequantize(x.dtype),), (None,), (out,), (1.0,))
            if few_rows.why_not(len(x), x.dtype, parts, into, out) is None:
                return few_rows.rank_products(x, parts)
        return self.matmul(x[None])

    def why_not_items(self, dtype: DTypeLike) -> str | None:
        """Why `matmul_items` does not serve an x of this dtype on the target, as a clause; None: it does."""
        return f"no kernel reads experts in {', '.join(self.formats)} where they lie"

    def matmul_items(self, x: Float[Array, "N in"], items: Items, rows: int) -> Float[Array, "P out"]:
        """Products with the matrices of a few tokens' experts, in the dtype of x, of arrays that lead with experts.

        Args:
            x: row p of the result is of its row p // (rows // N).
            items: experts, each with rows of the result.
            rows: of the result.
        """
        raise NotImplementedError(self.why_not_items(x.dtype))

    def transposed_scaled(self, dy: Float[Array, "B S out"]) -> Float[Array, "B S in"] | float8.Scaled:
        """`transposed`, whose reader applies the scales too."""
        return self.transposed(dy)

    def reads_rounded(self, transposed: bool) -> bool:
        """Whether `matmul_scaled`, or `transposed_scaled`, takes rows that are in float8 already: all that it reads."""
        return False

    @property
    def float8_by_terms(self) -> bool:
        """Whether the transposed operand of `float8` has factors of the sum's terms."""
        return False

    def gradient(self, dy: Float[Array, "B S out"], x: Float[Array, "B S in"]) -> Any:
        """dyᵀ·x in the weight's dtype, as the tree that the model holds; None for a frozen one."""
        return None

    def experts(self, dtype: DTypeLike) -> Float[Array, "X out in"]:
        """`dequantize` of arrays that lead with an axis of experts."""
        return jax.vmap(lambda weight: weight.dequantize(dtype))(self)

    def grouped_matmul(
        self,
        x: Float[Array, "T in"],
        group_sizes: Int[Array, " X"],
        *,
        rows: Int[Array, " M"] | None = None,
        low_rank: tuple[Float[Array, "M R"], Float[Array, "X out R"]] | None = None,
    ) -> Float[Array, "M out"]:
        """The products of sorted rows with their experts' matrices, in the dtype of x.

        Args:
            x: rows in the order of the experts, or to be gathered.
            group_sizes: rows of each expert.
            rows: row of x for each row of the result; None: x's own.
            low_rank: z and b, whose product over the groups is added; None: none.
        """
        x, matrices = self._decoded(x)
        return grouped_matmul(x, matrices, group_sizes, rows=rows, low_rank=low_rank)

    def grouped_transposed(
        self,
        dy: Float[Array, "T out"],
        group_sizes: Int[Array, " X"],
        *,
        rows: Int[Array, " M"] | None = None,
        low_rank: tuple[Float[Array, "M R"], Float[Array, "X R in"]] | None = None,
    ) -> Float[Array, "M in"]:
        """The gradient that `grouped_matmul` passes to its rows, in the dtype of dy; takes the same arguments."""
        dy, matrices = self._decoded(dy)
        return grouped_matmul_dx(dy, matrices, group_sizes, rows=rows, low_rank=low_rank)

    def grouped_gradient(
        self,
        dy: Float[Array, "M out"],
        x: Float[Array, "T in"],
        group_sizes: Int[Array, " X"],
        rows: Int[Array, " M"] | None = None,
    ) -> Any:
        """The gradient of the experts' matrices, as the tree that the model holds; None for frozen ones."""
        return None

    def _decoded(self, x: Array) -> tuple[Array, Float[Array, "X out in"]]:
        """x, and the experts' matrices in its dtype: decoded no earlier than x is there, not inside of a product."""
        weight, x = jax.lax.optimization_barrier((self, x))
        return x, jax.lax.optimization_barrier(weight.experts(x.dtype))

    @abc.abstractmethod
    def rows(self, rows: slice) -> "Weight":
        """Some of the output rows."""

    @abc.abstractmethod
    def dequantize(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`: the values that the format decodes to, cast."""

    def float8(self, transposed: bool) -> Float8Operand:
        """The matrix in float8, rounded from the values that the format decodes to.

        Args:
            transposed: whether the input columns are the operand's rows, for dy·W.
        """
        matrix = self.dequantize(jnp.bfloat16)
        return Float8Operand(*(float8.quantize_columns(matrix) if transposed else float8.quantize_rows(matrix)))

    def concatenate(self, others: "list[Any]") -> "Weight | None":
        """One weight with others of its class below, or None where one set of arrays cannot hold them."""
        return None

    @abc.abstractmethod
    def axes(self, out: str | None, into: str | None) -> Axes:
        """The logical axes of the arrays of one layer.

        Args:
            out: name of the output rows' axis.
            into: name of the input columns' axis.
        """

    def splits(self, columns: int) -> bool:
        """Whether the arrays split by output rows, and into parts by input columns, as `axes` says.

        Args:
            columns: parts.
        """
        return False

    def shard(self) -> "Weight":
        """The smaller weight whose arrays these are on one device, where they split."""
        raise NotImplementedError(f"weights in {self.formats} do not split over devices")

    @property
    def held(self) -> Any:
        """The leaf of the model's tree: the weight itself, or a plain array."""
        return self


def plain_product(
    x: Float[Array, "... summed"], matrix: Float[Array, "_ _"], axis: int, dtype: DTypeLike | None = None
) -> Float[Array, "... columns"]:
    """The product of x and a plain matrix, accumulated in float32; with x in float32 in true float32.

    Args:
        x: rows.
        matrix: in the dtype of x.
        axis: of the matrix, that is summed over: 1 for x·Wᵀ.
        dtype: of the product; None: that of x.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((x.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, matrix, dims, precision=precision, preferred_element_type=dtype)


def decode_when_needed(x: Array, weight: Weight) -> tuple[Array, Float[Array, "out in"]]:
    """x, and the matrix in its dtype: decoded no earlier than x is there, and not inside of the product.

    `pallas_kernels.nf4` does so too.

    Args:
        x: the other operand of a product.
        weight: a packed one.
    """
    [weight], x = after([weight], x)
    return x, jax.lax.optimization_barrier(weight.dequantize(x.dtype))


def after(weights: Sequence[W], x: X) -> tuple[list[W], X]:
    """Make weights wait for x: no decode of them is moved before it, or kept for another pass.

    Each one's codes stay where they are, in a stack of all layers': a barrier on them would cost a copy.

    Args:
        weights: packed ones or arrays.
        x: an array, or several.
    """
    waiting, codes = [], []
    for weight in weights:
        leaves = jax.tree.leaves(weight)
        codes.append(max(range(len(leaves)), key=[leaf.size for leaf in leaves].__getitem__))
        waiting.append(leaves[: codes[-1]] + leaves[codes[-1] + 1 :])
    waiting, x = jax.lax.optimization_barrier((waiting, x))
    ordered = []
    for weight, others, place in zip(weights, waiting, codes, strict=True):
        leaves = [*others[:place], jax.tree.leaves(weight)[place], *others[place:]]
        ordered.append(jax.tree.unflatten(jax.tree.structure(weight), leaves))
    return ordered, x


def read_in_place(tree: Any) -> list[bool]:
    """Whether the products with an array's weight take it as `shard_gather.Shared`, array by array.

    Args:
        tree: of weights and other arrays.
    """
    weights = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Weight))
    return [there for one in weights for there in jax.tree.leaves(one.in_place() if isinstance(one, Weight) else False)]
