"""Moments of eight bits: bitsandbytes' maths, a quarter of the memory, small tensors in 32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.optimizers.adam import MIN_8BIT_SIZE, AdamState
from fastjax.training.optimizers.blockwise import Blockwise

CONFIG = OptimizerConfig(
    name="adamw_8bit",
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    weight_decay=0.1,
    adam_beta1=0.85,
    adam_beta2=0.97,
    adam_epsilon=1e-6,
    max_grad_norm=0.0,
)


def gradients(shape, count, seed=0):
    """Some rows a thousand times smaller than others, as gradients are."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-3, 0, (shape[0], *[1] * (len(shape) - 1)))
    return [(rng.standard_normal(shape) * scale).astype(np.float32) for _ in range(count)]


def adam_state(state) -> AdamState:
    return next(part for part in state if isinstance(part, AdamState))


@pytest.mark.torch
def test_steps_are_bitsandbytes():
    """Ten steps equal its blockwise maths, spelled in torch with its own maps (it has no such kernel for CPUs)."""
    torch = pytest.importorskip("torch")
    bnb = pytest.importorskip("bitsandbytes.functional")
    shape, count = (130, 70), 10  # 9,100 elements: the last block is short
    signed, unsigned = bnb.create_dynamic_map(signed=True), bnb.create_dynamic_map(signed=False)

    def load(codes, absmax, values):
        padded = torch.nn.functional.pad(values[codes.long()], (0, -codes.numel() % 256)).reshape(-1, 256)
        return (padded * absmax[:, None]).reshape(-1)[: codes.numel()]

    def store(x, values):
        blocks = torch.nn.functional.pad(x, (0, -x.numel() % 256)).reshape(-1, 256)
        absmax = blocks.abs().amax(1)
        codes = torch.argmin(((blocks / absmax[:, None])[..., None] - values).abs(), dim=2)
        return codes.reshape(-1)[: x.numel()].to(torch.uint8), absmax

    start = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    p = torch.from_numpy(start.copy()).reshape(-1)
    first = second = (torch.zeros(p.numel(), dtype=torch.uint8), torch.zeros(-(-p.numel() // 256)))
    optimizer = make_optimizer(CONFIG, count)
    params = {"q_proj": {"weight": jnp.asarray(start)}}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step, gradient in enumerate(gradients(shape, count), start=1):
        g = torch.from_numpy(gradient).reshape(-1)
        m = load(*first, signed).mul_(0.85).add_(g, alpha=1 - 0.85)
        v = load(*second, unsigned).mul_(0.97).addcmul_(g, g, value=1 - 0.97)
        p.mul_(1 - 1e-2 * 0.1)
        p.addcdiv_(m, v.sqrt() / (1 - 0.97**step) ** 0.5 + 1e-6, value=-1e-2 / (1 - 0.85**step))
        first, second = store(m, signed), store(v, unsigned)

        updates, state = update({"q_proj": {"weight": jnp.asarray(gradient)}}, state, params)
        params = optax.apply_updates(params, updates)
        found = adam_state(state)
        for ours, theirs in ((found.mu, first), (found.nu, second)):
            ours = ours["q_proj"]["weight"]
            distance = np.abs(np.asarray(ours.codes, int).reshape(-1) - theirs[0].numpy().astype(int))
            # A moment that lies on the border of two codes falls to either side by its last bit.
            assert distance.max() <= 1 and np.count_nonzero(distance) <= 10, f"step {step}"
            np.testing.assert_allclose(ours.absmax, theirs[1].numpy(), rtol=2e-6)
    difference = np.abs(np.asarray(params["q_proj"]["weight"]).reshape(-1) - p.numpy())
    # Ten float32 updates of 0.01; an element that once had the other code moves by another fraction of a step.
    assert np.count_nonzero(difference > 2e-6) <= 20
    assert difference.max() < 1e-3


def test_32_bits_have_the_exact_first_step():
    """1 - 0.999 in float32 is off by 1.3e-5; the correction is not."""
    config = OptimizerConfig(learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, adam_epsilon=1e-20)
    params = {"w": jnp.ones((2, 2))}
    optimizer = make_optimizer(config, 10)
    updates, _ = optimizer.update({"w": jnp.full((2, 2), 0.3)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -1.0, rtol=5e-7)


def shapes(layers, projections, others):
    """A tree of shapes: for each projection (out, in, its leaves)."""
    layer = {
        name: {part: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for part, shape in leaves.items()}
        for name, leaves in projections.items()
    }
    return {"layers": [[layer]], **{n: {"weight": jax.ShapeDtypeStruct(s, jnp.float32)} for n, s in others.items()}}


LLAMA_8B = {
    **{"q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096)},
    **{"gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336)},
}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_state_of_8b_is_a_quarter(kind):
    if kind == "lora":
        adapters = {name: {"lora_A": (16, n_in), "lora_B": (n_out, 16)} for name, (n_out, n_in) in LLAMA_8B.items()}
        tree = shapes(32, adapters, {})
    else:
        weights = {name: {"weight": shape} for name, shape in LLAMA_8B.items()}
        weights |= {"input_layernorm": {"weight": (4096,)}, "post_attention_layernorm": {"weight": (4096,)}}
        tree = shapes(32, weights, {"embed_tokens": (128256, 4096), "lm_head": (128256, 4096), "norm": (4096,)})

    def size(name):
        state = jax.eval_shape(make_optimizer(OptimizerConfig(name=name), 10).init, tree)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state[:-1]))  # behind: learning rates

    parameters = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert size("adamw") == pytest.approx(8 * parameters)
    assert size("adamw_8bit") < 0.255 * size("adamw")
    assert size("adamw_16bit") == pytest.approx(0.5 * size("adamw"), rel=1e-3)  # vectors keep 32 bits
    assert size("lion") == pytest.approx(4 * parameters)
    assert size("adafactor") < 0.07 * size("adamw")


def test_small_tensors_keep_32_bits():
    """The size of a layer's tensor counts: stacked, these would be large enough."""
    tree = {
        "small": {"lora_A": jnp.ones((8, 4, 1023))},
        "large": {"lora_A": jnp.ones((8, 4, 1024)), "bias": jnp.ones((8, MIN_8BIT_SIZE))},
        "norm": {"weight": jnp.ones((8, MIN_8BIT_SIZE - 1))},
    }
    state = adam_state(make_optimizer(CONFIG, 10).init(tree))
    for moments in (state.mu, state.nu):
        assert isinstance(moments["large"]["lora_A"], Blockwise)
        assert moments["large"]["lora_A"].codes.dtype == jnp.uint8
        assert isinstance(moments["large"]["bias"], Blockwise)
        assert moments["small"]["lora_A"].dtype == jnp.float32
        assert moments["norm"]["weight"].dtype == jnp.float32
