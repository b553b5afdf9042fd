"""The head of an 8B Llama over 8,192 tokens, compiled for an H200 that is not there; the kernel for other cards too."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cross_entropy import chunk_size_for, chunked_cross_entropy, token_log_probs, triton
from pallas_kernels.cross_entropy.config import NUM_WARPS
from pallas_kernels.cross_entropy.rows import Options
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

BATCH, LENGTH = 4, 2048
WIDTH, VOCAB = 4096, 128_256  # of Llama 3 8B
GIB = 2**30


def compiled(differentiate, implementation=None, log_probs=False):
    def loss(hidden, weight, targets):
        def project(trainable, frozen, piece):
            return jnp.einsum("bse,ve->bsv", piece, frozen)

        chunk_size = chunk_size_for(BATCH, LENGTH, VOCAB)
        options = {"chunk_size": chunk_size, "implementation": implementation}
        if log_probs:
            found = token_log_probs(project, (), weight, hidden, targets, **options)
            return -jax.nn.log_sigmoid(jnp.sum(found)), found
        sums = chunked_cross_entropy(project, (), weight, hidden, targets, **options)
        return sums.loss_sum / sums.num_targets.astype(jnp.float32), sums

    aot = AOT()
    return aot.compile(
        jax.value_and_grad(loss, has_aux=True) if differentiate else loss,
        aot.spec((BATCH, LENGTH, WIDTH), jnp.bfloat16),
        aot.spec((VOCAB, WIDTH), jnp.bfloat16),
        aot.spec((BATCH, LENGTH), jnp.int32),
        options={"xla_gpu_enable_triton_gemm": False},  # as in the step whose memory the card confirmed
    )


def gemm_dtypes(text):
    """(result, left, right) of every matrix product in the optimised program."""
    dtypes = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", text))
    calls = re.findall(r'%([\w.-]+) = .* custom-call\(%([\w.-]+), %([\w.-]+).*"__cublas', text)
    assert " dot(" not in text
    return [tuple(dtypes[name] for name in call) for call in calls]


@pytest.mark.exhaustive("None-1")
@pytest.mark.parametrize("implementation, logits", [(None, 1), ("xla", 2)])
def test_gradient_takes_two_bfloat16_products_and_one_chunk_of_logits(implementation, logits):
    """XLA's has the chunk's logits and beside them their gradient, the kernel's writes it in their place."""
    program = compiled(differentiate=True, implementation=implementation)
    assert gemm_dtypes(program.as_text()) == [("bf16", "bf16", "bf16")] * 2
    chunk = 2048 * VOCAB * 2  # 0.49 GiB; the whole logits would be 1.96
    assert logits * chunk < program.memory_analysis().temp_size_in_bytes < (logits + 0.08) * chunk


def test_log_probs_with_a_cotangent_each_take_as_much():
    """The rows of the gradient in hidden, which is of hidden's size, are multiplied in the backward pass."""
    program = compiled(differentiate=True, log_probs=True)
    assert gemm_dtypes(program.as_text()) == [("bf16", "bf16", "bf16")] * 2
    chunk = 2048 * VOCAB * 2
    assert chunk < program.memory_analysis().temp_size_in_bytes < 1.08 * chunk


@pytest.mark.exhaustive("128256-h200")
@pytest.mark.parametrize("card", ["h200", "a100-80", "4090"])
@pytest.mark.parametrize("vocab", [128_256, 50_257])  # whole vectors, and a row that begins anywhere
def test_the_kernel_stays_in_its_registers(vocab, card, tmp_path):
    aot = AOT(card)
    logits, targets = aot.spec((1, 512, vocab), jnp.bfloat16), aot.spec((1, 512), jnp.int32)
    used = resources.of_triton(
        aot, lambda *arrays: triton.backward(*arrays, Options(0.1, 1e-4)), logits, targets, folder=tmp_path
    )
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
        assert used.registers * 32 * NUM_WARPS <= 65536


@pytest.mark.exhaustive(by="tests/pallas_kernels/cross_entropy/test_cross_entropy.py::test_products")
def test_evaluation_takes_one_product_and_one_chunk_of_logits():
    program = compiled(differentiate=False)
    assert gemm_dtypes(program.as_text()) == [("bf16", "bf16", "bf16")]
    assert program.memory_analysis().temp_size_in_bytes < 0.55 * GIB
