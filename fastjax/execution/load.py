"""From a stream of named tensors to the decoder's tree: fused, quantised and stacked, one layer at a time.

Host memory stays at what the stream holds, reads ahead and sends, device memory at the finished tree plus one layer and
what is being sent.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from convert.errors import ConvertError
from convert.finite import nonfinite, not_in
from convert.formats import FORMATS, Format
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, NORM, SCORE, WeightPath
from convert.model.spec import QUANTIZED, WeightSpec
from convert.weights import Weights
from fastjax.execution.execution import Execution
from fastjax.execution.options import LoadOptions
from fastjax.execution.places import fill_tree
from fastjax.execution.stacks import plan_layers
from fastjax.models.layout import LayerStack
from fastjax.models.module_names import frozen_arrays
from fastjax.models.precision import Precision
from fastjax.quantization import MXFP4Weight, NF4Weight, WeightLike
from fastjax.quantization.weights import from_tensor

#: Bytes of weights that are read while the device takes those before them, and of those that it is taking.
_AHEAD = 2**29


def load_weights(
    opened: Weights,
    config: ModelConfig,
    options: LoadOptions,
    precision: Precision,
    execution: Execution,
    mesh: Mesh | None = None,
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """Read an open Hugging Face folder into the tree that `Decoder` takes.

    Args:
        opened: the folder's weights.
        config: the model's.
        options: of loading it. Matrices that are quantised get NF4 with nested scales, but those of float32 modules. In
            a folder that is quantised already they keep their format (some may be in 16 bits there), or are
            dequantised where no 4 bits are wanted. In an FP8 folder they keep their 8 bits, unless they are quantised
            or trained.
        precision: the dtypes of weights that are not quantised.
        execution: its loop, and the policy that the layers of one stack have in common.
        mesh: of the devices that get parts of the weights, by `parallel.MESH_AXES`; None: one has all.

    Returns:
        The arrangement of the layers, and the tree.

    Raises:
        ConvertError: the folder is damaged or not supported, or holds NaN or infinity.
    """
    stored = {path: (FORMATS[opened.format(path)], opened.decoded_dtype(path).name) for path in opened.specs}
    reader = _Reader(opened, choose_formats(opened.specs.values(), stored, options, precision))
    plan = plan_stacks(config, reader.formats, options, precision, execution)
    where: Any = {"trained": options.full_finetuning, "offload_layers": options.offload_layers, "mesh": mesh}
    tree = fill_tree(config, plan, reader.arrays(), **where)
    reader.check_finite(options, precision)
    return plan, tree


class WeightFormat(NamedTuple):
    """The format of a weight in memory; layers of one stack have theirs alike.

    Attributes:
        name: of its packed format, as in `FORMATS`; None: an array.
        dtype: of the array, or of the values that it decodes to.
    """

    name: str | None
    dtype: str


class _Reader:
    """The weights of a folder as the model holds them, one after another.

    Args:
        opened: the folder's weights.
        formats: of each in memory.
    """

    def __init__(self, opened: Weights, formats: Mapping[str, WeightFormat]):
        self.opened, self.formats = opened, formats
        self._quantize, self._finite = _quantizer(), dict[str, Array]()

    def arrays(self) -> Iterator[tuple[WeightPath, WeightLike]]:
        """Each weight on the device, while those after it are read."""
        sent: collections.deque[tuple[int, Array]] = collections.deque()
        for path, tensor in self.opened.stream(packed=True, ahead=_AHEAD):
            weight = self._ready(path, tensor)
            del tensor  # what is sent holds it
            size = math.prod(self.opened.specs[path].shape) * self.opened.decoded_dtype(path).itemsize
            sent.append((size, self._finite[path]))
            while len(sent) > 1 and sum(size for size, _ in sent) > _AHEAD:
                sent.popleft()[1].block_until_ready()
            yield path, weight

    def check_finite(self, options: LoadOptions, precision: Precision) -> None:
        """Refuse NaN and infinity, where they are not let through."""
        for path, finite in jax.device_get(self._finite).items():
            if not finite and (self._quantizes(path) or not options.allow_nonfinite):
                name = self.opened.specs[path].name
                file = self.opened.checkpoint.info(name).file
                if self._quantizes(path):
                    raise nonfinite(file, name, way_out=f"{not_in('NF4')} (float32_modules)")
                dtype = precision.weight_dtype(path, trained=options.full_finetuning)
                raise nonfinite(file, name, where=f"where {dtype} cannot hold them")

    def _quantizes(self, path: str) -> bool:
        return self.formats[path].name not in (None, self.opened.format(path))

    def _ready(self, path: str, tensor: Any) -> WeightLike:
        opened, wanted = self.opened, self.formats[path]
        try:
            weight = from_tensor(tensor)
        except ConvertError as error:
            raise ConvertError(f"{opened.checkpoint.folder}: {path}: {error}") from None
        decode = weight.experts if opened.specs[path].path.of_experts else weight.dequantize
        ready = weight.held if wanted.name == opened.format(path) else decode(wanted.dtype)
        # Computed on the device and looked at in the end: nothing waits for it.
        self._finite[path] = _is_finite([leaf for leaf in jax.tree.leaves(ready) if leaf.dtype != jnp.uint8])
        return self._quantize(ready) if self._quantizes(path) else ready


def choose_formats(
    specs: Iterable[WeightSpec],
    stored: Mapping[str, tuple[Format, str]],
    options: LoadOptions,
    precision: Precision,
) -> dict[str, WeightFormat]:
    """Choose how each weight is held: as it is stored, quantised, or as an array.

    Args:
        specs: the weights.
        stored: the format of each in its folder, and the dtype that this decodes to.
        options: of loading them; where some have 4 bits already, none is quantised.
        precision: the dtype of arrays, and the modules that stay in float32.
    """
    quantize = options.in_nf4 and not any(form.bits == 4 for form, _ in stored.values())
    formats = {}
    for spec in specs:
        form, decoded = stored[spec.path]
        formats[spec.path] = WeightFormat(None, dtype_of(spec, precision, trained=options.full_finetuning).name)
        if spec.kind in QUANTIZED and spec.path.module not in precision.float32_modules:
            if quantize:
                formats[spec.path] = WeightFormat("nf4-nested", decoded)
            elif not form.plain and not options.full_finetuning and (form.bits == 4) == options.in_nf4:
                formats[spec.path] = WeightFormat(form.name, decoded)
    return formats


def plan_stacks(
    config: ModelConfig,
    formats: Mapping[str, WeightFormat],
    options: LoadOptions,
    precision: Precision,
    execution: Execution,
) -> tuple[LayerStack, ...]:
    """Arrange the layers whose weights have these formats.

    Args:
        config: the model's.
        formats: by the weight's path.
        options: of loading it; the layers of a stack are trained alike.
        precision: the dtypes, and the modules that stay in float32.
        execution: its loop, and the policy that the layers of one stack have in common.
    """
    count = config.num_hidden_layers
    kinds: list[set[Hashable]] = [{precision.layer_kind(config, i), execution.policy(i)} for i in range(count)]
    for path in frozen_arrays(config, options.unfrozen_parameters):
        if path.layer is not None:
            kinds[path.layer].add(path.inside)
    for name, form in formats.items():
        path = WeightPath.parse(name)
        if path.layer is not None:
            kinds[path.layer].add((path.inside, form))
    return plan_layers([frozenset(kind) for kind in kinds], scans=execution.scans)


def dtype_of(spec: WeightSpec, precision: Precision, *, trained: bool) -> jnp.dtype:
    """The dtype of a weight that is held as an array.

    Args:
        spec: the weight; a router's bias for the choice is float32, as in files, since it decides between near scores.
        precision: of the model.
        trained: whether weights are trained.
    """
    if spec.kind == "choice_bias":
        return jnp.dtype(jnp.float32)
    return precision.weight_dtype(spec.path, trained=trained)


def random_weights(
    config: ModelConfig,
    key: PRNGKeyArray,
    options: LoadOptions,
    precision: Precision,
    execution: Execution,
    *,
    mxfp4: bool = False,
    mesh: Mesh | None = None,
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """Random weights, normal with the config's initializer_range, norms that scale by one, biases zero.

    Args:
        config: the model's.
        key: random state.
        options: of loading the model.
        precision: the dtypes of weights that are not quantised.
        execution: its loop, and the policy that the layers of one stack have in common.
        mxfp4: in 4 bits, the model is one whose files have experts in MXFP4: these are drawn as codes, the other
            matrices are not quantised (as `load_weights` holds such a folder).
        mesh: as for `load_weights`; the first device draws each layer whole.
    """
    trained, quantize = options.full_finetuning, _quantizer()

    def stored(spec: WeightSpec) -> tuple[Format, str]:
        dtype = dtype_of(spec, precision, trained=trained).name
        return FORMATS["mxfp4" if mxfp4 and spec.kind == "experts" else dtype], dtype

    formats = choose_formats(config.specs, {spec.path: stored(spec) for spec in config.specs}, options, precision)

    def weight(spec: WeightSpec, key: PRNGKeyArray) -> tuple[WeightPath, WeightLike]:
        dtype = dtype_of(spec, precision, trained=trained)
        init: str | float = spec.init
        constant = {"zeros": 0.0, "ones": 1.0 - config.norm_offset}.get(init) if isinstance(init, str) else init
        if constant is not None:
            return spec.path, jnp.full(spec.shape, constant, dtype)
        form = formats[spec.path]
        if form.name == "mxfp4":
            experts, out, columns = spec.shape
            return spec.path, MXFP4Weight.random(key, (experts, out, columns), form.dtype, config.initializer_range)
        drawn = _normal(key, spec.shape, dtype, config.initializer_range)
        return spec.path, drawn if form.name is None else quantize(drawn)

    def everything() -> Iterator[tuple[WeightPath, WeightLike]]:
        outside = [spec for spec in config.specs if spec.path.layer is None]
        first, between = ([spec for spec in outside if spec.path.part == part] for part in (EMBEDDING, NORM))
        last = [spec for spec in outside if spec.path.part in (HEAD, SCORE)]
        yield weight(first[0], jax.random.fold_in(key, 0))
        for index in range(config.num_hidden_layers):
            specs = config.layer_specs(index)
            keys = jax.random.split(jax.random.fold_in(key, index + 2), len(specs))
            for spec, drawn_from in zip(specs, keys, strict=True):
                yield weight(spec._replace(path=spec.path.in_layer(index)), drawn_from)
        for spec in (*between, *last):
            yield weight(spec, jax.random.fold_in(key, 1))

    plan = plan_stacks(config, {}, options, precision, execution)
    where: Any = {"trained": trained, "offload_layers": options.offload_layers, "mesh": mesh}
    return plan, fill_tree(config, plan, everything(), **where)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


@jax.jit
def _is_finite(arrays: Sequence[Array]) -> Array:
    """Whether all values are finite. Maxima do not tell: XLA's own on a CPU pass NaN by."""
    finite = [jnp.isfinite(array.astype(jnp.float32)).all() for array in arrays]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))


def _quantizer() -> Callable[[Array], NF4Weight]:
    """`quantize_matrix`, with one array for the map that all weights of a shape have.

    Parts of a weight are joined where their maps are equal: of two arrays the device would be waited for to compare.
    """
    maps: dict[tuple[int, ...], Array] = {}

    def quantize(matrix: Array) -> NF4Weight:
        weight = quantize_matrix(matrix, True)
        assert weight.nested_quant_map is not None, "scales are quantised too"
        return dataclasses.replace(
            weight, nested_quant_map=maps.setdefault(weight.nested_quant_map.shape, weight.nested_quant_map)
        )

    return quantize


@functools.partial(jax.jit, static_argnums=1)
def quantize_matrix(matrix: Array, nested: bool) -> NF4Weight:
    """One matrix [out, in], or each expert's of [X, out, in] by itself.

    Args:
        matrix: in 16 or 32 bits.
        nested: quantise the scales too.
    """
    quantize = functools.partial(NF4Weight.quantize, nested=nested)
    return quantize(matrix) if matrix.ndim == 2 else jax.vmap(quantize)(matrix)
