"""Latent attention (DeepSeek-V2, arXiv 2405.04434).

Keys and values are projections of one latent a token, W·z; a rotary key beside it is the same for all heads. Whole rows
are computed with the keys and values of each head, as ordinary attention. New tokens of rows that have others keep and
read the latents alone: (W_k z)·q = z·(W_kᵀ q), and Σ p W_v z = W_v Σ p z, attention of H queries to one key.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model import layers
from fastjax.lora.norm import PreparedRows
from fastjax.models.context import Context, Slots
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.mixers.keys_values import filled_places, gathered_pages, written_pages
from fastjax.models.mixers.softmax import attend, project_output
from fastjax.models.projection import Projection
from fastjax.quantization import matmul
from fastjax.residuals import HEADS
from pallas_kernels.attention import attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope import rope


class Latents(NamedTuple):
    """Latents of all tokens, each with its turned rotary key behind it, in pages that rows may share."""

    latents: Float[Array, "L N 1 P Z+R"]

    PACKS = True
    AXES = (("layers", "pages", "key", "page", "latent"),)


class LatentAttention(nnx.Module):
    """Attention to keys and values that are projections of a latent.

    Attributes:
        settings: its sizes.
        interleaved: whether a rotary pair is two neighbours.
        scale: factor of the products of queries and keys.
        dropout: probability of a dropped weight after the softmax in training.
        qkv: projections of the input: to the queries' latent, where they have one, and to that of keys and values with
            the rotary key.
        q: projection to the queries, of their latent or the input.
        kv: projection of the latent to each head's key without positions, and its value.
        o: projection of the heads' output.
        q_a_layernorm: normalisation of the queries' latent; None: they have none.
        kv_a_layernorm: normalisation of the latent.
        float32: whether all of it is computed in float32, whatever the input's dtype.
        across: as in `Mixer`.
    """

    def __init__(self, settings: layers.LatentAttention, inputs: LayerInputs):
        config, block = inputs.config, settings.block
        self.settings, self.interleaved = settings, config.rope_interleaved
        self.scale, self.dropout = config.attention_multiplier, config.attention_dropout
        self.qkv, self.q = inputs.projection(f"{block}.qkv"), inputs.projection(f"{block}.q")
        self.kv, self.o = inputs.projection(f"{block}.kv"), inputs.projection(f"{block}.o")
        eps = settings.norm_eps
        self.q_a_layernorm = inputs.norm("q_a_layernorm", block, eps) if settings.q_lora_rank else None
        self.kv_a_layernorm = inputs.norm("kv_a_layernorm", block, eps)
        self.float32 = block in inputs.float32
        self.across: str | None = None

    @property
    def inner(self) -> tuple[Projection, ...]:
        """The projections of its input and of its latents."""
        return self.qkv, self.q, self.kv

    @property
    def outer(self) -> tuple[Projection, ...]:
        """The projections to its output."""
        return (self.o,)

    def united(self, dtype: jnp.dtype) -> Projection | None:
        """None: its input is not prepared."""
        return None

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> Float[Array, "B S E"]:
        """The output for whole rows, as `Mixer.__call__`."""
        q, latents = self._queries_and_latents(x, context, key)
        return project_output(self.o, self._attend(q, latents, context, key), x.dtype, key, residual)

    def init(self, layers: int, batch: int, pages: tuple[int, int], dtype: jnp.dtype) -> Latents:
        """Latents of no token."""
        dtype = jnp.dtype(jnp.float32) if self.float32 else dtype
        return Latents(jnp.zeros((layers, pages[0], 1, pages[1], self.settings.sizes["Z+R"]), dtype))

    @jax.named_scope("attention")
    def step(
        self,
        x: Float[Array, "B S E"],
        state: Latents,
        context: Context,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> tuple[Float[Array, "B S E"], Latents]:
        """The output for new tokens, as `Mixer.step`."""
        assert context.slots is not None, "new tokens need their slots"
        q, latents = self._queries_and_latents(x, context, None)
        state = Latents(written_pages(state.latents, latents[:, :, None], context.slots))
        if context.segment_ranges is not None:
            out = self._attend(q, latents, context, None)
        else:
            out = self._attend_absorbed(q, state, context.slots)
        return project_output(self.o, out, x.dtype, None, residual), state

    def _queries_and_latents(
        self, x: Float[Array, "B S E"], context: Context, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "B S H N+R"], Float[Array, "B S Z+R"]]:
        """Queries by head, and normalised latents with the rotary key; both turned."""
        settings, x = self.settings, x.astype(jnp.float32) if self.float32 else x
        *queries, latents = self.qkv(x, key)
        (q,) = self.q(x if self.q_a_layernorm is None else self.q_a_layernorm(queries[0]), key)
        q = q.reshape(*x.shape[:2], settings.num_heads, settings.qk_head_dim)
        plain, rank = settings.qk_nope_head_dim, settings.kv_lora_rank
        cos, sin = context.rotary[settings.rope]
        turned = rope(q[..., plain:], cos, sin, interleaved=self.interleaved)
        q = jnp.concatenate([q[..., :plain], turned], axis=-1)
        scales = context.query_scales.get(settings.rope)
        if scales is not None:
            q = q * scales.astype(q.dtype)[:, :, None, None]
        turned = rope(latents[:, :, None, rank:], cos, sin, interleaved=self.interleaved)
        return q, jnp.concatenate([self.kv_a_layernorm(latents[..., :rank]), turned[:, :, 0]], axis=-1)

    def _attend(self, q: Array, latents: Array, context: Context, key: PRNGKeyArray | None) -> Array:
        """Attention of whole rows, with the keys and values of each head."""
        settings = self.settings
        rank, plain, heads = settings.kv_lora_rank, settings.qk_nope_head_dim, settings.num_heads
        (both,) = self.kv(latents[..., :rank], key)
        both = both.reshape(*both.shape[:2], heads, -1)
        turned = jnp.broadcast_to(latents[:, :, None, rank:], (*both.shape[:3], settings.qk_rope_head_dim))
        k, v = jnp.concatenate([both[..., :plain], turned], axis=-1), both[..., plain:]
        q, k, v = (checkpoint_name(part, HEADS) for part in (q, k, v))
        options: dict[str, Any] = {"block": settings.block, "across": self.across, "scale": self.scale}
        return attend(q, k, v, context.segment_ranges, key, dropout=self.dropout, **options)

    def _attend_absorbed(self, q: Float[Array, "B S H N+R"], state: Latents, slots: Slots) -> Float[Array, "B S H Dv"]:
        """Attention to the latents of tokens in pages."""
        rank, plain = self.settings.kv_lora_rank, self.settings.qk_nope_head_dim
        to_keys, to_values = self._maps(q.dtype)
        absorbed = jnp.concatenate([to_keys(q[..., :plain]), q[..., plain:]], axis=-1)
        if q.shape[1] == 1:
            arguments = absorbed[:, 0], state.latents, rank, slots.table, slots.lengths
            out = paged_attention(*arguments, layer=slots.layer, scale=self.scale)[:, None]
        else:
            filled, offset = filled_places(slots, state.latents.shape[3])
            seen = gathered_pages(state.latents, q.dtype, filled, slots)
            options: dict[str, Any] = {"segment_ids": slots.tokens, "kv_segment_ids": filled, "query_offset": offset}
            out = attention(absorbed, seen, seen[..., :rank], scale=self.scale, **options)
        return to_values(out)

    def _maps(self, dtype: jnp.dtype) -> tuple[Any, Any]:
        """W_kᵀ of queries [B, S, H, N], and W_v of weighted latents [B, S, H, Z].

        The matrix is that of the projection with its adapter, as it maps the unit vectors. Where each token chooses
        among joined adapters, their products are apart.
        """
        (name, _), *_ = self.kv.parts
        adapter, plain = self.kv.adapters.get(name), self.settings.qk_nope_head_dim
        units = jnp.eye(self.settings.kv_lora_rank, dtype=dtype)[None]
        chosen = None if adapter is None or adapter.chosen is None else adapter.chosen[...]
        whole = self.kv(units)[0] if chosen is None else matmul(units, self.kv.operand)
        by_head = whole[0].reshape(whole.shape[1], self.settings.num_heads, -1)
        w_k, w_v = by_head[..., :plain], by_head[..., plain:]
        if adapter is None or chosen is None:
            return lambda q: _product("bshn,zhn->bshz", q, w_k), lambda out: _product("bshz,zhv->bshv", out, w_v)
        a = adapter.lora_A[...].astype(dtype)
        b = (adapter.lora_B[...] * adapter.scaling).astype(dtype).reshape(*by_head.shape[1:], -1)
        mask = chosen[:, :, None, : len(a)].astype(dtype)

        def to_keys(q: Array) -> Array:
            products = _product("bshn,hnr->bshr", q, b[:, :plain]) * mask
            return _product("bshn,zhn->bshz", q, w_k) + _product("bshr,rz->bshz", products, a)

        def to_values(out: Array) -> Array:
            products = _product("bshz,rz->bshr", out, a) * mask
            return _product("bshz,zhv->bshv", out, w_v) + _product("bshr,hvr->bshv", products, b[:, plain:])

        return to_keys, to_values


def _product(subscripts: str, x: Array, matrix: Array) -> Array:
    """An einsum in the dtype of x, float32 inside."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, matrix, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
