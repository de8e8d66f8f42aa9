"""The reference GEMM and the linear layer's forward and backward over it: which codes are multiplied, and one
rounding."""

import pytest
import torch

from verl_fp8.numerics.linear import Fp8LinearFunction, fp8_linear_forward, gemm
from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import Recipe

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(tokens=24, k=80, n=40, dtype=torch.bfloat16):
    """x, weight and dy with ragged blocks and rows of very different size."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, k, generator=g) * torch.logspace(-3, 2, tokens)[:, None]
    w = torch.randn(n, k, generator=g) * 0.05
    dy = torch.randn(tokens, n, generator=g) * torch.logspace(-6, 0, n)
    return x.to(dtype), w.to(dtype), dy.to(dtype)


def recipe(**values):
    """A recipe with 32-wide blocks."""
    return Recipe(weight_block=(32, 32), activation_block=(1, 32), gradient_block=(1, 32), **values)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(scale_format, dtype):
    """y = deq(Q(x)) @ deq(Q(W)).T, rounded once to x's dtype; leading dimensions are tokens."""
    x, w, _ = operands(dtype=dtype)
    r = recipe(scale_format=scale_format)
    w_q = quantize(w, (32, 32), scale_format=scale_format)
    x_q = quantize(x, (1, 32), scale_format=scale_format)
    expected = (x_q.dequantize() @ w_q.dequantize().t()).to(dtype)
    assert torch.equal(fp8_linear_forward(x, w_q, r), expected)
    assert torch.equal(fp8_linear_forward(x.reshape(2, 12, 80), w_q, r), expected.reshape(2, 12, 40))
    assert fp8_linear_forward(x[:0], w_q, r).shape == (0, 40)


def test_padding_tokens_change_nothing_in_float64():
    """Zero rows raise no amax, and in float64 the GEMM's shape does not reach the rounding."""
    x, w, _ = operands()
    w_q = quantize(w, (32, 32))
    padded = torch.cat([x, torch.zeros(104, 80, dtype=x.dtype)])
    y = fp8_linear_forward(padded, w_q, recipe(), accumulate=torch.float64)
    assert torch.equal(y[:24], fp8_linear_forward(x, w_q, recipe(), accumulate=torch.float64))
    assert not y[24:].any()


def test_gemm_in_float64():
    """float64 accumulation of the same float32 operands, rounded to the output dtype."""
    x, w, _ = operands()
    a, b = quantize(x, (1, 32)), quantize(w, (32, 32))
    expected = (a.dequantize().double() @ b.dequantize().double().t()).bfloat16()
    assert torch.equal(gemm(a, b, torch.bfloat16, accumulate=torch.float64), expected)


def test_gemm_ignores_reduced_precision():
    """Autocast and the TF32/bf16 switches of the process must not round the operands; both are left as found."""
    x, w, _ = operands(64, 512, 512)  # oneDNN has no bf16 kernel for small shapes
    a, b = quantize(x, (1, 32)), quantize(w, (32, 32))
    expected = gemm(a, b, torch.float32)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(gemm(a, b, torch.float32), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def gradients(x, w, dy, r):
    """y, dx, dW by autograd."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = Fp8LinearFunction.apply(x, w, r)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_fp8(scale_format, dtype):
    """dgrad on the forward's codes of W; wgrad on dy and x quantised along the tokens from the originals."""
    x, w, dy = operands(dtype=dtype)
    y, dx, dw = gradients(x, w, dy, recipe(scale_format=scale_format))

    def deq(t, block):
        return quantize(t, block, scale_format=scale_format).dequantize()

    assert torch.equal(y, (deq(x, (1, 32)) @ deq(w, (32, 32)).t()).to(dtype))
    assert torch.equal(dx, (deq(dy, (1, 32)) @ deq(w, (32, 32))).to(dtype))
    assert torch.equal(dw, (deq(dy, (32, 1)).t() @ deq(x, (32, 1))).to(dtype))
    # The blocks along the tokens are what TransformerEngine calls columnwise: 1x32 blocks of the transposed tensor.
    assert torch.equal(deq(dy, (32, 1)).t(), deq(dy.t().contiguous(), (1, 32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_high_precision(dtype):
    """The original operands, float32 sums, one rounding."""
    x, w, dy = operands(dtype=dtype)
    y, dx, dw = gradients(x, w, dy, recipe(backward="high_precision"))
    assert torch.equal(y, gradients(x, w, dy, recipe())[0])
    assert torch.equal(dx, (dy.float() @ w.float()).to(dtype))
    assert torch.equal(dw, (dy.float().t() @ x.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_dequantized(dtype):
    """The forward's codes, dequantised to the activation dtype; the gradient is not quantised."""
    x, w, dy = operands(dtype=dtype)
    y, dx, dw = gradients(x, w, dy, recipe(backward="dequantized"))
    x_deq, w_deq = quantize(x, (1, 32)).dequantize(dtype), quantize(w, (32, 32)).dequantize(dtype)
    assert torch.equal(y, gradients(x, w, dy, recipe())[0])
    assert torch.equal(dx, (dy.float() @ w_deq.float()).to(dtype))
    assert torch.equal(dw, (dy.float().t() @ x_deq.float()).to(dtype))


@pytest.mark.parametrize("backward", ["fp8", "high_precision", "dequantized"])
def test_backward_of_no_tokens_and_of_frozen_operands(backward):
    """No tokens give a zero weight gradient; what needs no gradient is neither saved nor computed."""
    x, w, dy = operands()
    r = recipe(backward=backward)
    _, dx, dw = gradients(x[:0], w, dy[:0], r)
    assert dx.shape == (0, 80)
    assert dw.shape == w.shape
    assert not dw.any()
    _, dx, dw = gradients(x, w, dy, r)
    leaf = x.clone().requires_grad_()
    y = Fp8LinearFunction.apply(leaf, w, r)
    assert y.grad_fn.saved_tensors[1] is None
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], dx)
    leaf = w.clone().requires_grad_()
    y = Fp8LinearFunction.apply(x, leaf, r)
    assert y.grad_fn.saved_tensors[0] is None
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], dw)


def test_backward_takes_expanded_gradients():
    """y.sum() hands back a gradient of stride 0."""
    x, w, _ = operands()
    leaf = x.clone().requires_grad_()
    Fp8LinearFunction.apply(leaf, w, recipe()).sum().backward()
    expected = gradients(x, w, torch.ones(24, 40, dtype=x.dtype), recipe())[1]
    assert torch.equal(leaf.grad, expected)
