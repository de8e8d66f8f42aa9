"""Mixture of experts: the GPU backends' fused experts against the reference, their time, and vLLM's quantisers of
experts."""

import copy

import common
import torch
from common import DEVICE, Skip, differing, milliseconds, need, need_gpu, outliers, randn, relative
from torch import nn

from verl_fp8.numerics.quantize import QuantizedTensor, quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import BACKENDS
from verl_fp8.trainer.experts import IMPLEMENTATION


def experts(hidden: int, width: int, number: int, implementation: str = "grouped_mm") -> nn.Module:
    """The experts of a Qwen3-MoE layer in bf16; the same weights on every machine."""
    need("transformers")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=width, num_experts=number)
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed, scale=0.02))
    return module


def converted(plain: nn.Module, backend: str, recipe: Recipe) -> nn.Module:
    """A copy in FP8."""
    module = copy.deepcopy(plain)
    BACKENDS[backend].experts(module, recipe)
    assert module.config._experts_implementation == IMPLEMENTATION
    return module


def routing(tokens: int, number: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen experts, weights): the last expert gets no token, the one before it a single one."""
    generator = torch.Generator().manual_seed(4)
    index = torch.stack([torch.randperm(number - 2, generator=generator)[:k] for _ in range(tokens)])
    index[0, 0] = number - 2
    return index.to(DEVICE), torch.rand(index.shape, generator=generator).bfloat16().to(DEVICE)


def gradients(module: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of input and both parameters."""
    leaf = x.clone().requires_grad_()
    y = module(leaf, index, weights)
    y.float().square().mean().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def against_the_reference(values: dict) -> None:
    """FP8 experts on te and torch: output and gradients against the reference, every recipe; an expert without tokens,
    one token."""
    need_gpu()
    backends = [b for b in common.backends() if b != "reference"]
    if not backends:
        raise Skip("neither TransformerEngine nor a Hopper GPU")
    plain = experts(1024, 768, 16)
    index, weights = routing(777, 16, 4)
    x = randn(777, 1024, seed=6)
    for scale_format in common.formats():
        for backward in ("fp8", "high_precision", "dequantized"):
            recipe = Recipe(scale_format=scale_format, backward=backward)
            expected = gradients(converted(plain, "reference", recipe), x, index, weights)
            for backend in backends:
                found = gradients(converted(plain, backend, recipe), x, index, weights)
                errors = [relative(f, e) for f, e in zip(found, expected, strict=True)]
                values[f"{backend}, {scale_format}, {backward}: y, dx, dW gate and up, dW down"] = " ".join(
                    f"{e:.1e}" for e in errors
                )
                # As in checks._backend: the second projection quantises a slightly different input.
                assert max(errors) < 3.7e-2, (backend, errors)
                assert not found[2][-1].any() and not found[3][-1].any()
    one = gradients(
        converted(plain, backends[0], Recipe(scale_format=common.formats()[0])), x[:1], index[:1], weights[:1]
    )
    assert all(t.isfinite().all() for t in one)


def speed(values: dict) -> None:
    """Time of Qwen3-30B-A3B's experts of one layer, forward and backward, 4096 tokens: te, torch, and transformers'
    bf16 grouped_mm."""
    need_gpu()
    plain = experts(2048, 768, 128)
    index, weights = routing(4096, 128, 8)
    x = randn(4096, 2048, seed=6)
    recipe = Recipe(scale_format=common.formats()[0])
    candidates = {"bf16": plain} | {b: converted(plain, b, recipe) for b in common.backends() if b != "reference"}
    for name, module in candidates.items():
        values[f"{name}: milliseconds"] = milliseconds(lambda m=module: gradients(m, x, index, weights), repeats=5)
        common.release()


def vllm_quantizers(values: dict) -> None:
    """vLLM's quantisers of experts, as verl_fp8 wraps them: codes and scales are our reference's."""
    need_gpu()
    need("vllm")
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import utils

    from verl_fp8.rollout import linear_gpu, serving
    from verl_fp8.switches.settings import Fp8Settings

    linear_gpu.install_linear_gpu()
    for scale_format in common.formats():
        serving.SERVED.clear()
        serving.serve(Fp8Settings.parse({"mode": "unified", "recipe": {"scale_format": scale_format}}))
        for name, x in (("normal", randn(512, 2048)), ("outliers", outliers(512, 2048))):
            gate, up = x.chunk(2, dim=-1)
            for what, found, source in (
                ("tokens", utils.moe_kernel_quantize_input(x, None, torch.float8_e4m3fn, False, [128, 128]), x),
                (
                    "between",
                    _custom_ops.silu_and_mul_per_block_quant(x, 128, torch.float8_e4m3fn),
                    nn.functional.silu(gate) * up,
                ),
            ):
                expected = quantize(source.cpu(), (1, 128), scale_format=scale_format, check_finite=False)
                bad = differing(QuantizedTensor(*found, (1, 128)), expected)
                values[f"{name}, {scale_format}, {what}: codes, scales that differ"] = bad
                assert not any(bad), (name, scale_format, what, bad)
    serving.SERVED.clear()


PARTS = {"experts": against_the_reference, "experts speed": speed, "vllm experts codes": vllm_quantizers}
