"""The summary of a trace, from made-up events."""

import pytest

from fastjax.bench.step.profile import kind_of, scopes_of, summarize
from fastjax.bench.trace import Kernel

MS = 1_000_000


def kernel(name, start, end, device="/device:GPU:0"):
    return Kernel(device, name, "jit_step", "", start * MS, end * MS)


def test_two_steps():
    """Each of 10 ms: a product of 6 ms, a copy of 4 that runs half beside it, a millisecond of attention, and gaps."""
    one = [("nvjet_hsh_128x256", 0, 6), ("MemcpyD2D", 4, 8), ("attention_forward", 9, 10)]
    kernels = [kernel(name, start + shift, end + shift) for shift in (5, 15) for name, start, end in one]
    profile = summarize(kernels, 2, {})
    assert profile is not None
    assert profile.step_milliseconds == pytest.approx(10) and profile.busy == pytest.approx(0.9)
    assert [(part.name, part.milliseconds, part.share, part.runs) for part in profile.kinds] == [
        ("cuBLAS, GEMM", pytest.approx(6), pytest.approx(0.6), 1),
        ("copies D2D", pytest.approx(4), pytest.approx(0.4), 1),
        ("attention", pytest.approx(1), pytest.approx(0.1), 1),
        ("idle", pytest.approx(1), pytest.approx(0.1), 0),
    ]
    assert [part.name for part in profile.longest] == ["nvjet_hsh_128x256", "MemcpyD2D", "attention_forward"]


def test_devices_are_averaged():
    kernels = [kernel("nvjet", 0, 4), kernel("wait", 4, 10)]
    kernels += [kernel("nvjet", 100, 102, "/device:GPU:1"), kernel("ncclAllReduce", 108, 110, "/device:GPU:1")]
    profile = summarize(kernels, 1, {})
    assert profile is not None and profile.step_milliseconds == pytest.approx(10)
    assert profile.busy == pytest.approx((10 + 4) / 20)
    found = {part.name: part.milliseconds for part in profile.kinds}
    assert found == pytest.approx({"cuBLAS, GEMM": 3, "other": 3, "collectives": 1, "idle": 3})


def test_the_longest_alone_are_named():
    kernels = [kernel(f"loop_add_fusion_{n}", 100 * n, 100 * n + n + 1) for n in range(40)]
    profile = summarize(kernels, 1, {})
    assert profile is not None and len(profile.longest) == 25
    assert profile.longest[0].name == "loop_add_fusion_39" and profile.longest[-1].name == "loop_add_fusion_15"


def test_parts_of_the_step():
    """By the scopes of the program's instructions, also of one that is in a fusion or in a loop."""
    backward = "transpose(jvp(layers))/while/body"
    lines = {
        "%fusion.1 = f32[2]{0} fusion(%a), kind=kLoop,": "jvp(layers)/while/body/attention/transpose",
        "ROOT %custom-call.2 = (f32[2]{0}) custom-call(%a),": f"{backward}/checkpoint/rematted_computation/mlp/dot",
        "  gemm.3 = f32[2]{0} custom-call(%a),": f"{backward}/mlp/transpose(mlp)/jvp()/dot",
        "%loop_add = f32[2]{0} fusion(%a),": "optimizer/mul",
        "%reduce.4 = f32[] reduce(%a),": "jvp()/while/body/reduce_max",
        "%copy.5 = f32[2]{0} copy(%a),": f"{backward}/dynamic_slice",
        "%where = f32[2]{0} fusion(%a),": "jit(_where)/select_n",
    }
    program = "\n".join(
        f'  {line} metadata={{op_type="x" op_name="jit(step)/{path}" stack_frame_id=3}}' for line, path in lines.items()
    )
    expected = {
        "fusion.1": "attention, forward",
        "custom-call.2": "mlp, recomputed",
        "gemm.3": "mlp, backward",
        "loop_add": "optimizer",
        "reduce.4": "loss, forward",
        "copy.5": "layers, other, backward",
        "where": "other",
    }
    found = scopes_of(program)
    assert found == expected
    kernels = [Kernel("/device:GPU:0", "kernel", "jit_step", op, n * MS, (n + 1) * MS) for n, op in enumerate(expected)]
    kernels += [Kernel("/device:GPU:0", "kernel", "jit_step", "gemm.3", 8 * MS, 10 * MS), kernel("MemcpyH2D", 10, 11)]
    profile = summarize(kernels, 1, found)
    assert profile is not None
    parts = {part.name: part.milliseconds for part in profile.scopes}
    assert parts == pytest.approx(dict.fromkeys(expected.values(), 1.0) | {"mlp, backward": 3.0, "unknown": 1.0})


def test_no_kernels():
    assert summarize([], 3, {}) is None


@pytest.mark.parametrize(
    "name, kind",
    [
        ("attention_backward_dkv_mosaic_gpu_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nf4_dequantize_mosaic_gpu_kernel", "NF4 decode"),
        ("nf4_matmul_rs_gradient", "NF4 products"),
        ("grouped_nf4_matmul_dx", "grouped products"),
        ("glu_lora_backward", "gated block"),
        ("split_rope_lora_forward", "rope"),
        ("cross_entropy_rows", "loss"),
        ("low_rank_output_gradients", "Triton GEMM, rank products"),
        ("rms_norm_lora_backward", "norms, reductions"),
        ("gemm_fusion_dot_10", "Triton GEMM, rank products"),
        ("nvjet_sm90_tst_176x128_64x5_1x2_h_bz_TNN", "cuBLAS, GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "cuBLAS, GEMM"),
        ("MemcpyH2D", "copies H2D"),
        ("MemcpyD2H", "copies D2H"),
        ("memcpy128", "copies D2D"),
        ("memcpy32_post", "copies D2D"),
        ("Memset 0", "zeros"),
        ("input_dynamic_slice_reduce_fusion", "norms, reductions"),
        ("loop_broadcast_fusion_6", "copying fusions"),
        ("fusion_421", "element-wise"),
        ("loop_dynamic_update_slice_fusion", "copying fusions"),
        ("loop_multiply_fusion_7", "element-wise"),
        ("wrapped_convert", "element-wise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collectives"),
        ("something", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind
