"""Whole command lines judged for machines that are not here: what Hopper and Blackwell would run or refuse."""

import pytest

from tests.driver import compose
from verl_fp8.errors import ConfigError
from verl_fp8.hooks.targets import Fp8RolloutConfig
from verl_fp8.rules.refuse import get
from verl_fp8.rules.run import prepare
from verl_fp8.switches.hardware import Hardware, assume
from verl_fp8.tools.check import check_command

HOPPER = Hardware((9, 0), (13, 0), "2.20.2")
BLACKWELL = Hardware((10, 0), (13, 0), "2.20.2")
ENV = "ray_kwargs.ray_init.runtime_env.env_vars"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def judged(hardware, tiny_model, *overrides):
    """(the configuration, the summary) of a run on that machine."""
    config = compose("+fp8=unified", f"actor_rollout_ref.model.path={tiny_model}", *overrides)
    with assume(hardware):
        return config, prepare(config)


@pytest.mark.parametrize(
    ("hardware", "overrides", "backend", "kernel", "scale_format", "variables"),
    [
        (HOPPER, (), "te", "torch", "fp32", {"VLLM_USE_DEEP_GEMM": "0"}),
        (HOPPER, ("fp8.recipe.scale_format=pow2",), "te", "deep_gemm", "pow2", {"VLLM_USE_DEEP_GEMM_E8M0": "1"}),
        (
            HOPPER,
            ("fp8.backend=torch", "fp8.rollout_kernel=cutlass"),
            "torch",
            "cutlass",
            "fp32",
            {"VLLM_USE_DEEP_GEMM": "0"},
        ),
        (HOPPER, ("fp8.rollout_kernel=deep_gemm",), "te", "deep_gemm", "fp32", {"VLLM_USE_DEEP_GEMM_E8M0": "0"}),
        (BLACKWELL, (), "te", "deep_gemm", "pow2", {"VLLM_USE_DEEP_GEMM_E8M0": "1"}),
        (BLACKWELL, ("fp8.rollout_kernel=cutlass",), "te", "cutlass", "pow2", {"VLLM_USE_DEEP_GEMM": "0"}),
    ],
)
def test_what_runs(tiny_model, hardware, overrides, backend, kernel, scale_format, variables):
    """Backend, kernel, scales, and vLLM's environment for every Ray worker, in verl's own runtime_env."""
    config, summary = judged(hardware, tiny_model, *overrides)
    assert (summary.backend, summary.kernel, summary.fp8.recipe.scale_format) == (backend, kernel, scale_format)
    found = get(config, ENV)
    assert {name: found[name] for name in variables} == variables
    assert found["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"


def test_the_rollout_configuration_pins_the_kernels(tiny_model):
    """What verl hands to vLLM: the kernel, the MoE backend, and both fusion passes off."""
    config, _ = judged(HOPPER, tiny_model)
    node = {k: v for k, v in config.actor_rollout_ref.rollout.items() if k != "_target_"}
    with assume(HOPPER):
        arguments = Fp8RolloutConfig(**node).engine_kwargs["vllm"]
    assert (arguments["linear_backend"], arguments["moe_backend"]) == ("torch", "triton")
    assert arguments["compilation_config"]["pass_config"] == {"fuse_norm_quant": False, "fuse_act_quant": False}


@pytest.mark.parametrize(
    ("hardware", "overrides", "named"),
    [
        (BLACKWELL, ("fp8.recipe.scale_format=fp32",), "fp8.recipe.scale_format=pow2"),
        (BLACKWELL, ("fp8.backend=torch",), "fp8.backend=te"),
        (BLACKWELL, ("fp8.rollout_kernel=torch",), "fp8.rollout_kernel=deep_gemm"),
        (Hardware((8, 9), (13, 0), "2.20.2"), (), "Hopper"),
        (Hardware((9, 0), (12, 8), "2.20.2"), (), "CUDA 12.9"),
        (Hardware((9, 0), (13, 0), None), (), "fp8.backend=torch"),
        (HOPPER, ("fp8.recipe.weight_block=[64,64]",), "fp8.recipe.weight_block=[128,128]"),
        (HOPPER, (f"+{VLLM}.linear_backend=marlin",), f"{VLLM}.linear_backend"),
        (HOPPER, (f"+{VLLM}.moe_backend=flashinfer_cutlass",), f"{VLLM}.moe_backend"),
        (HOPPER, (f"+{VLLM}.kernel_config.moe_backend=marlin",), f"{VLLM}.kernel_config.moe_backend"),
        (HOPPER, (f"+{VLLM}.compilation_config=fast",), f"{VLLM}.compilation_config"),
        (HOPPER, (f"+{VLLM}.compilation_config.pass_config.fuse_act_quant=true",), "fuse_act_quant"),
        (HOPPER, (f"+{ENV}.VLLM_USE_DEEP_GEMM=1",), f"{ENV}.VLLM_USE_DEEP_GEMM"),
    ],
)
def test_what_is_refused(tiny_model, hardware, overrides, named):
    """Before Ray starts, naming the key or the package that resolves it."""
    with pytest.raises(ConfigError) as refusal:
        judged(hardware, tiny_model, *overrides)
    assert named in str(refusal.value)


def test_a_driver_without_a_gpu_does_not_judge_its_workers(tiny_model):
    """trainer.device=cuda on a machine without one: nothing is resolved, and no variable set, for unseen GPUs."""
    config, summary = judged(Hardware(), tiny_model, "trainer.device=cuda", "fp8.backend=te")
    assert (summary.backend, summary.kernel) == (None, None)
    assert get(config, ENV) is None
    with pytest.raises(ConfigError, match=r"fp8\.backend=reference"):
        judged(Hardware(), tiny_model, "fp8.backend=te")


def test_check_says_what_another_machine_would_run(root, tiny_model, capsys):
    """verl-fp8 check --capability: exit code 0 and the resolved choices, or 2 and the refusal."""
    words = [
        "--config-dir",
        str(root / "recipes"),
        "--config-name",
        "quickstart",
        "+fp8=unified",
        f"actor_rollout_ref.model.path={tiny_model}",
    ]
    assert check_command(["--capability", "9.0", *words]) == 0
    assert (
        "compute capability 9.0, CUDA 13.0, TransformerEngine 2.20.2: trainer te, vLLM kernel torch"
        in capsys.readouterr().out
    )
    assert check_command(["--capability", "10.0", "--transformer-engine", "none", *words]) == 2
    assert "TransformerEngine is not installed" in capsys.readouterr().err
