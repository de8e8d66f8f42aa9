"""What tests/rollout/test_linear_gpu.py asserts about one version of vLLM, on a machine without a GPU.

Run as a script: ``python vllm_checks.py MODEL [WHEEL_FOLDER]``, see tests/trainer/hosted.py; it runs the checks of
vllm_experts_checks.py too. Prints one JSON object, check -> "ok" or a traceback. vLLM is told that its platform is CUDA
only where it asks in order to choose a kernel; nothing here runs one.
"""

import contextlib
import inspect
import io
import itertools
import json
import os
import sys
import types

MODEL, *FOLDER = sys.argv[1:]
sys.path[:0] = FOLDER
os.environ |= {"VERL_PLATFORM": "", "VLLM_CPU_CI_ENV": "1"}

import torch

from verl_fp8.errors import ConfigError, ContractError
from verl_fp8.numerics import (
    linear,
    quantize,
)
from verl_fp8.rollout.arguments import fp8_arguments
from verl_fp8.rollout.environment import environment
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.switches.settings import NODE, settings_of

HOPPER, BLACKWELL = Hardware((9, 0), (13, 0)), Hardware((10, 0), (13, 0))


def node(**fp8):
    """An ``fp8`` node as Hydra composes it."""
    recipe = {k: fp8.pop(k) for k in ("scale_format", "eps") if k in fp8}
    return {"mode": "unified", **fp8, "recipe": recipe}


def arguments(hardware=HOPPER, kwargs=None, **fp8):
    """``engine_kwargs.vllm`` as the rollout's configuration class computes it."""
    with assume(hardware):
        return fp8_arguments(node(**fp8), {"path": MODEL}, kwargs or {})


@contextlib.contextmanager
def building(hardware=HOPPER, linear_backend="auto", additional_config=None):
    """vLLM's context while it builds a model."""
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.vllm import get_cached_compilation_config

    config = VllmConfig(
        kernel_config=KernelConfig(linear_backend=linear_backend), additional_config=additional_config or {}
    )
    # Only what the kernels ask of a model: its dtype and its type.
    hf = types.SimpleNamespace(model_type="qwen3")
    config.model_config = types.SimpleNamespace(dtype=torch.bfloat16, hf_text_config=hf, hf_config=hf)
    get_cached_compilation_config.cache_clear()
    with assume(hardware), set_current_vllm_config(config):
        yield config


def quantizer(**kwargs):
    """vLLM's activation quantiser as its block kernels construct it."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    return QuantFP8(static=False, group_shape=GroupShape(1, 128), **kwargs)


def check_quantizer_is_ours():
    """Bit-equal to numerics/quantize.py in both formats, with eps, in the scale layouts of CUTLASS, DeepGEMM and
    Triton; ragged K too."""
    layouts = ({}, {"column_major_scales": True}, {"column_major_scales": True, "tma_aligned_scales": True})
    cases = itertools.product((HOPPER,), ("fp32", "pow2"), (0.0, 1e-3), layouts, (False, True))
    for hardware, scale_format, eps, layout, ue8m0 in cases:
        with building(hardware, additional_config={NODE: node(scale_format=scale_format, eps=eps)}):
            quant = quantizer(use_ue8m0=ue8m0, **layout)
        for shape in ((5, 384), (128, 256), (3, 200)):
            x = torch.randn(shape, dtype=torch.bfloat16)
            codes, scale = quant(x)
            expected = quantize.quantize(x, (1, 128), scale_format=scale_format, eps=eps)
            assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(scale, expected.scale_inv)
            rows, blocks = scale.shape
            aligned = -(-rows // 4) * 4 if layout.get("tma_aligned_scales") else rows
            assert scale.stride() == ((1, aligned) if layout else (blocks, 1)), (scale.stride(), layout)


def check_quantizer_without_the_switch():
    """A vLLM without the fp8 node keeps its own quantiser, under its own name."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    with building():
        quant = quantizer()
    assert quant._forward_method.__func__.__name__ != "unified"
    assert type(quant).name == QuantFP8.name == "quant_fp8"


def check_quantizer_keeps_other_schemes():
    """Per-token and static quantisation stay vLLM's (attention, MoE and other layers use them)."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with building(additional_config={NODE: node()}):
        for static, shape in ((False, GroupShape.PER_TOKEN), (True, GroupShape.PER_TENSOR)):
            quant = QuantFP8(static=static, group_shape=shape)
            assert getattr(quant._forward_method, "__func__", None) is not type(quant).unified


def check_compiles():
    """Under torch.compile with full graphs and dynamic tokens the quantiser is one opaque node, and its bits do not
    change."""
    with building(additional_config={NODE: node()}):
        quant = quantizer(column_major_scales=True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(lambda x: quant(x * 2), backend=backend, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        x = torch.randn(rows, 256, dtype=torch.bfloat16)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(step(x), quant(x * 2), strict=True))
    assert any("verl_fp8.quantize_rows" in str(n.target) for n in graphs[0].graph.nodes)


def select(hardware, linear_backend, **fp8):
    """The kernel class vLLM chooses for a block-FP8 linear on this GPU."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key
    from vllm.platforms import PlatformEnum, current_platform

    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128)),
        activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128)),
        weight_shape=(1024, 1024), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
    )  # fmt: skip
    table = {current_platform._enum: linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]}
    choose = linear.choose_scaled_mm_linear_kernel
    arguments = {"quantization": "fp8_block_w8a8"} if "quantization" in inspect.signature(choose).parameters else {}
    platform = type(current_platform)
    saved = platform.is_cuda
    platform.is_cuda = lambda self: True
    try:
        with building(hardware, linear_backend, {NODE: node(**fp8)} if fp8 else None):
            chosen = choose(config, table, 10 * hardware.capability[0], **arguments)
            return chosen, chosen(config)
    finally:
        platform.is_cuda = saved


def check_torch_kernel_is_chosen():
    """linear_backend=torch gives our kernel on Hopper, with the recipe; without the fp8 node, or on Blackwell,
    never."""
    chosen, kernel = select(HOPPER, "torch", scale_format="fp32", eps=1e-5)
    assert chosen.__name__ == "UnifiedScaledMMKernel"
    assert (kernel.recipe.scale_format, kernel.recipe.eps) == ("fp32", 1e-5)
    for hardware, fp8 in ((HOPPER, {}), (BLACKWELL, {"scale_format": "pow2"})):
        try:
            chosen, _ = select(hardware, "torch", **fp8)
        except ValueError as error:
            assert "UnifiedScaledMMKernel" in str(error)
        else:
            assert chosen.__name__ != "UnifiedScaledMMKernel"


def check_torch_kernel_computes():
    """The kernel's product is scaled_mm of our codes with the loaded ones, bias added after; the layer stays as
    loaded."""
    from verl_fp8.numerics import scaled_mm

    _, kernel = select(HOPPER, "torch", scale_format="fp32")
    weight = quantize.quantize(torch.randn(256, 384, dtype=torch.bfloat16), (128, 128))
    layer = types.SimpleNamespace(weight=weight.data, weight_scale_inv=weight.scale_inv)
    kernel.process_weights_after_loading(layer)
    assert layer.weight is weight.data
    asked = []

    def gemm(a, b, dtype):
        asked.append(b.data.data_ptr())
        return linear.gemm(a, b, dtype)

    saved, scaled_mm.gemm = scaled_mm.gemm, gemm
    try:
        x, bias = torch.randn(2, 3, 384, dtype=torch.bfloat16), torch.randn(256, dtype=torch.bfloat16)
        y = kernel.apply_weights(layer, x, bias)
    finally:
        scaled_mm.gemm = saved
    expected = linear.gemm(quantize.quantize(x.reshape(6, 384), (1, 128)), weight, torch.bfloat16) + bias
    assert torch.equal(y, expected.reshape(2, 3, 256))
    assert asked == [weight.data.data_ptr()]


def check_requantisation_is_skipped():
    """Weights with power-of-two scales pass DeepGEMM's post-processing byte for byte; others are requantised as
    ever."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    with building(additional_config={NODE: node(scale_format="pow2")}):
        quantizer()
    small = torch.randn(256, 256, dtype=torch.bfloat16) * 1e-6  # below the floor of DeepGEMM's cast
    for scale_format, changes in (("pow2", False), ("fp32", True)):
        q = quantize.quantize(small, (128, 128), scale_format=scale_format)
        before = q.data.clone(), q.scale_inv.clone()
        fp8_utils.requant_weight_ue8m0_inplace(q.data, q.scale_inv, block_size=(128, 128))
        same = torch.equal(before[0].view(torch.uint8), q.data.view(torch.uint8)) and torch.equal(
            before[1], q.scale_inv
        )
        assert same != changes, scale_format


def check_arguments_are_accepted():
    """vLLM's own argument classes take what we set, and its configuration holds it: kernel, fusions, quantisation, the
    node."""
    from vllm.engine.arg_utils import EngineArgs

    for hardware, fp8, kernel in (
        (HOPPER, {}, "torch"),
        (HOPPER, {"scale_format": "pow2"}, "deep_gemm"),
        (HOPPER, {"rollout_kernel": "cutlass"}, "cutlass"),
        (HOPPER, {"rollout_kernel": "deep_gemm"}, "deep_gemm"),
        (BLACKWELL, {}, "deep_gemm"),
    ):
        kwargs = arguments(hardware, {"compilation_config": json.dumps({"cudagraph_mode": "NONE"})}, **fp8)
        del kwargs["worker_extension_cls"]
        config = EngineArgs(
            model=MODEL, quantization="fp8", dtype="bfloat16", enforce_eager=True, max_model_len=64, **kwargs
        ).create_engine_config()
        assert config.kernel_config.linear_backend == kernel
        assert config.kernel_config.moe_backend == ("deep_gemm" if kernel == "deep_gemm" else "triton")
        assert config.compilation_config.pass_config.fuse_norm_quant is False
        assert config.compilation_config.pass_config.fuse_act_quant is False
        assert config.quant_config.weight_block_size == [128, 128]
        assert config.quant_config.ignored_layers == ["lm_head"]
        with assume(hardware):
            assert settings_of(config).recipe.scale_format == (
                "fp32" if fp8.get("scale_format") != "pow2" and hardware is HOPPER else "pow2"
            )


def check_ignored_layers_are_exact():
    """vLLM's matcher takes our exact names: the named layer and its fused shards, no prefix of another."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    shards = [f"model.layers.1.self_attn.{p}_proj" for p in "qkv"]
    for name, ignored, skipped in (
        ("lm_head", ["lm_head"], True),
        ("model.layers.1.mlp.down_proj", ["model.layers.1.mlp.down_proj"], True),
        ("model.layers.11.mlp.down_proj", ["model.layers.1.mlp.down_proj"], False),
        ("model.layers.1.mlp.gate_up_proj", ["model.layers.1.mlp.gate"], False),
        ("model.layers.1.self_attn.qkv_proj", shards, True),
        ("model.layers.11.self_attn.qkv_proj", shards, False),
    ):
        assert is_layer_skipped(name, ignored, fused) is skipped, (name, ignored)


def check_contradictions():
    """The user's own vLLM arguments against the pins are refused, naming the key; the environment of a deep_gemm run
    too."""
    for kwargs, key in (
        ({"linear_backend": "marlin"}, "linear_backend"),
        ({"moe_backend": "cutlass"}, "moe_backend"),
        ({"compilation_config": {"pass_config": {"fuse_norm_quant": True}}}, "fuse_norm_quant"),
    ):
        try:
            arguments(HOPPER, kwargs)
        except ConfigError as error:
            assert key in str(error)
        else:
            raise AssertionError(key)
    os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "1"
    try:
        with building(additional_config={NODE: node(rollout_kernel="deep_gemm", scale_format="fp32")}):
            quantizer()
    except ContractError as error:
        assert "VLLM_USE_DEEP_GEMM_E8M0=0" in str(error)
    else:
        raise AssertionError("no refusal")
    finally:
        del os.environ["VLLM_USE_DEEP_GEMM_E8M0"]


def check_environment():
    """The variables are vLLM's, by name."""
    from vllm import envs

    for fp8 in ({}, {"rollout_kernel": "deep_gemm"}, {"scale_format": "pow2"}):
        with assume(HOPPER):
            from verl_fp8.switches.settings import Fp8Settings

            for name in environment(Fp8Settings.parse(node(**fp8)), HOPPER):
                assert name in envs.environment_variables, name


def check_installing_twice():
    """A second registration changes nothing."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from verl_fp8.rollout import linear_gpu

    table = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    before = list(table), op_registry_oot["QuantFP8"]
    linear_gpu.install_linear_gpu()
    assert (list(table), op_registry_oot["QuantFP8"]) == before


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        import hosted
        import vllm

        from verl_fp8.rollout import linear_gpu

        linear_gpu.install_linear_gpu()
        sys.modules["vllm_checks"] = sys.modules["__main__"]
        import vllm_experts_checks

        found = hosted.run(globals(), vars(vllm_experts_checks))
    print(json.dumps({"version": vllm.__version__, **found}))
