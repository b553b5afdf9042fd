"""FLOPs of products counted in traces."""

import jax
import jax.numpy as jnp

from fastjax.planning.work import product_flops, stacked_bytes

SIZE, LAYERS = 8, 5


def layers(w, x):
    return jax.lax.scan(jax.checkpoint(lambda x, _: (jnp.tanh(x @ w), x[0])), x, None, length=LAYERS)


def test_loops_branches_and_recomputation():
    w = x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    one = 2 * SIZE**3
    assert product_flops(jax.make_jaxpr(layers)(w, x)) == LAYERS * one
    gradient = jax.make_jaxpr(jax.grad(lambda w, x: layers(w, x)[0].sum()))(w, x)
    assert product_flops(gradient) == 4 * LAYERS * one, "forward, again, and two gradients"
    unused = jax.make_jaxpr(lambda w, x: layers(w, x)[1])(w, x)
    assert product_flops(unused) == LAYERS * one, "each layer's input needs the layers before it"
    alone = jax.make_jaxpr(lambda w, x: jax.vjp(lambda x: x @ w, x)[1](x))(w, x)
    assert product_flops(alone) == one, "the gradient needs no result of the product"
    either = jax.make_jaxpr(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: w @ x @ x, lambda: w @ x))(w, x)
    assert product_flops(either) == 2 * one
    experts = jax.make_jaxpr(jax.lax.ragged_dot)(x, jnp.zeros((3, SIZE, SIZE)), jnp.zeros(3, jnp.int32))
    assert product_flops(experts) == one


def test_stacked_results_are_what_a_step_must_hold():
    w = x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    assert stacked_bytes(jax.make_jaxpr(layers)(w, x)) == 4 * LAYERS * SIZE
    gradient = jax.make_jaxpr(jax.grad(lambda w, x: layers(w, x)[0].sum()))(w, x)
    assert stacked_bytes(gradient) == 4 * LAYERS * SIZE**2, "the layers' inputs"
