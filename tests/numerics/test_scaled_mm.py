"""The operands of scaled_mm, without a Hopper GPU: layouts that the kernels take, products that are the reference's."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.numerics.evaluated import evaluate_scaled_mm
from verl_fp8.errors import DataError
from verl_fp8.numerics import linear, scaled_mm
from verl_fp8.numerics.quantize import QuantizedTensor, quantize
from verl_fp8.numerics.recipe import Recipe


@pytest.fixture
def evaluated(monkeypatch):
    """scaled_mm evaluated, and float64 sums in the reference."""
    evaluate_scaled_mm(monkeypatch)


def operands(kind, m, n, k, scale_format="fp32"):
    """(a, b) of one of the layer's three products, quantised as the layer does it."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator).bfloat16()
    b = torch.randn(n, k, generator=generator).bfloat16()
    recipe = Recipe(scale_format=scale_format)
    if kind == "wgrad":
        return tuple(scaled_mm.quantize_both(x.t().contiguous(), recipe)[1] for x in (a, b))
    if kind == "dgrad":
        return scaled_mm.quantize_rows(a, recipe), scaled_mm.weight_operand(b.t().contiguous(), recipe, transposed=True)
    return scaled_mm.quantize_rows(a, recipe), scaled_mm.weight_operand(b, recipe)


@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 384), (16, 128, 640), (5, 144, 200), (3, 40, 16), (132, 200, 72), (1, 1, 1)]
)
def test_products(evaluated, kind, m, n, k):
    """Each product, whole and ragged: the layout is one the kernels take, the value is the reference's to the bit."""
    a, b = operands(kind, m, n, k)
    found = scaled_mm.gemm(a, b, torch.bfloat16)
    assert found.is_contiguous()
    assert torch.equal(found, linear.gemm(a, b, torch.bfloat16, accumulate=torch.float64))


@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 384), (4, 128, 512), (5, 300, 200)])
def test_torch_accepts_the_layout(kind, m, n, k):
    """torch's own meta kernel for CUDA takes the arguments: dtypes, shapes, strides and recipes."""
    arguments = scaled_mm.arguments(*operands(kind, m, n, k))
    with FakeTensorMode():
        on_gpu = {
            name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments.items()
        }
        y = nn.functional.scaled_mm(**on_gpu, output_dtype=torch.bfloat16, use_fast_accum=False)
        on_gpu["scale_a"] = torch.empty(arguments["scale_a"].shape, device="cuda")
        with pytest.raises(RuntimeError, match="scale a must have shape"):
            nn.functional.scaled_mm(**on_gpu)
    assert y.dtype == torch.bfloat16
    assert y.shape == (arguments["mat_a"].shape[0], arguments["mat_b"].shape[1])
    assert y.shape[0] >= m
    assert y.shape[1] >= n


def test_whole_operands_are_not_copied():
    """Aligned codes, and scales as the Triton kernel lays them out, go to the kernel as they are."""
    a, b = operands("forward", 128, 256, 512)
    a = QuantizedTensor(a.data, scaled_mm.outer_major(a.scale_inv), a.block)
    arguments = scaled_mm.arguments(a, b)
    assert arguments["mat_a"].data_ptr() == a.data.data_ptr()
    assert arguments["mat_b"].data_ptr() == b.data.data_ptr()
    assert arguments["scale_a"].data_ptr() == a.scale_inv.data_ptr()
    assert arguments["scale_b"].data_ptr() == b.scale_inv.data_ptr()


def test_operands_that_do_not_fit():
    """Blocks the kernels have not, and different K, are refused."""
    x = torch.randn(128, 128).bfloat16()
    a, b = quantize(x, (1, 128)), quantize(x, (128, 128))
    for left, right in ((b, b), (a, quantize(x, (64, 64))), (a, quantize(torch.randn(128, 256), (128, 128)))):
        with pytest.raises(DataError):
            scaled_mm.arguments(left, right)


@pytest.mark.parametrize(("rows", "scale_format"), [(64, "fp32"), (200, "fp32"), (200, "pow2")])
def test_the_two_quantisations(rows, scale_format):
    """quantize_both and the transposed weight hold numerics' codes, contiguous where the kernels want them."""
    x, recipe = torch.randn(rows, 136).bfloat16(), Recipe(scale_format=scale_format)
    along, across = scaled_mm.quantize_both(x, recipe)
    for found, matrix in ((along, x), (across, x.t().contiguous())):
        expected = quantize(matrix, (1, 128), scale_format=scale_format)
        assert found.data.is_contiguous()
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale_inv, expected.scale_inv)
    weight = scaled_mm.weight_operand(x, recipe, transposed=True)
    assert torch.equal(weight.dequantize(), scaled_mm.weight_operand(x, recipe).dequantize().t())
