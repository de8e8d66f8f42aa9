"""What ``auto`` becomes, and what is refused, on every kind of machine."""

import os
import subprocess
import sys

import pytest

from verl_fp8.errors import ConfigError
from verl_fp8.numerics.recipe import WHOLE, Recipe
from verl_fp8.rollout.arguments import pin_gpu_kernels
from verl_fp8.rollout.environment import environment
from verl_fp8.switches.hardware import (
    Hardware,
    assume,
    probe,
    resolve_backend,
    resolve_rollout_kernel,
    resolve_scale_format,
)
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.tools.overrides import machine

CPU = Hardware()
AMPERE = Hardware((8, 0), (13, 0), "2.20.2")
ADA = Hardware((8, 9), (13, 0), "2.20.2")
HOPPER = Hardware((9, 0), (13, 0), "2.20.2")
OLD_CUDA = Hardware((9, 0), (12, 8), "2.20.2")
NO_CUDA = Hardware((9, 0), None, "2.20.2")
NO_TE = Hardware((9, 0), (12, 9), None)
OLD_TE = Hardware((9, 0), (13, 0), "2.17.1")
NEW_TE = Hardware((9, 0), (13, 0), "2.21.0")
BLACKWELL = Hardware((10, 0), (13, 0), "2.18.0+cu13")
BLACKWELL_NO_TE = Hardware((10, 3), (13, 0), None)
CONSUMER_BLACKWELL = Hardware((12, 0), (13, 0), "2.20.2")
FP32, POW2 = Recipe(), Recipe(scale_format="pow2")
SMALL = Recipe(weight_block=(64, 64), activation_block=(1, 64), gradient_block=(1, 64))


@pytest.mark.parametrize(
    ("requested", "capability", "resolved"),
    [
        ("auto", None, "fp32"),
        ("auto", (9, 0), "fp32"),
        ("auto", (10, 0), "pow2"),
        ("auto", (12, 0), "pow2"),
        ("fp32", (9, 0), "fp32"),
        ("pow2", (9, 0), "pow2"),
        ("pow2", (10, 0), "pow2"),
        ("pow2", None, "pow2"),
    ],
)
def test_scale_format(requested, capability, resolved):
    """auto is fp32 where nothing forbids it and pow2 from compute capability 10.0 on; a wish is kept."""
    assert resolve_scale_format(requested, capability) == resolved


@pytest.mark.parametrize(
    ("requested", "recipe", "hardware", "resolved"),
    [
        ("auto", FP32, CPU, "reference"),
        ("auto", SMALL, CPU, "reference"),
        ("auto", FP32, HOPPER, "te"),
        ("auto", POW2, HOPPER, "te"),
        ("auto", POW2, BLACKWELL, "te"),
        ("auto", POW2, CONSUMER_BLACKWELL, "te"),
        ("te", FP32, HOPPER, "te"),
        ("torch", FP32, HOPPER, "torch"),
        ("torch", POW2, HOPPER, "torch"),
        ("torch", FP32, NO_TE, "torch"),
        *(("reference", SMALL, hardware, "reference") for hardware in (CPU, AMPERE, HOPPER, OLD_CUDA, BLACKWELL)),
    ],
)
def test_backend(requested, recipe, hardware, resolved):
    """auto takes TransformerEngine on a GPU that can and the reference where there is none; a wish is kept."""
    assert resolve_backend(requested, recipe, hardware) == resolved


@pytest.mark.parametrize(
    ("requested", "recipe", "hardware", "found", "fix"),
    [
        ("auto", FP32, AMPERE, "compute capability 8.0", "Hopper or Blackwell"),
        ("auto", FP32, ADA, "compute capability 8.9", "remove +fp8"),
        ("auto", FP32, OLD_CUDA, "CUDA 12.8", "torch built for CUDA 12.9"),
        ("torch", FP32, NO_CUDA, "without CUDA", "torch built for CUDA 12.9"),
        ("auto", FP32, NO_TE, "not installed", "transformer-engine[pytorch]==2.20.2', or set fp8.backend=torch"),
        ("te", FP32, NO_TE, "not installed", "fp8.backend=torch"),
        ("auto", FP32, OLD_TE, "TransformerEngine 2.17.1", "2.20.2"),
        ("auto", FP32, NEW_TE, "TransformerEngine 2.21.0", "2.20.2"),
        ("auto", POW2, BLACKWELL_NO_TE, "not installed", "transformer-engine[pytorch]==2.20.2'"),
        ("torch", POW2, BLACKWELL, "9.x only", "fp8.backend=te"),
        ("te", FP32, CPU, "no CUDA GPU", "fp8.backend=reference"),
        ("torch", FP32, CPU, "no CUDA GPU", "fp8.backend=reference"),
        ("auto", SMALL, HOPPER, "128x128 only", "fp8.recipe.weight_block=[128,128]"),
    ],
)
def test_backend_refusals(requested, recipe, hardware, found, fix):
    """Never slower or other arithmetic than asked for: each refusal names the key, what is there and the way out."""
    with pytest.raises(ConfigError) as refusal:
        resolve_backend(requested, recipe, hardware)
    assert f"fp8.backend={requested}" in refusal.value.asked
    assert found in refusal.value.found
    assert fix in refusal.value.fix


def test_blackwell_is_never_pointed_at_the_torch_backend():
    """Without TransformerEngine on Blackwell there is no other backend to offer."""
    with pytest.raises(ConfigError) as refusal:
        resolve_backend("auto", POW2, BLACKWELL_NO_TE)
    assert "torch" not in refusal.value.fix.replace("[pytorch]", "")


@pytest.mark.parametrize(
    ("requested", "recipe", "hardware", "resolved"),
    [
        ("auto", FP32, CPU, "reference"),
        ("auto", FP32, HOPPER, "torch"),
        ("auto", POW2, HOPPER, "deep_gemm"),
        ("auto", POW2, BLACKWELL, "deep_gemm"),
        ("torch", POW2, HOPPER, "torch"),
        ("cutlass", FP32, HOPPER, "cutlass"),
        ("deep_gemm", FP32, HOPPER, "deep_gemm"),
        ("cutlass", POW2, BLACKWELL, "cutlass"),
    ],
)
def test_rollout_kernel(requested, recipe, hardware, resolved):
    """fp32 scales: the trainer's GEMM; pow2: DeepGEMM; a wish is kept."""
    assert resolve_rollout_kernel(requested, recipe, hardware) == resolved


@pytest.mark.parametrize(
    ("requested", "recipe", "hardware", "found"),
    [
        ("auto", FP32, AMPERE, "compute capability 8.0"),
        ("auto", FP32, OLD_CUDA, "CUDA 12.8"),
        ("torch", POW2, BLACKWELL, "9.x only"),
        ("torch", FP32, CPU, "no CUDA GPU"),
        ("auto", SMALL, HOPPER, "128x128 only"),
        ("auto", Recipe(scale_format="pow2", eps=1e-4), BLACKWELL, "no such floor"),
    ],
)
def test_rollout_kernel_refusals(requested, recipe, hardware, found):
    """A kernel this GPU has not, or whose quantiser is not the recipe's."""
    with pytest.raises(ConfigError, match=r"fp8\.") as refusal:
        resolve_rollout_kernel(requested, recipe, hardware)
    assert found in refusal.value.found


def test_fp32_on_blackwell_is_refused_while_parsing():
    """Every process that reads the fp8 node on such a machine refuses it."""
    with assume(BLACKWELL), pytest.raises(ConfigError, match=r"fp8\.recipe\.scale_format=pow2"):
        Fp8Settings.parse({"recipe": {"scale_format": "fp32"}})
    with assume(BLACKWELL):
        assert Fp8Settings.parse({}).recipe.scale_format == "pow2"
    assert Fp8Settings.parse({}).recipe.scale_format == "fp32"


def test_environment():
    """vLLM's variables follow the kernel and the scale format; none without a GPU."""
    assert environment(Fp8Settings(), CPU) == {}
    off = {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    deep = {**off, "VLLM_USE_DEEP_GEMM": "1"}
    assert environment(Fp8Settings(), HOPPER) == off
    assert environment(Fp8Settings(rollout_kernel="cutlass", recipe=POW2), HOPPER) == off
    assert environment(Fp8Settings(recipe=POW2), HOPPER) == {**deep, "VLLM_USE_DEEP_GEMM_E8M0": "1"}
    assert environment(Fp8Settings(rollout_kernel="deep_gemm"), HOPPER) == {**deep, "VLLM_USE_DEEP_GEMM_E8M0": "0"}


def test_pins_keep_the_users_other_arguments():
    """A compilation config given as JSON keeps its other keys; equal pins are no contradiction."""
    kwargs = {"compilation_config": '{"level": 3, "pass_config": {"eliminate_noops": true}}', "linear_backend": "torch"}
    pin_gpu_kernels(Fp8Settings(), HOPPER, kwargs)
    assert kwargs == {
        "linear_backend": "torch",
        "moe_backend": "triton",
        "compilation_config": {
            "level": 3,
            "pass_config": {"eliminate_noops": True, "fuse_norm_quant": False, "fuse_act_quant": False},
        },
    }


def test_probe():
    """Without a GPU, with verl's CPU platform, or with an assumed machine in its place; CUDA is not initialised."""
    assert probe() == CPU
    with assume(HOPPER):
        assert probe() is HOPPER
    assert probe() == CPU
    code = (
        "from verl_fp8.switches.hardware import probe; h = probe(); "
        "import torch; print(h.capability, torch.cuda.is_initialized())"
    )
    environment = {**os.environ, "VERL_PLATFORM": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


@pytest.mark.parametrize(
    ("words", "hardware", "rest"),
    [
        (["+fp8=unified"], None, ["+fp8=unified"]),
        (["--config-dir", "x", "+fp8=unified"], None, ["--config-dir", "x", "+fp8=unified"]),
        (["--capability", "9.0", "+fp8=unified"], Hardware((9, 0), (13, 0), "2.20.2", "0.19.2"), ["+fp8=unified"]),
        (
            ["+fp8=unified", "--capability", "9.0", "a=b"],
            Hardware((9, 0), (13, 0), "2.20.2", "0.19.2"),
            ["+fp8=unified", "a=b"],
        ),
        (
            ["--capability=10.0", "--cuda=12.8", "--transformer-engine", "none", "--megatron-core", "none"],
            Hardware((10, 0), (12, 8), None),
            [],
        ),
    ],
)
def test_the_options_of_check(words, hardware, rest):
    """verl-fp8 check takes its own options out, wherever they stand, and leaves Hydra's alone."""
    assert machine(words) == (hardware, rest)


@pytest.mark.parametrize(
    "words", [["--capability"], ["--capability", "hopper"], ["--cuda", "12.8"], ["--capability", "9.0", "--cuda", "13"]]
)
def test_wrong_options_of_check(words):
    """A value that is no version, or an option that says nothing alone, is refused."""
    with pytest.raises(ConfigError):
        machine(words)


@pytest.mark.parametrize("kernel", ["auto", "torch", "cutlass", "deep_gemm"])
def test_whole_sides_are_refused_on_a_gpu(kernel):
    """vLLM's own per-tensor method holds other codes than were sent; named are the keys and where they do run."""
    recipe = Recipe((WHOLE, WHOLE), (WHOLE, WHOLE), (1, WHOLE))
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.weights=tensor.*VERL_PLATFORM=cpu"):
        resolve_rollout_kernel(kernel, recipe, HOPPER)
