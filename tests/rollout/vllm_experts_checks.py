"""What tests/rollout/test_linear_gpu.py asserts about vLLM's mixture-of-experts layers on a GPU; run by
vllm_checks.py."""

import ast
import contextlib
import inspect
import itertools
import os
import textwrap
import types

import torch
from vllm_checks import HOPPER, node

from verl_fp8.errors import ContractError
from verl_fp8.numerics import quantize
from verl_fp8.rollout.serving import SERVED, serve
from verl_fp8.switches.hardware import assume
from verl_fp8.switches.settings import Fp8Settings


@contextlib.contextmanager
def serving(**fp8):
    """A worker on a Hopper GPU that runs a model of these settings."""
    before, environ = set(SERVED), dict(os.environ)
    SERVED.clear()
    try:
        with assume(HOPPER):
            serve(Fp8Settings.parse(node(**fp8)))
            yield
    finally:
        SERVED.clear()
        SERVED.update(before)
        os.environ.clear()
        os.environ.update(environ)


def same(found, expected, outer=0):
    """Codes, scales and the scales' stride along rows."""
    codes, scale = found
    assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scale, expected.scale_inv)
    assert scale.stride() == ((1, outer) if outer else (scale.shape[1], 1))


def check_experts_quantize_by_the_recipe():
    """Every quantiser of TritonExperts and DeepGemmExperts gives numerics/quantize.py's bits: before the first product,
    and with the activation between the two, which is the trainer's."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import utils
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    fp8 = torch.float8_e4m3fn
    x = torch.randn(256, 512, dtype=torch.bfloat16) * torch.logspace(-14, 3, 256)[:, None].bfloat16()
    gate, up = x.chunk(2, dim=-1)
    between = torch.nn.functional.silu(gate) * up
    saved = getattr(DeepGemmQuantScaleFMT, "_oracle_cache", None)
    DeepGemmQuantScaleFMT._oracle_cache = DeepGemmQuantScaleFMT.FLOAT32
    for scale_format, eps in itertools.product(("fp32", "pow2"), (0.0, 1e-3)):
        options = {"scale_format": scale_format, "eps": eps}
        first, second = (quantize.quantize(t, (1, 128), **options) for t in (x, between))
        with serving(**options):
            same(utils.moe_kernel_quantize_input(x, None, fp8, False, [128, 128]), first)
            same(_custom_ops.silu_and_mul_per_block_quant(x, group_size=128, quant_dtype=fp8), second)
            out = torch.empty(256, 256, dtype=fp8)
            this = types.SimpleNamespace(
                _ACT_BLOCK_K=128, block_shape=[128, 128], gemm1_clamp_limit=None, gemm1_alpha=1.0, gemm1_beta=0.0,
                adjust_N_for_activation=lambda n, activation: n // 2,
            )  # fmt: skip
            same(deep_gemm_moe.DeepGemmExperts._act_mul_quant(this, x, out, MoEActivation.SILU), second, outer=256)
            same((out, second.scale_inv), second)
            same(deep_gemm_moe.per_token_group_quant_fp8(x[:5], 128, column_major_scales=True, tma_aligned_scales=True),
                 quantize.quantize(x[:5], (1, 128), **options), outer=8)  # fmt: skip
    DeepGemmQuantScaleFMT._oracle_cache = saved


def check_experts_quantize_nowhere_else():
    """What the two classes call to quantise are the functions wrapped, and packed kernels that Hopper does not
    reach."""
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe, triton_moe
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, backend_to_kernel_cls

    from verl_fp8.rollout.experts_gpu import EXPERTS_WITH_OUR_QUANTISER, check_experts

    packed = {"per_token_group_quant_fp8_packed_for_deepgemm", "fused_silu_mul_fp8_quant_packed"}
    for cls, wrapped in (
        (triton_moe.TritonExperts, {"moe_kernel_quantize_input", "silu_and_mul_per_block_quant"}),
        (
            deep_gemm_moe.DeepGemmExperts,
            {"_act_mul_quant", "per_token_group_quant_fp8", "silu_mul_per_token_group_quant_fp8_colmajor"},
        ),
    ):
        calls = [
            n.func for n in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))) if isinstance(n, ast.Call)
        ]
        names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
        assert wrapped <= {n for n in names if "quant" in n} <= wrapped | packed, names
    chosen = [cls.__name__ for b in ("TRITON", "DEEPGEMM") for cls in backend_to_kernel_cls(Fp8MoeBackend[b])]
    assert chosen == list(EXPERTS_WITH_OUR_QUANTISER)
    try:
        check_experts(object(), "model.layers.0.mlp.experts")
    except ContractError as error:
        assert "TritonExperts" in str(error) and "model.layers.0.mlp.experts" in str(error)
    else:
        raise AssertionError("no refusal")


def check_experts_without_the_switch():
    """A process that serves no fp8 node reaches vLLM's own kernel; other groups and activations are refused with the
    node."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import utils
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe

    x = torch.randn(4, 256, dtype=torch.bfloat16)
    SERVED.clear()
    for call in (
        lambda: utils.per_token_group_quant_fp8(x, 128),
        lambda: _custom_ops.silu_and_mul_per_block_quant(x, 128, torch.float8_e4m3fn),
    ):
        try:
            call()
        except Exception as error:
            assert not isinstance(error, ContractError)  # no such kernel on a CPU
        else:
            raise AssertionError("not vLLM's kernel")
    with serving():
        for call in (
            lambda: utils.per_token_group_quant_fp8(x, 64),
            lambda: deep_gemm_moe.silu_mul_per_token_group_quant_fp8_colmajor(x, alpha=1.702),
        ):
            try:
                call()
            except ContractError:
                continue
            raise AssertionError("no refusal")


def check_the_worker_sets_its_environment():
    """Where the driver could not: unset variables get the recipe's values before the model is built, others are kept
    and judged."""
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    for scale_format, wanted in (("fp32", "0"), ("pow2", "1"), ("auto", "0")):
        with serving(rollout_kernel="deep_gemm", scale_format=scale_format):
            assert os.environ[name] == wanted and os.environ["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"
    os.environ[name] = "1"
    try:
        with serving(rollout_kernel="deep_gemm", scale_format="fp32", eps=0.0):
            raise AssertionError("no refusal")
    except ContractError as error:
        assert f"{name}=0" in str(error)
    finally:
        del os.environ[name]
