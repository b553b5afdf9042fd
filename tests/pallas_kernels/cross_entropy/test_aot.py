"""The head of an 8B Llama over 8,192 tokens, compiled for an H200 that is not there."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cross_entropy import chunk_size_for, chunked_cross_entropy
from pallas_kernels.cross_entropy.shapes import HEADS
from tests.support.aot import AOT, needs_cuda_plugin

pytestmark = [pytest.mark.aot, needs_cuda_plugin]

BATCH, LENGTH = 4, 2048
HEAD = HEADS[0]
GIB = 2**30


def compiled(differentiate):
    def loss(hidden, weight, targets):
        def project(trainable, frozen, piece):
            return jnp.einsum("bse,ve->bsv", piece, frozen)

        chunk_size = chunk_size_for(BATCH, LENGTH, HEAD.vocab)
        sums = chunked_cross_entropy(project, (), weight, hidden, targets, chunk_size=chunk_size)
        return sums.loss_sum / sums.num_targets.astype(jnp.float32), sums

    aot = AOT()
    return aot.compile(
        jax.value_and_grad(loss, has_aux=True) if differentiate else loss,
        aot.spec((BATCH, LENGTH, HEAD.width), jnp.bfloat16),
        aot.spec((HEAD.vocab, HEAD.width), jnp.bfloat16),
        aot.spec((BATCH, LENGTH), jnp.int32),
        options={"xla_gpu_enable_triton_gemm": False},  # as in the step whose memory the card confirmed
    )


def gemm_dtypes(text):
    """(result, left, right) of every matrix product in the optimised program."""
    dtypes = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", text))
    calls = re.findall(r'%([\w.-]+) = .* custom-call\(%([\w.-]+), %([\w.-]+).*"__cublas', text)
    assert " dot(" not in text
    return [tuple(dtypes[name] for name in call) for call in calls]


def test_gradient_takes_two_bfloat16_products_and_a_gigabyte():
    program = compiled(differentiate=True)
    assert gemm_dtypes(program.as_text()) == [("bf16", "bf16", "bf16")] * 2
    # one chunk's logits and their gradient, 0.49 GiB each in bfloat16; the whole logits would be 1.96 GiB
    assert program.memory_analysis().temp_size_in_bytes < 1.05 * GIB


def test_evaluation_takes_one_product_and_one_chunk_of_logits():
    program = compiled(differentiate=False)
    assert gemm_dtypes(program.as_text()) == [("bf16", "bf16", "bf16")]
    assert program.memory_analysis().temp_size_in_bytes < 0.55 * GIB
