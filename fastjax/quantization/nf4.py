"""The NF4 weight: bitsandbytes' tensors of a linear layer as a pytree (Dettmers et al., arXiv 2305.14314).

Several projections that read the same input are one weight of several parts, so that one dequantisation and one GEMM
serve them all. Codes are kept in the split order of `pallas_kernels.nf4`; the bytes of a bitsandbytes checkpoint
convert without loss in both directions.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from convert.errors import ConvertError
from convert.formats.nf4 import NF4Tensor
from fastjax.host_memory import in_host_memory
from fastjax.parallel import ROWS, local
from fastjax.quantization.weight import Float8Operand, Weight
from pallas_kernels import nf4
from pallas_kernels.few_experts import Items
from pallas_kernels.grouped_matmul import grouped_nf4_matmul
from pallas_kernels.tiles import RANKS

BLOCK = 64
NESTED_BLOCK = 256
#: The axis along which the arrays of a weight's parts are joined.
_PARTS_ALONG = {"codes": -2, "absmax": -2, "nested_absmax": -1, "nested_offset": -1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NF4Weight(Weight):
    """A frozen matrix [out, in] in 4 bits.

    Attributes:
        codes: uint8 [out, in/2] in split order where in is a multiple of 64, else flat [blocks·32] in bitsandbytes'
            order, padded to whole blocks (which may cross rows).
        absmax: the blocks' scales: float32, or uint8 when they are quantised themselves; [out, in/64], else [blocks].
        nested_absmax: float32 [Σ ceil(blocks of a part / 256)], or None.
        nested_quant_map: float32 [256], or None.
        nested_offset: float32 [parts], or None.
        quant_map: float32 [16] where it is not NF4's own, else None.
        shape: (out, in).
        parts: output rows of each part; they add up to out.
        dtype: of the decoded weight and of the original, "bfloat16", "float16" or "float32"; a product in another
            dtype casts after.
    """

    codes: UInt8[Array, "..."]
    absmax: Array
    nested_absmax: Float[Array, "..."] | None
    nested_quant_map: Float[Array, "..."] | None
    nested_offset: Float[Array, "..."] | None
    quant_map: Float[Array, "..."] | None
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    parts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    formats = ("NF4",)

    @property
    def order(self) -> str:
        """The order of the codes, by its name in `pallas_kernels.nf4`."""
        return "split" if self.shape[1] % BLOCK == 0 else "bitsandbytes"

    @property
    def _layout(self) -> dict[str, Any]:
        return {"shape": self.shape, "order": self.order, "weight_dtype": self.dtype}

    def scales(self) -> Float[Array, "..."]:
        """The blocks' absmax in float32, decoded where it is nested; in the shape of `absmax`."""
        if self.nested_absmax is None or self.nested_quant_map is None or self.nested_offset is None:
            return self.absmax
        columns = self.shape[1]
        flat, decoded, block, group = self.absmax.reshape(-1), [], 0, 0
        for part, rows in enumerate(self.parts):
            blocks = -(-rows * columns // BLOCK)
            groups = -(-blocks // NESTED_BLOCK)
            decoded.append(
                nf4.dequantize_absmax(
                    flat[block : block + blocks],
                    self.nested_absmax[group : group + groups],
                    self.nested_quant_map,
                    self.nested_offset[part],
                )
            )
            block, group = block + blocks, group + groups
        return jnp.concatenate(decoded).reshape(self.absmax.shape)

    def decoded_scales(self) -> "NF4Weight":
        """With scales that are not nested; of arrays that lead with layers or experts, too."""
        if self.nested_absmax is None or in_host_memory(self.absmax):
            return self
        absmax = _all_scales(self, self.absmax.ndim - (2 if self.order == "split" else 1))
        return dataclasses.replace(self, absmax=absmax, nested_absmax=None, nested_quant_map=None, nested_offset=None)

    def matmul_into(self, x: Float[Array, "B S in"], dtype: DTypeLike) -> Float[Array, "B S out"]:
        """x·Wᵀ in a dtype, each device with its own rows of x."""

        def product(x, codes, scales, quant_map):
            return nf4.matmul(x, codes, scales, quant_map=quant_map, dtype=dtype, **self._layout)

        island = local(product, in_specs=(ROWS, P(), P(), P()), out_specs=ROWS)
        return island(x, self.codes, self.scales(), self.quant_map)

    def addends(self, x: Float[Array, "N in"]) -> Float[Array, "C N out"]:
        """x·Wᵀ in pieces, where the kernel for a few rows cuts its sums."""
        if self.shape[0] in RANKS:
            return super().addends(x)
        return nf4.addends(x, self.codes, self.scales(), quant_map=self.quant_map, **self._layout)

    def in_place(self) -> "NF4Weight":
        """The codes, where rows are whole blocks."""
        nowhere = jax.tree.map(lambda _: False, self)
        return dataclasses.replace(nowhere, codes=self.order == "split")

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, "out in"]:
        """The matrix in `dtype`, as bitsandbytes decodes it: float32 value × float32 absmax in its own dtype, cast."""
        return nf4.dequantize(self.codes, self.scales(), dtype=dtype, quant_map=self.quant_map, **self._layout)

    def float8(self, transposed: bool) -> Float8Operand:
        """The matrix in float8, decoded to it in one rounding where rows are whole blocks of NF4's own values."""
        if self.order != "split" or self.quant_map is not None:
            return super().float8(transposed)
        operand = nf4.dequantize_float8(self.codes, self.scales(), shape=self.shape, transposed=transposed)
        return Float8Operand(*operand)

    def grouped_matmul(self, x, group_sizes, *, rows=None, low_rank=None) -> Float[Array, "M out"]:
        """The products with experts; with few rows for each the codes are decoded inside the product."""
        return self._grouped(x, group_sizes, rows=rows, low_rank=low_rank, gradient=False)

    def grouped_transposed(self, dy, group_sizes, *, rows=None, low_rank=None) -> Float[Array, "M in"]:
        """The gradient that `grouped_matmul` passes to its rows, decoded in the same way."""
        return self._grouped(dy, group_sizes, rows=rows, low_rank=low_rank, gradient=True)

    def _grouped(self, x: Array, group_sizes: Array, *, gradient: bool, **options) -> Array:
        if self.order != "split" or self.quant_map is not None:
            product = super().grouped_transposed if gradient else super().grouped_matmul
            return product(x, group_sizes, **options)
        scales = jax.vmap(NF4Weight.scales)(self)
        codes = self.codes.reshape(*scales.shape[:-1], -1)
        options |= {"shape": self.shape, "weight_dtype": self.dtype, "gradient": gradient}
        return grouped_nf4_matmul(x, codes, scales, group_sizes, **options)

    def why_not_items(self, dtype: jax.typing.DTypeLike) -> str | None:
        """Why no kernel takes the experts where they lie; None: one does."""
        return nf4.why_not_items(dtype, self.shape, self.order, self.quant_map is None)

    def matmul_items(self, x: Float[Array, "N in"], items: Items, rows: int) -> Float[Array, "P out"]:
        """The products with a few tokens' experts, whose codes are read where they lie."""
        return nf4.matmul_items(x, self.codes, jax.vmap(NF4Weight.scales)(self), *items, rows=rows)

    def rows(self, rows: slice) -> "NF4Weight":
        """Some of the output rows, with scales that are not nested; the codes are in split order."""
        assert self.order == "split", "blocks that cross rows are not taken apart"
        return dataclasses.replace(
            self,
            codes=self.codes[rows],
            absmax=self.scales()[rows],
            nested_absmax=None,
            nested_quant_map=None,
            nested_offset=None,
            shape=(rows.stop - rows.start, self.shape[1]),
            parts=(rows.stop - rows.start,),
        )

    def concatenate(self, others: "list[NF4Weight]") -> "NF4Weight | None":
        """One weight of several parts, or None where the formats do not allow it (blocks that cross rows, mixed).

        The arrays are concrete: the nested scales' maps are compared, by value unless they are one array.
        """
        weights = [self, *others]
        kinds = {(w.absmax.dtype, w.nested_absmax is None, w.quant_map is None, w.shape[1], w.dtype) for w in weights}
        if len(kinds) > 1 or self.order != "split" or self.quant_map is not None:
            return None
        tables = [w.nested_quant_map for w in weights if w.nested_quant_map is not None]
        if not all(table is tables[0] or np.array_equal(table, tables[0]) for table in tables):
            return None
        arrays = _joined([{name: getattr(w, name) for name in _PARTS_ALONG} for w in weights])
        parts = tuple(rows for w in weights for rows in w.parts)
        return dataclasses.replace(self, **arrays, shape=(sum(parts), self.shape[1]), parts=parts)

    def axes(self, out: str | None, into: str | None) -> "NF4Weight":
        """Codes and scales have the matrix's axes where rows are whole blocks; the rest is repeated."""
        whole = P(out, into) if self.order == "split" else P(None)
        repeated = jax.tree.map(lambda _: P(None), self)
        return dataclasses.replace(repeated, codes=whole, absmax=whole)

    def splits(self, columns: int) -> bool:
        """Whether rows, and parts of them, are whole blocks, and scales are not nested: theirs cross rows."""
        return self.order == "split" and self.nested_absmax is None and self.shape[1] % (columns * BLOCK) == 0

    def shard(self) -> "NF4Weight":
        """With the shape of the codes."""
        rows, packed = self.codes.shape[-2:]
        return dataclasses.replace(self, shape=(rows, 2 * packed), parts=(rows,))

    @classmethod
    def from_tensor(cls, tensor: NF4Tensor) -> "NF4Weight":
        """From a checkpoint's tensor, without loss.

        Args:
            tensor: codes, scales and shape as `convert` reads them.

        Raises:
            ConvertError: its blocks have other sizes than 64 elements and 256 scales.
        """
        sizes = (tensor.blocksize, tensor.nested_blocksize if tensor.nested else NESTED_BLOCK)
        if sizes != (BLOCK, NESTED_BLOCK):
            raise ConvertError(
                f"an NF4 tensor {list(tensor.shape)}: expected blocks of {BLOCK} elements and of {NESTED_BLOCK} "
                f"scales, got {sizes[0]} and {sizes[1]}; quantise it again with bitsandbytes' defaults"
            )
        shape = (int(tensor.shape[0]), int(tensor.shape[1]))
        blocks = -(-shape[0] * shape[1] // BLOCK)
        codes = tensor.codes.reshape(-1)
        if missing := blocks * BLOCK // 2 - codes.size:
            codes = np.pad(codes, (0, missing))
        standard = np.array_equal(tensor.quant_map, nf4.NF4_VALUES)
        return cls._assemble(
            jax.device_put(codes),
            jax.device_put(tensor.absmax),
            None if tensor.nested_absmax is None else jnp.asarray(tensor.nested_absmax, jnp.float32),
            None if tensor.nested_quant_map is None else jnp.asarray(tensor.nested_quant_map, jnp.float32),
            None if tensor.nested_offset is None else jnp.full((1,), tensor.nested_offset, jnp.float32),
            None if standard else jnp.asarray(tensor.quant_map, jnp.float32),
            shape,
            tensor.dtype,
        )

    @classmethod
    def quantize(cls, weight: Float[Array, "out in"], *, nested: bool = True) -> "NF4Weight":
        """Quantise a matrix as bitsandbytes does; runs under jit.

        Args:
            weight: [out, in] in float32, bfloat16 or float16, to which it decodes again.
            nested: quantise the scales too (double quantisation).
        """
        codes, absmax = nf4.quantize(weight)
        shape, dtype = (weight.shape[0], weight.shape[1]), jnp.dtype(weight.dtype).name
        blocks = -(-shape[0] * shape[1] // BLOCK)
        codes = jnp.pad(codes, (0, blocks * BLOCK // 2 - codes.size))
        if not nested:
            return cls._assemble(codes, absmax, None, None, None, None, shape, dtype)
        quantized, nested_absmax, offset = nf4.quantize_absmax(absmax)
        table = jnp.asarray(nf4.DYNAMIC_MAP)
        return cls._assemble(codes, quantized, nested_absmax, table, offset.reshape(1), None, shape, dtype)

    @classmethod
    def _assemble(
        cls, codes, absmax, nested_absmax, nested_quant_map, nested_offset, quant_map, shape, dtype
    ) -> "NF4Weight":
        rows, columns = shape
        if columns % BLOCK == 0:
            codes = nf4.reorder(codes, "bitsandbytes", "split").reshape(rows, columns // 2)
            absmax = absmax.reshape(rows, columns // BLOCK)
        return cls(codes, absmax, nested_absmax, nested_quant_map, nested_offset, quant_map, shape, (rows,), dtype)


@jax.jit
def _joined(parts: list[dict[str, Array | None]]) -> dict[str, Array | None]:
    """The arrays of several weights as those of one."""
    return {
        name: None if parts[0][name] is None else jnp.concatenate([part[name] for part in parts], axis)  # pyright: ignore
        for name, axis in _PARTS_ALONG.items()
    }


@functools.partial(jax.jit, static_argnames="leading")
def _all_scales(weight: NF4Weight, leading: int) -> Float[Array, "..."]:
    """The scales of a weight whose arrays lead with some axes."""
    decode = NF4Weight.scales
    for _ in range(leading):
        decode = jax.vmap(decode)
    return decode(weight)
