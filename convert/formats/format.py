"""The interface of a weight's format on disk: how it is recognised, read, decoded and written.

A format is one subclass of `Format` and one row of `convert.formats.FORMATS`; loading, merging, quantising, comparing
and inspecting folders know no more of it than this.
"""

import abc
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from jaxtyping import Float

from convert.blocks import Block, Blocks
from convert.checkpoint import Checkpoint
from convert.shard import Job
from convert.tensor_file import TensorInfo


class Stored(NamedTuple):
    """A weight in a checkpoint.

    Attributes:
        checkpoint: The open folder.
        name: The weight's name there.
        shape: Its shape in the model.
    """

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]

    @property
    def info(self) -> TensorInfo:
        """Shape, dtype and file of the tensor of this name."""
        return self.checkpoint.info(self.name)


class StackedTensor(NamedTuple):
    """A packed weight of a mixture whose experts are packed one by one.

    Attributes:
        tensors: One an expert, of one format's class.
    """

    tensors: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight, [X, out, in]."""
        return len(self.tensors), *self.tensors[0].shape


def configured_dtype(stored: Stored) -> np.dtype:
    """The dtype of config.json, to which formats without one of their own decode; bfloat16 without an entry."""
    config = stored.checkpoint.config
    named = config.get("dtype", config.get("torch_dtype"))
    return np.dtype(named if named in ("float32", "bfloat16", "float16") else ml_dtypes.bfloat16)


class Values(NamedTuple):
    """A weight's values, to be written in a format.

    Attributes:
        source: The folder that they come from, for messages.
        name: The weight's.
        blocks: In float32.
        shape: Of the weight.
        dtype: What it decodes to: float32, bfloat16 or float16.
        peers: The values of the matrices that servers hold as one with it, for formats with one scale a matrix.
    """

    source: str | os.PathLike[str]
    name: str
    blocks: Blocks
    shape: tuple[int, ...]
    dtype: np.dtype
    peers: Sequence[Blocks] = ()

    def rounded(self, block: Block) -> np.ndarray:
        """A block in the weight's dtype; what overflows is infinity.

        Args:
            block: Of `blocks`, or a part of one.
        """
        with np.errstate(over="ignore"):
            return block.astype(self.dtype, copy=False)


class Writer:
    """A writer of weights in one format.

    Attributes:
        name: Its key in `FORMATS`, of one that is read too, or in `WRITERS`: "int4-128".
        label: What messages call the format: "NF4".
        bits: A weight's, without its scales.
        rounding: Largest error of a value over the largest of its scale's values: half the widest gap between codes, or
            the part that is clipped; 0 for plain ones.
        whole: Whether there is a scale of the whole matrix, of all that is served as one matrix with it.
        inputs: Formats of a matrix's inputs that such a folder can tell servers to make, for each token, the usual one
            first; None: inputs stay as they are.
        activations: That of them which it tells.
    """

    name: str
    label: str
    bits: int
    rounding: float = 0.0
    whole: bool = False
    inputs: tuple[str | None, ...] = (None,)
    activations: str | None = None

    def serving(self, activations: str | None) -> Self:
        """The writer of the same values for servers that quantise inputs otherwise.

        Args:
            activations: One of `inputs`.
        """
        if activations not in self.inputs:
            raise ValueError(f"{self.name}: expected one of {self.inputs}, got {activations}")
        other = copy.copy(self)
        other.activations = activations
        return other

    def job(self, values: Values) -> Job:
        """Write a weight from its values.

        Args:
            values: The weight's.

        Raises:
            ConvertError: The format cannot hold a matrix of this shape.
        """
        raise NotImplementedError(self.name)

    def quantization_config(self, dtype: str, skipped: list[str], storage_dtype: str = "uint8") -> dict[str, Any]:
        """The ``quantization_config`` of a folder in this format.

        Args:
            dtype: What the weights decode to.
            skipped: Linear modules that are not quantised.
            storage_dtype: Of the codes' bytes in the files.
        """
        raise NotImplementedError(self.name)


class Format(Writer, abc.ABC):
    """A format of weights in folders.

    Attributes:
        name: Its key in `FORMATS`: "nf4-nested".
        target: The format's name without its variants, as settings name it: "nf4".
        packed: Exact class of its tensors as they are stored; NumPy arrays for plain ones.
        methods: ``quantization_config.quant_method`` of folders in this format.
        writable: Whether what is read is written back in it; what is not, streams decode.
        shared_experts: Whether a tensor may hold all experts of a mixture.
    """

    target: str
    packed: type
    methods: tuple[str, ...] = ()
    writable: bool = False
    shared_experts: bool = False

    @property
    def plain(self) -> bool:
        """Whether the tensors are the values themselves."""
        return self.packed is np.ndarray

    @abc.abstractmethod
    def holds(self, stored: Stored) -> bool:
        """Whether a weight is in this format, by names, dtypes and shapes alone."""

    def misfit(self, stored: Stored) -> str | None:
        """Why a weight in this format is not the model's, by names, dtypes and shapes alone; None if it may be."""
        return None

    def scheme(self, stored: Stored) -> str:
        """The entry of `convert.formats.WRITERS` that writes such a weight; the format's name without one."""
        return self.target

    def codes_name(self, name: str) -> str:
        """The name of the tensor with a weight's values or codes; without it the weight is not in this format."""
        return name

    @abc.abstractmethod
    def claims(self, name: str) -> tuple[str, ...]:
        """The names that may stand in a checkpoint for a weight: its own and those of its scales."""

    @abc.abstractmethod
    def decoded_dtype(self, stored: Stored) -> np.dtype:
        """Dtype of the values: float32, bfloat16 or float16."""

    @abc.abstractmethod
    def read(self, stored: Stored) -> Any:
        """The whole weight as it is stored, of class `packed`.

        Raises:
            ConvertError: A file was cut short, or a part is missing or does not fit the others.
        """

    @abc.abstractmethod
    def decode(self, tensor: Any) -> Float[np.ndarray, "..."]:
        """The values of a weight that `read` returned, in the dtype that it decodes to."""

    @abc.abstractmethod
    def blocks(self, stored: Stored) -> Iterator[Block]:
        """The values as float32 rows, rounded to the dtype that they decode to, a few at a time.

        Raises:
            ConvertError: As `read`.
        """

    def expert(self, stored: Stored, number: int) -> Float[np.ndarray, "..."]:
        """The values of one expert in a tensor of all, in the dtype that they decode to.

        Raises:
            ConvertError: As `read`.
        """
        raise NotImplementedError(self.name)

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        """Whether a ``quantization_config`` says that its folder's matrices are in this format."""
        return quantization.get("quant_method") in self.methods

    def check_config(self, quantization: Mapping[str, Any], file: str | os.PathLike[str]) -> None:  # noqa: B027
        """Refuse a ``quantization_config`` of one of `methods` that names another format.

        Raises:
            ConvertError: It does; the message names the field.
        """

    def made(self, tensor: Any) -> bool:
        """Whether a tensor in memory is written in this format."""
        return type(tensor) is self.packed

    def to_tensors(self, name: str, tensor: Any) -> dict[str, np.ndarray]:
        """The tensors of a checkpoint for a weight, by name, the way back from `read`."""
        raise NotImplementedError(self.name)
