"""How a model with adapters computes each module, and why: lines for the beginning of a run."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from convert.model.paths import EXPERTS
from fastjax.lora.linear import describe
from fastjax.lora.params import LoraLinear
from fastjax.lora.rank_products import slot
from fastjax.models.decoder import Decoder
from fastjax.models.mixers.attention import Attention
from fastjax.models.mlp import MLP
from fastjax.models.moe import Mixture
from fastjax.models.projection import Projection
from fastjax.quantization import as_weight
from pallas_kernels import dispatch
from pallas_kernels.glu import lora
from pallas_kernels.split_rope import lora as turn
from pallas_kernels.tiles import padded_rank


class ModulePath(NamedTuple):
    """How some modules are computed.

    Attributes:
        text: in words.
        slower: whether a faster way does not serve them; the text says why.
    """

    text: str
    slower: bool = False


def adapter_paths(graphdef: nnx.GraphDef, trainable: Any, frozen: Any, tokens: int) -> list[ModulePath]:
    """A line for each way in which a model with adapters computes a group of projections.

    Args:
        graphdef: of the decoder.
        trainable: its trained arrays, or their shapes.
        frozen: its other arrays, or their shapes.
        tokens: of a batch on one device.
    """
    decoder = nnx.merge(graphdef, trainable, frozen)
    dtype, lines = decoder.precision.dtype, {}
    for number, stack in enumerate(decoder.plan):
        for position, layer in enumerate(decoder.layers[number]):
            indices = range(stack.start + position, stack.start + stack.period * stack.count, stack.period)
            for line in _layer(layer, dtype, tokens):
                lines.setdefault(line, []).extend(indices)
    total = sum(stack.period * stack.count for stack in decoder.plan)
    described = []
    for line, indices in lines.items():
        where = "" if len(indices) == total else f" (layers {_ranges(sorted(indices))})"
        described.append(line._replace(text=line.text + where))
    return described + [ModulePath(text) for text in _tables(decoder, dtype)]


def _layer(layer: Any, dtype: jnp.dtype, tokens: int) -> Iterator[ModulePath]:
    mixer, mlp = layer.mixer, layer.mlp
    inner = jnp.dtype(jnp.float32) if mixer.float32 else dtype
    if isinstance(mixer, Attention):
        yield _heads(layer.block, mixer, inner, tokens)
    rest = mixer.inner[1:] if isinstance(mixer, Attention) else mixer.inner
    yield from (ModulePath(_projection(layer.block, projection, inner)) for projection in (*rest, *mixer.outer))
    if isinstance(mlp, Mixture):
        yield from _mixture(mlp, dtype, tokens)
    else:
        yield from _mlp("mlp", mlp, dtype, tokens)


def _heads(block: str, attention: Attention, dtype: jnp.dtype, tokens: int) -> ModulePath:
    line, reason = _projection(block, attention.qkv, dtype), attention.why_not_fused(dtype)
    if not attention.qkv.adapters:
        return ModulePath(line)
    if reason is not None:
        return ModulePath(f"{line}; apart from the turn of the heads: {reason}", True)
    rank = slot(describe(attention.qkv.parts, attention.qkv.adapters))
    facts = {"rows": tokens, "heads": attention.shape[:2], "size": attention.shape[2], "dtype": dtype, "rank": rank}
    return _chosen(f"{line}; its sums, turned heads, by", turn.REGISTRY, facts)


def _mixture(mixture: Mixture, dtype: jnp.dtype, tokens: int) -> Iterator[ModulePath]:
    yield ModulePath(_projection("mlp", mixture.router, jnp.dtype(jnp.float32)))
    parts = (mixture.experts.gate_up, mixture.experts.down)
    adapters = {part: adapter for each in parts for part, adapter in each.adapters.items()}
    names = _names(EXPERTS, (name for each in parts for name, _ in each.parts))
    line = f"{names}: one unit of {_formats(*parts)}, grouped by expert"
    yield ModulePath(f"{line}, and {_adapters(adapters)}" if adapters else f"{line}; no adapter is on it")
    if mixture.shared_expert is not None:
        yield from _mlp("mlp.shared_expert", mixture.shared_expert, dtype, tokens)


def _mlp(block: str, mlp: MLP, dtype: jnp.dtype, tokens: int) -> Iterator[ModulePath]:
    inner = jnp.dtype(jnp.float32) if mlp.float32 else dtype
    reason = mlp.why_not_fused(inner)
    if reason is None:
        yield _block(block, mlp, inner, tokens)
        return
    for projection in (mlp.gate_up, mlp.down):
        line = _projection(block, projection, inner)
        if projection.adapters:
            yield ModulePath(f"{line}; not one unit with the rest of the block: {reason}", True)
        else:
            yield ModulePath(line)


def _tables(decoder: Decoder, dtype: jnp.dtype) -> list[str]:
    lines = []
    if decoder.embed_tokens.adapter is not None:
        lines.append("embed_tokens: rows of the table and of its adapter, added")
    if not decoder.config.scored and decoder.lm_head.adapters:
        lines.append(_projection("", decoder.lm_head, dtype))
    return lines


def _projection(block: str, projection: Projection, dtype: jnp.dtype) -> str:
    names = _names(block, (name for name, _ in projection.parts))
    weights = _formats(projection)
    if projection.quantizer is not None:
        merged = f" and {_adapters(projection.adapters)}, merged" if projection.adapters else ""
        return f"{names}: product with fake-quantised {weights}{merged}"
    if not projection.adapters:
        return f"{names}: product with {weights}; no adapter is on it"
    dtypes = projection.dtypes(dtype)
    if len(set(dtypes)) > 1:
        wide = ", ".join(projection.float32)
        return f"{names}: a unit each, of {weights} and adapters; {wide} is computed in float32, the rest in {dtype}"
    return f"{names}: one unit of {weights} and {_adapters(projection.adapters)}"


def _block(block: str, mlp: MLP, dtype: jnp.dtype, tokens: int) -> ModulePath:
    names = _names(block, (name for part in (mlp.gate_up, mlp.down) for name, _ in part.parts))
    adapters = {**mlp.gate_up.adapters, **mlp.down.adapters}
    line = f"{names}: one unit of {_formats(mlp.gate_up, mlp.down)} and {_adapters(adapters)}"
    unit = mlp.block()
    down = unit.down.rank if not unit.down.dropout else 0  # an adapter with an input of its own is apart
    ranks = unit.inner_rank(mlp.gate_up.bias is not None), padded_rank(down) if down else 0
    shape = tokens, 2 * unit.features
    facts = {
        "shape": shape,
        "dtype": mlp.down.dtypes(dtype)[0],
        "ranks": ranks,
        "activation": mlp.activation,
    }
    return _chosen(f"{line}; the gated product by", lora.REGISTRY, facts)


def _chosen(line: str, registry: dispatch.Registry, facts: Mapping[str, Any]) -> ModulePath:
    """A line with the implementation that serves a call, and why another one does not."""
    reasons = [f"{name}: {reason}" for name, reason in registry.reasons(**facts).items() if reason]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return ModulePath(f"{line} {registry.choose(None, **facts)}{why}", bool(reasons))


def _adapters(adapters: Mapping[str, LoraLinear]) -> str:
    """Adapters in words: ranks, DoRA, dropout."""
    ranks = sorted({adapter.lora_A.get_value().shape[-2] for adapter in adapters.values()})
    words = [f"adapters of rank {', '.join(map(str, ranks))} on {', '.join(adapters)}"]
    if any(adapter.magnitude is not None for adapter in adapters.values()):
        words.append("DoRA")
    if any(adapter.dropout for adapter in adapters.values()):
        words.append("dropout, with an input each")
    return "; ".join(words)


def _formats(*projections: Projection) -> str:
    """The formats of the weights, as "NF4 weights"."""
    weights = (as_weight(projection.weight.get_value()) for projection in projections)
    formats = dict.fromkeys(name for weight in weights for name in weight.formats)
    return f"{' and '.join(formats)} weights"


def _names(block: str, parts: Iterable[str]) -> str:
    return f"{block}.{', '.join(parts)}" if block else ", ".join(parts)


def _ranges(indices: list[int]) -> str:
    """Numbers as text, [0, 1, 2, 3, 7] as "0-3, 7"."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
