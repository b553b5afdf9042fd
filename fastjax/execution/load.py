"""From a stream of named tensors to the decoder's tree: fused, quantised and stacked, one layer at a time.

Host memory stays at what the stream holds, reads ahead and sends, device memory at the finished tree plus one layer and
what is being sent.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from fastjax.execution.places import fill_tree
from fastjax.execution.stacks import plan_layers
from fastjax.models.layout import LayerStack
from fastjax.models.precision import Precision
from fastjax.quantization import MXFP4Weight, NF4Weight, WeightLike
from fastjax.quantization.weights import from_tensor

#: Bytes of weights that are read while the device takes those before them, and of those that it is taking.
_AHEAD = 2**29


def load_weights(
    opened: Weights,
    config: ModelConfig,
    *,
    precision: Precision,
    trained: bool,
    load_in_4bit: bool,
    execution: Execution,
    allow_nonfinite: bool = False,
    offload_layers: bool = False,
    mesh: Mesh | None = None,
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """Read an open Hugging Face folder into the tree that `Decoder` takes.

    Args:
        opened: the folder's weights.
        config: the model's.
        precision: the dtypes of weights that are not quantised.
        trained: whether the weights are trained themselves.
        load_in_4bit: quantise the layers' matrices, but those of float32 modules, to NF4 with nested scales. In a
            folder that is quantised already the matrices keep their format (some may be in 16 bits there); without
            `load_in_4bit` they are dequantised. In an FP8 folder they keep their 8 bits, unless they are quantised
            or trained.
        execution: its loop, and the policy that the layers of one stack have in common.
        allow_nonfinite: let NaN and infinity through; a matrix that is quantised is refused with any.
        offload_layers: place the matrices of stacked layers in the host's memory (`execution.streamed`).
        mesh: of the devices that get parts of the weights, by `parallel.MESH_AXES`; None: one has all.

    Returns:
        The arrangement of the layers, and the tree.

    Raises:
        ConvertError: the folder is damaged or not supported, or holds NaN or infinity.
    """
    finite: dict[str, Array] = {}
    quantize = _quantizer()
    quantized = any(form.bits == 4 for form in opened.formats())
    held = {
        path: hold(
            spec,
            FORMATS[opened.format(path)],
            opened.decoded_dtype(path).name,
            precision=precision,
            trained=trained,
            load_in_4bit=load_in_4bit,
            quantize=load_in_4bit and not quantized,
        )
        for path, spec in opened.specs.items()
    }

    def quantizes(path: str) -> bool:
        return held[path].format not in (None, opened.format(path))

    def prepare(path: str, tensor: Any) -> WeightLike:
        try:
            weight = from_tensor(tensor)
        except ConvertError as error:
            raise ConvertError(f"{opened.checkpoint.folder}: {path}: {error}") from None
        keeps = held[path].format == opened.format(path)
        decode = weight.experts if opened.specs[path].path.of_experts else weight.dequantize
        ready = weight.held if keeps else decode(held[path].dtype)
        # Computed on the device and looked at in the end: nothing waits for it.
        finite[path] = _is_finite([leaf for leaf in jax.tree.leaves(ready) if leaf.dtype != jnp.uint8])
        return quantize(ready) if quantizes(path) else ready

    def arrays() -> Iterator[tuple[WeightPath, WeightLike]]:
        sent: collections.deque[tuple[int, Array]] = collections.deque()
        for path, tensor in opened.stream(packed=True, ahead=_AHEAD):
            weight = prepare(path, tensor)
            del tensor  # what is sent holds it
            sent.append((math.prod(opened.specs[path].shape) * opened.decoded_dtype(path).itemsize, finite[path]))
            while len(sent) > 1 and sum(size for size, _ in sent) > _AHEAD:
                sent.popleft()[1].block_until_ready()
            yield path, weight

    plan = plan_held(config, held, precision, execution)
    tree = fill_tree(config, plan, arrays(), trained=trained, offload_layers=offload_layers, mesh=mesh)
    for path, right in jax.device_get(finite).items():
        if not right and (quantizes(path) or not allow_nonfinite):
            raise _nonfinite(opened, path, precision.weight_dtype(path, trained=trained), quantizes(path))
    return plan, tree


class Held(NamedTuple):
    """How the model holds a weight; layers of one stack hold theirs alike.

    Attributes:
        format: name of its packed format, as in `FORMATS`; None: an array.
        dtype: of the array, or of the values that it decodes to.
    """

    format: str | None
    dtype: str


def hold(
    spec: WeightSpec,
    stored: Format,
    own: str,
    *,
    precision: Precision,
    trained: bool,
    load_in_4bit: bool,
    quantize: bool,
) -> Held:
    """Decide how a weight is held: as it is stored, quantised, or as an array.

    Args:
        spec: the weight.
        stored: its format in the folder.
        own: the dtype that this decodes to.
        precision: the dtype of arrays, and the modules that stay in float32.
        trained: whether it is trained.
        load_in_4bit: whether packed weights of 4 bits are kept, or those of more.
        quantize: whether matrices are quantised to NF4.
    """
    if spec.kind in QUANTIZED and spec.path.module not in precision.float32_modules:
        if quantize:
            return Held("nf4-nested", own)
        if not stored.plain and not trained and (stored.bits == 4) == load_in_4bit:
            return Held(stored.name, own)
    return Held(None, dtype_of(spec, precision, trained=trained).name)


def plan_held(
    config: ModelConfig, held: Mapping[str, Held], precision: Precision, execution: Execution
) -> tuple[LayerStack, ...]:
    """Arrange the layers whose weights are held in these ways.

    Args:
        config: the model's.
        held: by the weight's path.
        precision: the dtypes, and the modules that stay in float32.
        execution: its loop, and the policy that the layers of one stack have in common.
    """
    count = config.num_hidden_layers
    kinds: list[set[Hashable]] = [{precision.layer_kind(config, i), execution.policy(i)} for i in range(count)]
    for path, how in held.items():
        place = WeightPath.parse(path)
        if place.layer is not None:
            kinds[place.layer].add((place.inside, how))
    return plan_layers([frozenset(kind) for kind in kinds], execution.layer_loop)


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
    *,
    precision: Precision,
    trained: bool,
    load_in_4bit: bool,
    execution: Execution,
    mxfp4: bool = False,
    mesh: Mesh | None = None,
) -> tuple[tuple[LayerStack, ...], dict[str, Any]]:
    """Random weights, normal with the config's initializer_range, norms that scale by one, biases zero.

    Args:
        config: the model's.
        key: random state.
        precision: the dtypes of weights that are not quantised.
        trained: whether the weights are trained themselves.
        load_in_4bit: quantise the layers' matrices, but those of float32 modules, layer by layer.
        execution: its loop, and the policy that the layers of one stack have in common.
        mxfp4: with `load_in_4bit`, the model is one whose files have experts in MXFP4: these are drawn as codes, the
            other matrices are not quantised (as `load_weights` holds such a folder).
        mesh: as for `load_weights`; the first device draws each layer whole.
    """
    options = {"precision": precision, "trained": trained, "load_in_4bit": load_in_4bit}
    quantize = _quantizer()

    def layer(index: int) -> Iterator[tuple[WeightPath, WeightLike]]:
        specs = config.layer_specs(index)
        keys = jax.random.split(jax.random.fold_in(key, index + 2), len(specs))
        for spec, own in zip(specs, keys, strict=True):
            yield weight(spec._replace(path=spec.path.in_layer(index)), own)

    def weight(spec: WeightSpec, own: PRNGKeyArray) -> tuple[WeightPath, WeightLike]:
        dtype = dtype_of(spec, precision, trained=trained)
        constant = {"zeros": 0.0, "ones": 1.0 - config.norm_offset}.get(spec.init)
        if constant is not None:
            return spec.path, jnp.full(spec.shape, constant, dtype)
        stored = FORMATS["mxfp4" if mxfp4 and spec.kind == "experts" else dtype.name]
        held = hold(spec, stored, dtype.name, quantize=load_in_4bit and not mxfp4, **options)
        if held.format == "mxfp4":
            experts, out, columns = spec.shape
            return spec.path, MXFP4Weight.random(own, (experts, out, columns), held.dtype, config.initializer_range)
        drawn = _normal(own, spec.shape, dtype, config.initializer_range)
        return spec.path, drawn if held.format is None else quantize(drawn)

    def everything() -> Iterator[tuple[WeightPath, WeightLike]]:
        first, between = ([spec for spec in config.specs if spec.path.part == part] for part in (EMBEDDING, NORM))
        last = [spec for spec in config.specs if spec.path.part in (HEAD, SCORE)]
        yield weight(first[0], jax.random.fold_in(key, 0))
        for index in range(config.num_hidden_layers):
            yield from layer(index)
        for spec in (*between, *last):
            yield weight(spec, jax.random.fold_in(key, 1))

    plan = plan_held(config, {}, precision, execution)
    return plan, fill_tree(config, plan, everything(), trained=trained, mesh=mesh)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


@jax.jit
def _is_finite(arrays: Sequence[Array]) -> Array:
    """Whether all values are finite. Maxima do not tell: XLA's own on a CPU pass NaN by."""
    finite = [jnp.isfinite(array.astype(jnp.float32)).all() for array in arrays]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))


def _nonfinite(opened: Weights, path: str, dtype: jnp.dtype, quantized: bool) -> ConvertError:
    name = opened.specs[path].name
    file = opened.checkpoint.info(name).file
    if quantized:
        return nonfinite(file, name, way_out=f"{not_in('NF4')} (float32_modules)")
    return nonfinite(file, name, where=f"where {dtype} cannot hold them")


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
