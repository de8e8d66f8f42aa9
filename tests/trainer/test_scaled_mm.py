"""The ``torch`` backend without a Hopper GPU: its autograd and its experts give the reference's bits."""

import copy

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.numerics.evaluated import evaluate_scaled_mm
from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.linear import Fp8LinearFunction
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer import scaled_mm as trainer
from verl_fp8.trainer.convert import BACKENDS, convert_linears
from verl_fp8.trainer.scaled_mm import Fp8ScaledMM

RECIPES = [
    Recipe(scale_format=s, backward=b) for s in ("fp32", "pow2") for b in ("fp8", "high_precision", "dequantized")
]


@pytest.fixture
def evaluated(monkeypatch):
    """scaled_mm evaluated, and float64 sums in the reference."""
    evaluate_scaled_mm(monkeypatch)


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
