"""vLLM's mixture-of-experts layers on a GPU: their activations quantised by the recipe.

vLLM's fused experts quantise outside ``QuantFP8``, by functions that their modules hold by name and that no registry
reaches: the tokens before the first product by ``per_token_group_quant_fp8``, what lies between the two products by a
kernel that fuses activation and quantiser. All of them divide by amax/448, with a floor on amax, and know no scale
format but DeepGEMM's; with fp32 scales 3e-4 of their codes are not the recipe's. Each is wrapped, in every vLLM
process, and acts only in one that serves the ``fp8`` node; a fused one becomes the trainer's activation, rounded to the
activation's dtype, and then the quantiser.

Two classes of vLLM's experts quantise by these functions only (:data:`EXPERTS_WITH_OUR_QUANTISER`, what
``moe_backend=triton`` and ``deep_gemm`` choose); the worker refuses any other before the first weight sync. DeepGEMM's
packed UE8M0 kernels (Blackwell) stay, as in :mod:`verl_fp8.rollout.linear_gpu`.
"""

import torch
import wrapt
from torch import nn

from verl_fp8.errors import ContractError
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.rollout.serving import serving
from verl_fp8.upstream.contract import require

EXPERTS_WITH_OUR_QUANTISER = ("TritonExperts", "TritonOrDeepGemmExperts")


def install_experts_gpu() -> None:
    """Idempotent: vLLM loads general plugins once a process but may call the function again."""
    require("rollout.experts_gpu")
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import utils
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe

    for module, name, ours in (
        (utils, "per_token_group_quant_fp8", _group_quant),
        (deep_gemm_moe, "per_token_group_quant_fp8", _group_quant),
        (deep_gemm_moe, "silu_mul_per_token_group_quant_fp8_colmajor", _silu_mul_column_major),
        (_custom_ops, "silu_and_mul_per_block_quant", _silu_mul),
    ):
        if not isinstance(getattr(module, name), wrapt.FunctionWrapper):
            wrapt.wrap_function_wrapper(module, name, _where_served(ours))


def check_experts(kernel: object, prefix: str) -> None:
    """Refuse experts whose quantiser is not replaced.

    Args:
        kernel: vLLM's object that computes the experts of the layer ``prefix``.

    Raises:
        ContractError: names its class.
    """
    found = type(kernel).__name__
    if found not in EXPERTS_WITH_OUR_QUANTISER:
        raise ContractError(
            f"FP8 experts quantised by the recipe at {prefix}",
            f"{found}, where verl_fp8 knows the quantisers of {', '.join(EXPERTS_WITH_OUR_QUANTISER)}",
            "set actor_rollout_ref.rollout.data_parallel_size=1 (all-to-all kernels), "
            "or keep the experts in bf16: fp8.recipe.exclude=['*.mlp.experts.*']",
        )


def _where_served(ours):
    def call(wrapped, instance, args, kwargs):
        recipe = serving()
        return wrapped(*args, **kwargs) if recipe is None else ours(recipe, *args, **kwargs)

    return call


def _group_quant(
    recipe: Recipe,
    x: torch.Tensor,
    group_size: int,
    eps: float = 0.0,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> codes [M, K] and float32 scales [M, K/128] in the layout asked for; floor and format are the
    recipe's."""
    if group_size != recipe.activation_block[1]:
        raise ContractError(
            f"activations of experts in groups of {recipe.activation_block[1]}",
            f"{group_size} from vLLM, which made the blocks smaller",
            "lower actor_rollout_ref.rollout.tensor_model_parallel_size, or set expert_parallel_size",
        )
    stride = x.shape[0] if column_major_scales else 0
    if column_major_scales and tma_aligned_scales:
        stride += -stride % 4  # DeepGEMM's get_tma_aligned_size: 16 bytes
    codes, scale_inv = torch.ops.verl_fp8.quantize_rows(x, group_size, recipe.scale_format, recipe.eps, stride)
    if out_q is not None:
        out_q.view(torch.uint8).copy_(codes.view(torch.uint8))
        codes = out_q
    return codes, scale_inv


def _silu_mul_column_major(
    recipe: Recipe,
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    eps: float = 0.0,
    clamp_limit: float | None = None,
    group_size: int = 128,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, 2K], gate before up -> codes and scales of silu(gate) * up, the scales column-major."""
    if (clamp_limit, alpha, beta) != (None, 1.0, 0.0):
        raise ContractError(
            "experts with the trainer's activation, SiLU",
            f"clamp_limit={clamp_limit}, alpha={alpha}, beta={beta} in vLLM",
            "keep the experts in bf16: fp8.recipe.exclude=['*.mlp.experts.*']",
        )
    return _group_quant(recipe, _activation(input), group_size, column_major_scales=True, out_q=output)


def _silu_mul(
    recipe: Recipe,
    input: torch.Tensor,
    group_size: int,
    quant_dtype: torch.dtype,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, 2K], gate before up -> codes and scales of silu(gate) * up."""
    return _group_quant(recipe, _activation(input), group_size, column_major_scales=is_scale_transposed)


def _activation(gate_up: torch.Tensor) -> torch.Tensor:
    # As transformers' experts compute it: both steps rounded.
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up
