"""The ``torch`` backend without a Hopper GPU: its operands, and its autograd over an evaluation of scaled_mm's
documented meaning.

The kernels exist on compute capability 9.x only; tests/gpu runs them. Here :func:`evaluate` accepts exactly the layouts
that ATen/native/cuda/ScaledBlas.cpp accepts and multiplies in float64, torch's own meta kernel judges the same
arguments, and the result is compared bit for bit with the reference.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics import linear, scaled_mm
from verl_fp8.numerics.linear import Fp8LinearFunction
from verl_fp8.numerics.quantize import QuantizedTensor, quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer import scaled_mm as trainer
from verl_fp8.trainer.convert import BACKENDS, convert_linears
from verl_fp8.trainer.scaled_mm import Fp8ScaledMM

RECIPES = [
    Recipe(scale_format=s, backward=b) for s in ("fp32", "pow2") for b in ("fp8", "high_precision", "dequantized")
]


def ceil(size, unit=128):
    """Blocks that cover a size."""
    return -(-size // unit)


def evaluate(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, *, output_dtype=torch.bfloat16, use_fast_accum=False
):
    """torch.nn.functional.scaled_mm by its documentation: mm(a, b) with each operand times its decoding scales."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    assert mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    assert not use_fast_accum  # TransformerEngine's split accumulator
    # cuBLASLt: rows of 16 bytes, scale columns of 16 bytes.
    assert k % 16 == 0
    assert n % 16 == 0
    assert m % 4 == 0
    assert mat_a.stride() == (k, 1)
    assert mat_b.stride() == (1, k)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    # _scaled_block1x128_block1x128 and _scaled_block1x128_block128x128
    assert scale_recipe_a == ScalingType.BlockWise1x128
    assert scale_a.shape == (m, ceil(k))
    assert scale_a.stride() == (1, m)
    if scale_recipe_b == ScalingType.BlockWise1x128:
        assert scale_b.shape == (n, ceil(k))
        assert scale_b.stride() == (1, n)
        b = QuantizedTensor(mat_b.t(), scale_b, (1, 128))
    else:
        assert scale_recipe_b == ScalingType.BlockWise128x128
        padded = ceil(ceil(k), 4) * 4
        assert scale_b.shape == (padded, ceil(n))
        assert scale_b.stride() == (1, padded)
        b = QuantizedTensor(mat_b.t(), scale_b[: ceil(k)].t(), (128, 128))
    return linear.gemm(QuantizedTensor(mat_a, scale_a, (1, 128)), b, output_dtype, accumulate=torch.float64)


@pytest.fixture
def evaluated(monkeypatch):
    """scaled_mm by :func:`evaluate`, and float64 sums in the reference."""
    monkeypatch.setattr(nn.functional, "scaled_mm", evaluate)
    monkeypatch.setattr(linear, "matmul", lambda a, b, dtype: (a.double() @ b.double()).to(dtype))


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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scale_format}-{r.backward}")
@pytest.mark.parametrize(("tokens", "k", "n"), [(256, 256, 384), (37, 200, 144)])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_autograd_equals_the_reference(evaluated, recipe, tokens, k, n, wanted):
    """y, dx and dW of Fp8ScaledMM and of the reference function, to the bit, whichever of the gradients is wanted."""
    generator = torch.Generator().manual_seed(3)
    x, weight, dy = (torch.randn(*s, generator=generator).bfloat16() for s in ((tokens, k), (n, k), (tokens, n)))
    results = []
    for function in (Fp8LinearFunction, Fp8ScaledMM):
        leaves = [t.clone().requires_grad_(w) for t, w in zip((x, weight), wanted, strict=True)]
        y = function.apply(*leaves, recipe)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        # bf16 matmul against a float64 one of the same operands: half an ulp apart at most.
        exact = recipe.backward == "fp8" or expected is results[0][0]
        assert expected is None or (
            torch.equal(expected, found) if exact else torch.allclose(expected, found, rtol=2**-7, atol=1e-2)
        )


def test_no_tokens(evaluated):
    """A batch without tokens (an expert nobody chose) gives empty outputs and zero weight gradients."""
    x, weight = (
        torch.empty(0, 128, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(64, 128).bfloat16().requires_grad_(),
    )
    y = Fp8ScaledMM.apply(x, weight, Recipe())
    y.sum().backward()
    assert y.shape == (0, 64)
    assert x.grad.shape == (0, 128)
    assert not weight.grad.any()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scale_format}-{r.backward}")
def test_experts_equal_the_reference(evaluated, monkeypatch, recipe):
    """Fused experts, one of them with 40 tokens, one with one and one with none: y and every gradient, as above."""
    monkeypatch.setattr(trainer, "check_device", lambda x: None)
    generator = torch.Generator().manual_seed(5)
    index = torch.stack(
        [torch.zeros(40, dtype=torch.long), torch.tensor([1, *[3] * 37, 4, 4])], dim=1
    )  # 4: another rank's
    x, dy = (torch.randn(40, 72, generator=generator).bfloat16() for _ in range(2))
    weigh = torch.rand(40, 2, generator=generator).bfloat16()
    plain = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=72, moe_intermediate_size=128, num_experts=4)).bfloat16()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    results = []
    for backend in ("reference", "torch"):
        module, leaf = copy.deepcopy(plain), x.clone().requires_grad_()
        BACKENDS[backend].experts(module, recipe)
        y = module(leaf, index, weigh)
        y.backward(dy)
        results.append([y.detach(), leaf.grad, module.gate_up_proj.grad, module.down_proj.grad])
    for place, (expected, found) in enumerate(zip(*results, strict=True)):
        exact = recipe.backward == "fp8" or place == 0
        assert torch.equal(expected, found) if exact else torch.allclose(expected, found, rtol=2**-6, atol=2e-2), place


def test_conversion():
    """The same objects and keys; copies of block and pow2 scales are refused where the kernels cannot."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64, bias=False))
    parameters, keys, layers = [id(p) for p in model.parameters()], list(model.state_dict()), list(model)
    report = convert_linears(model, Recipe(), LayerFilter(), "torch")
    assert report.converted == ("0", "1")
    assert [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert all(a is b and isinstance(a, nn.Linear) for a, b in zip(model, layers, strict=True))
    with pytest.raises(ConfigError, match=r"fp8\.backend=reference"):
        model(torch.randn(2, 128))
    small = Recipe(weight_block=(64, 64), activation_block=(1, 64), gradient_block=(1, 64))
    with pytest.raises(ConfigError, match="weight_block"):
        convert_linears(nn.Sequential(nn.Linear(64, 64)), small, LayerFilter(), "torch")


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
