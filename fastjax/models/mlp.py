"""The feed-forward block of one layer, gated or not."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model.paths import WeightPath
from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.mlp import Block, Operands, gated_block
from fastjax.lora.norm import PreparedRows
from fastjax.lora.params import BaseParam, Constant
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.layout import array_at
from fastjax.models.projection import Projection
from fastjax.residuals import name_residual
from pallas_kernels.glu import ACTIVATIONS, glu


class XIELU(nnx.Module):
    """An activation with numbers of the checkpoint (arXiv 2411.13010), in float32 inside.

    softplus(alpha_p)·x² + beta·x where x > 0, (beta + softplus(alpha_n))·(eᵐ - 1 - x) + beta·x with m = min(x, eps)
    elsewhere.

    Attributes:
        alpha_p: [1], trained with the model's weights.
        alpha_n: [1], likewise.
        beta: [], constant.
        eps: [], constant.
    """

    def __init__(self, arrays: Mapping[str, Array]):
        self.alpha_p, self.alpha_n = BaseParam(arrays["alpha_p"]), BaseParam(arrays["alpha_n"])
        self.beta, self.eps = Constant(arrays["beta"]), Constant(arrays["eps"])

    def __call__(self, x: Float[Array, "B S F"]) -> Float[Array, "B S F"]:
        """The activation of each element."""
        alpha_p, alpha_n = (jax.nn.softplus(number[0].astype(jnp.float32)) for number in (self.alpha_p, self.alpha_n))
        beta, eps, wide = self.beta[...].astype(jnp.float32), self.eps[...].astype(jnp.float32), x.astype(jnp.float32)
        above, below = alpha_p * wide * wide, (beta + alpha_n) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


class MLP(nnx.Module):
    """down(act(gate(x)) · up(x))  (Shazeer, arXiv 2002.05202), or without a gate down(act(up(x))).

    Attributes:
        activation: Hugging Face's name of act.
        act_fn: the activation of a block without a gate that has numbers of its own; None: it has none.
        gate_up: the two projections of the input, or one to both, gate first; without a gate one.
        down: the projection back.
        float32: whether all of it is computed in float32, whatever the input's dtype.
        gated: whether there is a gate.
    """

    def __init__(
        self,
        activation: str,
        gate_up: Projection,
        down: Projection,
        float32: bool = False,
        *,
        gated: bool = True,
        act_fn: XIELU | None = None,
    ):
        self.activation, self.act_fn, self.gate_up, self.down = activation, act_fn, gate_up, down
        self.float32, self.gated = float32, gated

    @property
    def inner(self) -> tuple[Projection, ...]:
        """The projections of its input."""
        return (self.gate_up,)

    @property
    def outer(self) -> tuple[Projection, ...]:
        """The projections to its output."""
        return (self.down,)

    @jax.named_scope("mlp")
    def __call__(
        self,
        x: Float[Array, "B S E"],
        key: PRNGKeyArray | None,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> Float[Array, "B S E"]:
        """The block on normalised inputs.

        Args:
            x: the inputs.
            key: the layer's dropout key; None switches dropout off.
            residual: the residual stream, to which the block's output is added; None: that is returned alone.
            prepared: of a fused block, x as `lora.norm` prepares it.
        """
        inner = x.astype(jnp.float32) if self.float32 else x
        if residual is not None and set(self.down.dtypes(inner.dtype)) != {residual.dtype}:
            return residual + self(x, key, None, prepared)
        if self.why_not_fused(inner.dtype) is None:
            return self._unit(inner, key, residual, prepared).astype(x.dtype)
        parts = self.gate_up(inner, key)
        if self.gated:
            gate, up = parts if len(parts) == 2 else jnp.split(parts[0], 2, axis=-1)
            hidden = glu(gate, up, activation=self.activation)
        elif self.act_fn is not None:
            hidden = self.act_fn(parts[0])
        else:
            hidden = ACTIVATIONS[self.activation](parts[0].astype(jnp.float32)).astype(parts[0].dtype)
        (out,) = self.down(hidden, key, residual=residual)
        return out.astype(x.dtype)

    def why_not_fused(self, dtype: jnp.dtype) -> str | None:
        """The reason, a clause, that the block is not one unit with its adapters; None: it is.

        Args:
            dtype: of the block's input.
        """
        adapters = [*self.gate_up.adapters.values(), *self.down.adapters.values()]
        if self.quantized:
            return "its adapters are merged for a fake quantiser"
        if not self.gated:
            return "it is not gated"
        if not adapters and self.gate_up.bias is not None:
            return "there is a bias and no adapter to add it with"
        if any(adapter.magnitude is not None for adapter in adapters):
            return "DoRA scales the projections' results"
        if len({*self.gate_up.dtypes(dtype), *self.down.dtypes(dtype)}) > 1:
            return "its projections are computed in different dtypes"
        return None

    @property
    def quantized(self) -> bool:
        """Whether a projection goes through a fake quantiser."""
        return any(projection.quantizer is not None for projection in (self.gate_up, self.down))

    def decoded_into(self, dtype: jnp.dtype) -> jnp.dtype | str | None:
        """The dtype in which the block's products read its weights; None: in several, or otherwise than in products.

        A value of `base_compute` where products are in float8.

        Args:
            dtype: of the block's input.
        """
        adapters = [*self.gate_up.adapters.values(), *self.down.adapters.values()]
        if self.float32 or any(adapter.magnitude is not None for adapter in adapters):
            return None
        dtypes = {*self.gate_up.dtypes(dtype), *self.down.dtypes(dtype)}
        if dtypes == {jnp.dtype(jnp.bfloat16)} and self.gate_up.base_compute == self.down.base_compute is not None:
            return self.down.base_compute
        return dtypes.pop() if len(dtypes) == 1 else None

    def block(self) -> Block:
        """The unit's static description."""
        return Block(
            self.activation,
            describe(self.gate_up.parts, self.gate_up.adapters),
            *describe(self.down.parts, self.down.adapters, self.down.output_tokens),
        )

    def operands(self, key: PRNGKeyArray | None) -> Operands:
        """The unit's operands besides its input.

        Args:
            key: the layer's dropout key; None switches dropout off.
        """
        bias = None if self.gate_up.bias is None else self.gate_up.bias[...]
        matrices = matrices_of({**self.gate_up.adapters, **self.down.adapters})
        return Operands(self.gate_up.operand, bias, self.down.operand, matrices, key)

    def _unit(
        self, x: Array, key: PRNGKeyArray | None, residual: Array | None, prepared: PreparedRows | None
    ) -> Float[Array, "B S E"]:
        dtype = self.down.dtypes(x.dtype)[0]
        out = gated_block(self.block(), x.astype(dtype), self.operands(key)._replace(prepared=prepared), residual)
        if self.down.bias is not None:
            out = out + self.down.bias[...].astype(dtype)[None, None, :]
        return name_residual(out, "projection")


def build_mlp(inputs: LayerInputs, block: str) -> MLP:
    """A layer's MLP, or an expert that sees every token.

    Args:
        inputs: of the layer.
        block: "mlp" or "mlp.shared_expert".
    """
    config, gate_up, down = inputs.config, inputs.projection(f"{block}.gate_up"), inputs.projection(f"{block}.down")
    numbers = array_at(inputs.weights, WeightPath.parse(block)).get("act_fn")
    act_fn = None if numbers is None else XIELU(numbers)
    return MLP(config.hidden_act, gate_up, down, block in inputs.float32, gated=config.gated, act_fn=act_fn)
