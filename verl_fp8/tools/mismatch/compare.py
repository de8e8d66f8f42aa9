"""The prompts, and how far two forwards of the same tokens are apart."""

from typing import Any

import torch

QUESTIONS = (
    "What is 3 + 4?",
    "Name a colour of the sky.",
    "How many days has a week?",
    "Write a short sentence about rivers.",
    "Is 17 a prime number?",
    "Translate 'good morning' into French.",
    "Count from one to nine.",
    "What do bees make?",
)


def prompts_of(tokenizer: Any, *, template: bool = True) -> list[list[int]]:
    """Token ids of a few short questions.

    Args:
        tokenizer: of the model.
        template: ask through the model's own chat template, where it has one.
    """
    found = []
    for question in QUESTIONS:
        text = question
        if template and tokenizer.chat_template:
            message = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def log_prob_difference(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """How far two sets of log-probs of the same tokens are apart.

    Returns:
        ``mean`` and ``max`` of |found - expected|, and ``k3`` = mean(r - 1 - log r) with r = e^(found - expected).
        k3 is the estimator that verl logs as ``rollout_corr/k3_kl``; ``expected`` is the side that sampled.
    """
    difference = (found - expected).double()
    return {
        "mean": float(difference.abs().mean()),
        "max": float(difference.abs().max()),
        "k3": float((difference.exp() - 1 - difference).mean()),
    }


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, Frobenius norms in float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
