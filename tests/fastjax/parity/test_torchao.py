"""torchao's fake quantisers, where it is installed (it is in no extra): 0.18.0 has our values but for ties."""

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.quantization.fake import WEIGHTS, fake_quantize
from tests.fastjax.quantization.test_fake import hostile

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

MATRICES = {
    "hostile": hostile(),
    "random": np.random.default_rng(3).standard_normal((1024, 1024)).astype(np.float32),
}
#: Below this torchao has another least scale: 2⁻²³ of integers, 1e-12 of FP8's largest number.
SMALL = {"int4-32": 8 * 2.0**-23, "int4-128": 8 * 2.0**-23, "fp8-row": 1e-12}


def theirs(name, w):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import PerRow, PerTensor
    from torchao.quantization.qat import Float8FakeQuantizeConfig, IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizer, IntxFakeQuantizer

    w = torch.tensor(w)
    if name == "mxfp4":
        return MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32).dequantize(torch.float32)
    if name == "nvfp4":
        scale = per_tensor_amax_to_scale(w.abs().max())
        return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale).dequantize(torch.float32)
    if name.startswith("int4"):
        group = int(name.partition("-")[2])
        return IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=group, is_symmetric=True))(w)
    scales = {"fp8-row": PerRow(), "fp8-tensor": PerTensor()}[name]
    return Float8FakeQuantizer(Float8FakeQuantizeConfig(torch.float8_e4m3fn, scales))(w)


@pytest.mark.parametrize("name", ["int4-32", "int4-128", "fp8-row", "fp8-tensor", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("kind", MATRICES)
def test_weights_have_torchaos_values(kind, name):
    w = MATRICES[kind]
    ours, other = np.asarray(fake_quantize(jnp.asarray(w), WEIGHTS[name])), theirs(name, w).detach().float().numpy()
    group = {"fp8-row": w.shape[1], "nvfp4": 16}.get(name, int(name.partition("-")[2]) if name[:3] == "int" else w.size)
    groups = w.reshape(-1, group)
    largest = np.abs(groups).max(1, keepdims=True)
    different = (ours != other).reshape(groups.shape) & (largest > SMALL.get(name, 0))
    if name.startswith("int4"):
        # It multiplies by the scale's reciprocal: the most negative number of a group, a tie, may have the code above.
        assert (groups[different] == -np.broadcast_to(largest, groups.shape)[different]).all()
        step = np.broadcast_to(largest / 7.5, groups.shape)[different]
        apart = np.abs(ours - other).reshape(groups.shape)[different]
        np.testing.assert_allclose(apart, step, rtol=1e-5)
    elif name == "nvfp4":  # scales in E4M3 of quotients in another order; the float32 scale's reciprocal is theirs
        apart = ~np.isclose(ours, other, rtol=3e-7, atol=0)
        assert apart.reshape(groups.shape).any(1).sum() <= 1
    else:
        assert not different.any()
