"""How a token's experts are weighed and summed."""

import torch

from verl_fp8.numerics.experts import mix_experts


def test_the_sum_over_k_is_in_float32_and_in_order():
    """Eight experts a token, as Qwen3-30B-A3B: 1 + 7 * 2^-9 in bf16 steps of 2^-7 would stay 1 added one by one."""
    x, index = torch.zeros(1, 1, dtype=torch.bfloat16), torch.arange(8)[None]
    weights = torch.tensor([[1.0] + [2**-9] * 7], dtype=torch.bfloat16)
    y = mix_experts(x, index, weights, 8, lambda rows, counts: torch.ones_like(rows))
    assert y.item() == torch.tensor(1 + 7 * 2**-9).bfloat16().item() == 1 + 2**-6
