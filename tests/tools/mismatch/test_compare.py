"""The prompts, and the differences of two forwards."""

import pytest
import torch

from verl_fp8.tools.mismatch.compare import log_prob_difference, prompts_of, relative_difference


def test_differences_follow_their_formulas():
    """k3 = mean(r - 1 - log r), the relative difference in float64, zero for equal tensors."""
    a, b = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -2.0]).double()
    found = log_prob_difference(a, b)
    assert found["max"] == 0.5 and found["k3"] == pytest.approx((torch.tensor(0.5).double().exp() - 1.5).item() / 2)
    assert relative_difference(a, a) == 0 and relative_difference(torch.zeros(2), torch.zeros(2)) == 0


def test_the_prompts_are_the_models_own(tiny_model):
    """Through its chat template, ids of its vocabulary."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    prompts = prompts_of(tokenizer)
    assert len(prompts) == 8 and all(0 <= i < len(tokenizer) for p in prompts for i in p)
    assert all(len(p) > len(q) for p, q in zip(prompts, prompts_of(tokenizer, template=False), strict=True))
