"""A mixture of experts in place of a layer's MLP: a router, the experts, and an expert that sees every token.

The routed experts are one unit with their adapters (`fastjax.lora.experts`); the shared one is an MLP. The router's
logits are float32, since those of 16 bits make ties.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from convert.model.config import ModelConfig
from convert.model.moe import RouterConfig
from convert.model.paths import EXPERTS, ROUTER, WeightPath
from fastjax.lora.expert_choice import choose_experts
from fastjax.lora.experts import Block, Clamp, Operands, routed_experts
from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.params import Constant
from fastjax.models.context import Sums
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.mlp import MLP, build_mlp
from fastjax.models.projection import Projection
from fastjax.residuals import name_residual
from pallas_kernels.few_experts import Items
from pallas_kernels.moe_routing import Load, RouterSettings, Routing, measure_load

#: The activation with two constants, as `ModelConfig.hidden_act` names it.
CLAMPED = "clamped_swiglu"


class Router(Projection):
    """The choice of each token's experts.

    Attributes:
        settings: its mathematics.
        choice_bias: [X] or [1, X], added to the scores for the choice alone; or None.
    """

    def __init__(self, config: RouterConfig, *arguments, choice_bias: Array | None, **options):
        super().__init__([(ROUTER, config.num_experts)], *arguments, **options)
        self.settings = RouterSettings(*(getattr(config, field) for field in RouterSettings._fields))
        self.choice_bias = None if choice_bias is None else Constant(choice_bias)

    def route(self, x: Float[Array, "B S E"], key: PRNGKeyArray | None) -> tuple[Routing, Items | None]:
        """The experts of all tokens, one after the other; and their items, where tokens are few."""
        (logits,) = self(x.astype(jnp.float32), key)
        bias = None if self.choice_bias is None else self.choice_bias[...].reshape(-1)
        return choose_experts(self.settings, logits.reshape(-1, logits.shape[-1]), bias)


class Experts(nnx.Module):
    """The routed experts, down(act(gate(x)) · up(x)) of each.

    Attributes:
        activation: Hugging Face's name of act.
        clamp: constants of the clamped activation, or None.
        gate_up: the two projections of the input.
        down: the projection back.
        float32: whether they are computed in float32 whatever the input's dtype.
    """

    def __init__(self, config: ModelConfig, gate_up: Projection, down: Projection, float32: bool):
        self.activation, self.gate_up, self.down, self.float32 = config.hidden_act, gate_up, down, float32
        clamped = config.hidden_act == CLAMPED
        self.clamp = Clamp(config.swiglu_limit, config.swiglu_alpha) if clamped else None

    def __call__(self, x: Float[Array, "B S E"], routing: Routing, items: Items | None) -> Float[Array, "B S E"]:
        """The weighted sum of each token's experts, in the dtype of the computation.

        Args:
            x: inputs.
            routing: of their tokens.
            items: of the routing, or None.
        """
        tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32 if self.float32 else x.dtype)
        experts = routing.logits.shape[1]
        parts = (self.gate_up, self.down)
        block = Block(experts, self.activation, self.clamp, *(describe(p.parts, p.adapters)[0] for p in parts))
        biases = [None if part.bias is None else part.bias[...] for part in parts]
        weights = [part.weight.get_value() for part in parts]
        matrices = matrices_of({**self.gate_up.adapters, **self.down.adapters})
        arrays = Operands(weights[0], biases[0], weights[1], biases[1], matrices)
        out = routed_experts(block, tokens, routing.weights, routing.experts, arrays, items)
        return name_residual(out, "projection").reshape(x.shape)


class Mixture(nnx.Module):
    """Router and experts, Σ w·expert(x), and the shared expert, which is added.

    Attributes:
        router: chooses and weighs.
        experts: the routed ones.
        shared_expert: of all tokens; None: there is none.
        shared_expert_gate: its output is multiplied by sigmoid(gate(x)); None: it is not.
        float32: whether all of it is computed in float32 whatever the input's dtype.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared_expert: MLP | None,
        shared_expert_gate: Projection | None,
        float32: bool,
    ):
        self.router, self.experts, self.float32 = router, experts, float32
        self.shared_expert, self.shared_expert_gate = shared_expert, shared_expert_gate

    @jax.named_scope("mlp")
    def __call__(
        self, x: Float[Array, "B S E"], key: PRNGKeyArray | None, mask: Bool[Array, "B S"] | None
    ) -> tuple[Float[Array, "B S E"], Sums]:
        """The block on normalised inputs, and what `Load` and `router_statistics` read.

        Args:
            x: inputs.
            key: the layer's dropout key; None switches dropout off.
            mask: which tokens are not padding; None: all.
        """
        inner = x.astype(jnp.float32) if self.float32 else x
        routing, items = self.router.route(inner, key)
        out = self.experts(inner, routing, items).astype(inner.dtype)
        if self.shared_expert is not None:
            shared = self.shared_expert(inner, key)
            if self.shared_expert_gate is not None:
                (gate,) = self.shared_expert_gate(inner, key)
                shared = (jax.nn.sigmoid(gate.astype(jnp.float32)) * shared.astype(jnp.float32)).astype(shared.dtype)
            out = out + shared
        return out.astype(x.dtype), _sums(routing, mask)


def build_mixture(inputs: LayerInputs) -> Mixture:
    """A layer's mixture around leaves that exist.

    Args:
        inputs: of the layer.
    """
    config, weights, adapters, float32 = inputs.config, inputs.weights["mlp"], inputs.adapters, inputs.float32
    moe = config.moe
    assert moe is not None

    def arguments(tree: Any, block: str, part: str) -> tuple[Any, ...]:
        path = WeightPath(None, block, part, "")
        lora = {part: adapters[path]} if path in adapters else {}
        return tree["weight"], tree.get("bias"), lora, [part] if path in float32 else ()

    def experts(group: str, part: str, rows: int) -> Projection:
        return Projection([(part, rows)], *arguments(weights["experts"][group], EXPERTS, part))

    choice_bias = weights[ROUTER].get("choice_bias")
    router = Router(moe.router, *arguments(weights[ROUTER], "mlp", ROUTER), choice_bias=choice_bias)
    gate, name = None, "shared_expert_gate"
    if moe.shared_gate:
        gate = Projection([(name, 1)], *arguments(weights[name], "mlp", name))
    wide = any(WeightPath.parse(module).of_experts for module in float32)
    gate_up = experts("gate_up", "gate_up_proj", 2 * moe.intermediate_size)
    routed = Experts(config, gate_up, experts("down", "down_proj", config.hidden_size), wide)
    shared = build_mlp(inputs, "mlp.shared_expert") if "mlp.shared_expert.down" in inputs.groups else None
    return Mixture(router, routed, shared, gate, "mlp" in float32)


def _sums(routing: Routing, mask: Bool[Array, "B S"] | None) -> Sums:
    """A layer's load, and its statistics, which are of each layer by itself."""
    load = measure_load(routing, None if mask is None else mask.reshape(-1))
    shares = load.chosen / jnp.maximum(jnp.sum(load.chosen), 1)
    entropy = -jnp.sum(jnp.where(shares > 0, shares * jnp.log(jnp.where(shares > 0, shares, 1)), 0))
    return {
        **load._asdict(),
        "largest_share": jnp.max(shares),
        "entropy": entropy / jnp.log(shares.size),
        "layers": jnp.float32(1),
    }


def load_of(sums: Sums) -> Load:
    """The load of all layers together.

    Args:
        sums: over the layers.
    """
    return Load(*(sums[field] for field in Load._fields))


def router_statistics(sums: Sums) -> dict[str, Float[Array, ""]]:
    """Means over the mixtures: the busiest expert's share of the choices, and their entropy, 1 where they are even.

    Args:
        sums: over the layers.
    """
    return {f"router_{name}": sums[name] / sums["layers"] for name in ("largest_share", "entropy")}
