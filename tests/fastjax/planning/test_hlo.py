"""A program of a few lines, read."""

import pytest

from fastjax.planning.arrays import largest_arrays
from fastjax.planning.collectives import READ, READ_SHARE, Collective, collectives, link_seconds
from fastjax.planning.hlo import kernels
from fastjax.planning.speed import BANDWIDTH_SHARE
from pallas_kernels.cards import CARDS

TEXT = """HloModule jit_step, is_scheduled=true

%slice_computation (param_0: bf16[8,512,256], param_1: s32[]) -> f32[512,256] {
  %param_0 = bf16[8,512,256]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,512,256]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,512,256}
  %flat = bf16[512,256]{1,0} bitcast(%one)
  ROOT %wide = f32[512,256]{1,0} convert(%flat)
}

%update_computation (param_0.1: f32[8,512,256], param_1.1: f32[512,256], param_2.1: s32[]) -> f32[8,512,256] {
  %param_0.1 = f32[8,512,256]{2,1,0} parameter(0)
  %param_1.1 = f32[512,256]{1,0} parameter(1)
  %param_2.1 = s32[] parameter(2)
  %new = f32[1,512,256]{2,1,0} bitcast(%param_1.1)
  ROOT %set = f32[8,512,256]{2,1,0} dynamic-update-slice(%param_0.1, %new, %param_2.1, %param_2.1, %param_2.1)
}

%body (state: (s32[], bf16[8,512,256], f32[8,512,256])) -> (s32[], bf16[8,512,256], f32[8,512,256]) {
  %state = (s32[], bf16[8,512,256]{2,1,0}, f32[8,512,256]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %weights = bf16[8,512,256]{2,1,0} get-tuple-element(%state), index=1
  %kept = f32[8,512,256]{2,1,0} get-tuple-element(%state), index=2
  %taken = f32[512,256]{1,0} fusion(%weights, %i), kind=kLoop, calls=%slice_computation, metadata={op_name="jit(step)/jvp()/while/body/eval_jaxpr/take"}
  %put = f32[8,512,256]{2,1,0} fusion(%kept, %taken, %i), kind=kLoop, calls=%update_computation, metadata={op_name="jit(step)/transpose(jvp())/while/body/checkpoint/mlp/put"}
  ROOT %next = (s32[], bf16[8,512,256]{2,1,0}, f32[8,512,256]{2,1,0}) tuple(%i, %weights, %put)
}

ENTRY %main (a: bf16[128,512], b: bf16[512,256]) -> bf16[128,256] {
  %a = bf16[128,512]{1,0} parameter(0)
  %b = bf16[512,256]{1,0} parameter(1)
  %start = (s32[], bf16[8,512,256]{2,1,0}, f32[8,512,256]{2,1,0}) custom-call(), custom_call_target="made"
  %loop = (s32[], bf16[8,512,256]{2,1,0}, f32[8,512,256]{2,1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %product = (bf16[128,256]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"lhs_batch_dimensions":[]}
}
"""  # noqa: E501


def test_kernels_count_slices_and_loops():
    found = {kernel.scope.split("/")[-1]: kernel for kernel in kernels(TEXT)}
    assert set(found) == {"start", "take", "put", "product"}
    piece = 512 * 256
    assert found["take"].times == 8 and found["take"].moved == 2 * piece + 4 + 4 * piece
    assert found["put"].moved == 4 * piece + 4 + 4 * piece, "what is updated in place is not read"
    product = found["product"]
    assert (product.times, product.flops, product.float8) == (1, 2 * 128 * 256 * 512, False)
    rounded = TEXT.replace('"__cublas$lt$matmul"', '"__cublas$lt$matmul$f8"')
    assert kernels(rounded)[-1] == product._replace(float8=True)
    assert product.moved == 2 * (128 * 512 + piece + 128 * 256), "its workspace is not moved"
    assert kernels(TEXT.replace("(%a, %b)", "(%a, %b, %a)"))[-1].moved == product.moved, (
        "what is given twice is read once"
    )


def test_room_that_is_allocated_is_written_by_nobody():
    """And is named by what each turn puts into it, in a loop over microbatches too."""
    room = 'custom_call_target="AllocateBuffer", metadata={op_name="jit(step)/layers/empty"}'
    text = TEXT.replace('custom_call_target="made"', room).replace("checkpoint/mlp/put", "dynamic_update_slice")
    assert [kernel.moved for kernel in kernels(text) if kernel.scope.endswith("empty")] == [0]
    assert str(largest_arrays(text, 1)[0]).endswith("take (forward)")


def test_an_instruction_that_begins_another_does_not_make_its_operands():
    begun = "%taken = ((bf16[8,512,256]{2,1,0}, s32[]), f32[512,256]{1,0}, u32[]) fusion-start("
    found = {
        kernel.scope.split("/")[-1]: kernel
        for kernel in kernels(TEXT.replace("%taken = f32[512,256]{1,0} fusion(", begun))
    }
    assert found["take"].result == "(f32[512,256], u32[])"


def test_a_stack_is_named_by_what_each_turn_puts_into_it():
    text = TEXT.replace("checkpoint/mlp/put", "dynamic_update_slice").replace("eval_jaxpr/take", "layers/mlp/take")
    first, *others = map(str, largest_arrays(text, 5))
    assert first == "0.00 GiB f32[8,512,256] of layers/mlp/take (forward)"
    assert "0.00 GiB bf16[8,512,256] of start (forward)" in others, "nothing in the loop makes it"


def test_an_array_in_the_hosts_memory_is_none_of_the_devices():
    """A stack of residuals that the host keeps, beside the device's part of it."""
    text = TEXT.replace("%put = f32[8,512,256]{2,1,0} fusion", "%put = f32[8,512,256]{2,1,0:T(8,128)S(5)} fusion")
    text = text.replace("f32[8,512,256]{2,1,0}) custom-call()", "f32[8,512,256]{2,1,0:S(5)}) custom-call()")
    assert "f32[8,512,256]{S(5)}" in {kernel.result for kernel in kernels(text)}
    left_out = {array.type for array in largest_arrays(TEXT, 9)} - {array.type for array in largest_arrays(text, 9)}
    assert left_out == {"f32[8,512,256]"}


def test_kernels_that_read_other_devices_memory_read_a_layer_of_their_stacks():
    """Two devices share codes of 64 blocks each in a stack of eight layers, and two arrays that are copied."""
    calls = """
ENTRY %main (layer: s32[1], codes: u8[8,64,32], absmax: f32[128], scales: f32[8,512]) -> bf16[128,64] {
  %layer = s32[1]{0} parameter(0)
  %copied = (f32[2,512]{1,0}, f32[2,256]{1,0}) custom-call(%layer, %scales, %more), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={s32[1]{0}, f32[8,512]{1,0}, f32[8,256]{1,0}}, metadata={op_name="jit(step)/jit(gather)/shard_gather/mpmd_map"}
  ROOT %decoded = bf16[128,64]{1,0} custom-call(%layer, %codes, %absmax), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={s32[1]{0}, u8[8,64,32]{2,1,0}, f32[128]{0}}, metadata={op_name="jit(step)/nf4_dequantize_shared/mpmd_map"}
}
"""  # noqa: E501
    copied, decoded = kernels(calls)
    assert copied.moved == 2 * 4 * 2 * (512 + 256)
    assert decoded.moved == 2 * 64 * 32 + 4 * 128 + 2 * 128 * 64
    [read] = collectives(calls, 2)
    assert read == Collective(READ, 2, 4 * (512 + 256) + 64 * 32, copied.moved + decoded.moved)
    expected = read.sent / (READ_SHARE * 450e9) - read.moved / (BANDWIDTH_SHARE * 4.8e12)
    assert link_seconds([read], CARDS["h200"]) == pytest.approx(expected) and expected > 0
    assert link_seconds([read._replace(sent=read.moved / 16)], CARDS["h200"]) == 0, "the kernels take longer anyway"


def test_kernels_that_exchange_tokens_read_as_much_as_they_join_or_add():
    """Two rows of 512 on each of four devices; the last sum's shares travel in 16 bits."""
    calls = """
ENTRY %main (own: f32[2,512], shares: f32[2,4,512], away: bf16[2,3,512]) -> (f32[2,512], s32[8]) {
  %own = f32[2,512]{1,0} parameter(0)
  %joined = (f32[2,4,512]{2,1,0}, s32[8]{0}) custom-call(%own, %zeros), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={f32[2,512]{1,0}, s32[8]{0}}, metadata={op_name="jit(step)/jit(gather)/gather_tokens/mpmd_map"}
  %added = (f32[2,512]{1,0}, s32[8]{0}) custom-call(%shares, %zeros), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={f32[2,4,512]{2,1,0}, s32[8]{0}}, metadata={op_name="jit(step)/jit(scatter)/scatter_tokens/mpmd_map"}
  ROOT %short = (f32[2,512]{1,0}, s32[8]{0}) custom-call(%shares, %away, %zeros), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={f32[2,4,512]{2,1,0}, bf16[2,3,512]{2,1,0}, s32[8]{0}}, metadata={op_name="jit(step)/jit(scatter)/scatter_tokens/mpmd_map"}
}
"""  # noqa: E501
    own = 4 * 2 * 512
    joined, added, short = kernels(calls)
    assert (joined.moved, added.moved, short.moved) == (8 * own, 5 * own, 3.5 * own)
    assert collectives(calls, 4) == [Collective(READ, 3, 7.5 * own, 16.5 * own)]
