"""A tiny exact model to look for causes in, and the tokens it forwards."""

import torch
import transformers

from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.tools.mismatch.causes import to_codes
from verl_fp8.trainer.exact import make_exact

RECIPE = Recipe(weight_block=(64, 64), activation_block=(1, 64), gradient_block=(1, 64))
IDS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
# One ulp of a scale flips a bf16 rounding about once in 10^5 values.
MANY = torch.randint(0, 64, (16, 64), generator=torch.Generator().manual_seed(2))
START = 4


def model(*, fp8: bool):
    """A Qwen3 of two layers, exact; with FP8 codes or without."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    built = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():  # logits and norm weights as different as a trained model's
        built.lm_head.weight.mul_(20)
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    linears = {n: m for n, m in built.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    codes = {n: quantize(m.weight.detach(), RECIPE.weight_block) for n, m in linears.items()}
    make_exact(built)
    if fp8:
        to_codes(built, codes, RECIPE)
    return built
