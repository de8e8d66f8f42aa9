"""What the machine can do, and what ``auto`` therefore means. Every choice made by ``auto`` is made here.

The facts behind the choices:

* TransformerEngine's blockwise recipe needs compute capability 9.0 and CUDA 12.9 (its pytorch/quantization.py,
  _compute_fp8_block_scaling_support).
* From compute capability 10.0 on, TransformerEngine emulates that recipe through MXFP8. MXFP8 takes power-of-two scales
  only (common/transpose/quantize_transpose_vector_blockwise.cu).
* ``torch.nn.functional.scaled_mm`` takes 1x128 and 128x128 scales on compute capability 9.x only
  (ATen/native/cuda/ScaledBlas.cpp, _check_deepseek_support).

Only :func:`probe` looks at the machine; the rest is pure. Nothing here initialises CUDA.
"""

import contextlib
import contextvars
import ctypes
import functools
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_fp8.errors import ConfigError
from verl_fp8.numerics.recipe import GPU_BLOCK, SCALE_FORMATS, Recipe
from verl_fp8.upstream.pins import INSTALL_TRANSFORMER_ENGINE
from verl_fp8.upstream.platform import cpu_platform

BACKENDS = ("auto", "te", "torch", "reference")
ROLLOUT_KERNELS = ("auto", "torch", "cutlass", "deep_gemm")
REFERENCE = "reference"

_NEEDED = (9, 0)
_EMULATED = (10, 0)
_CUDA = (12, 9)
# The versions of TransformerEngine that are taken; tests/trainer/test_te.py runs the backend on the Python of each.
TRANSFORMER_ENGINE = SpecifierSet(">=2.18,<2.21")
# tests/trainer/test_engine_megatron.py runs against the Python of the first and the last of these.
MEGATRON_CORE = SpecifierSet(">=0.16,<0.20")


@dataclass(frozen=True)
class Hardware:
    """The machine as the choices below see it.

    Attributes:
        capability: compute capability of the first visible GPU, None without a CUDA GPU.
        cuda: the CUDA version torch was built for, None for a build without CUDA.
        transformer_engine: the installed version of TransformerEngine's torch extension, None without.
        megatron_core: the installed version, None without.
    """

    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    transformer_engine: str | None = None
    megatron_core: str | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return "no CUDA GPU"
        cuda = "no CUDA" if self.cuda is None else f"CUDA {_dotted(self.cuda)}"
        te = (
            "without TransformerEngine"
            if self.transformer_engine is None
            else f"TransformerEngine {self.transformer_engine}"
        )
        return f"compute capability {_dotted(self.capability)}, {cuda}, {te}"


_assumed: contextvars.ContextVar[Hardware | None] = contextvars.ContextVar("verl_fp8_hardware", default=None)


def probe() -> Hardware:
    """This process's machine, or the one :func:`assume` put in its place."""
    return _assumed.get() or _probe()


@contextlib.contextmanager
def assume(hardware: Hardware) -> Iterator[None]:
    """Let every choice in this block be made for another machine: ``verl-fp8 check --capability``."""
    token = _assumed.set(hardware)
    try:
        yield
    finally:
        _assumed.reset(token)


def resolve_scale_format(requested: str, capability: tuple[int, int] | None) -> str:
    """``auto`` -> ``fp32`` on Hopper and without a GPU, ``pow2`` from compute capability 10.0 on.

    Raises:
        ConfigError: an unknown value, or ``fp32`` from 10.0 on.
    """
    if not isinstance(requested, str) or requested not in ("auto", *SCALE_FORMATS):
        raise ConfigError(
            f"fp8.recipe.scale_format={requested!r}", "not a value it can take", "set it to one of auto, fp32, pow2"
        )
    emulated = capability is not None and capability >= _EMULATED
    if requested == "fp32" and emulated:
        raise ConfigError(
            "fp8.recipe.scale_format=fp32",
            f"a GPU of compute capability {_dotted(capability)}, "
            "which runs the blockwise recipe with power-of-two scales only",
            "set fp8.recipe.scale_format=pow2 or auto",
        )
    if requested == "auto":
        return "pow2" if emulated else "fp32"
    return requested


def resolve_backend(requested: str, recipe: Recipe, hardware: Hardware) -> str:
    """Which kernels compute the trainer's FP8 linears: ``te``, ``torch`` or ``reference``.

    ``auto`` is ``reference`` without a GPU and ``te`` with one. It never falls back to something slower: a GPU that
    cannot run ``te`` is an error, and so is a missing TransformerEngine.

    Raises:
        ConfigError: names what is missing and how to get on.
    """
    asked = f"fp8.backend={requested}"
    if hardware.capability is None:
        if requested in ("auto", REFERENCE):
            return REFERENCE
        raise ConfigError(asked, "no CUDA GPU", "set fp8.backend=reference")
    if requested == REFERENCE:
        return REFERENCE
    check_gpu(asked, hardware)
    _check_recipe(asked, recipe)
    if requested == "torch":
        if hardware.capability >= _EMULATED:
            raise ConfigError(
                asked,
                f"compute capability {_dotted(hardware.capability)}; torch's blockwise scaled_mm exists on 9.x only",
                "set fp8.backend=te",
            )
        return "torch"
    check_transformer_engine(
        asked, hardware, otherwise=", or set fp8.backend=torch" if hardware.capability < _EMULATED else ""
    )
    return "te"


def resolve_rollout_kernel(requested: str, recipe: Recipe, hardware: Hardware) -> str:
    """Which GEMM vLLM's FP8 linears run: ``torch``, ``cutlass`` or ``deep_gemm``, or ``reference`` without a GPU.

    ``auto`` is ``torch`` for fp32 scales (both sides then run cuBLASLt's blockwise GEMM) and ``deep_gemm`` for pow2.

    Raises:
        ConfigError: a kernel this GPU has not.
    """
    asked = f"fp8.rollout_kernel={requested}"
    if hardware.capability is None:
        if requested == "auto":
            return REFERENCE
        raise ConfigError(asked, "no CUDA GPU", "remove fp8.rollout_kernel")
    check_gpu(asked, hardware)
    _check_recipe(asked, recipe)
    emulated = hardware.capability >= _EMULATED
    if requested == "auto":
        requested = "torch" if recipe.scale_format == "fp32" else "deep_gemm"
    if requested == "torch" and emulated:
        raise ConfigError(
            asked,
            f"compute capability {_dotted(hardware.capability)}; torch's blockwise scaled_mm exists on 9.x only",
            "set fp8.rollout_kernel=deep_gemm or cutlass",
        )
    if requested == "deep_gemm" and emulated and recipe.eps > 0:
        # There vLLM's packed quantiser is the one that stays, and its floor is fixed.
        raise ConfigError(
            f"fp8.recipe.eps={recipe.eps:g}",
            "DeepGEMM's packed quantiser on this GPU, which has no such floor",
            "set fp8.recipe.eps=0.0, or fp8.rollout_kernel=cutlass",
        )
    return requested


def check_gpu(asked: str, hardware: Hardware) -> None:
    """Refuse a GPU or CUDA that has no blockwise FP8 GEMM.

    Raises:
        ConfigError: which of the two it is.
    """
    if hardware.capability < _NEEDED:
        raise ConfigError(
            asked,
            f"a GPU of compute capability {_dotted(hardware.capability)}; "
            f"blockwise FP8 GEMMs need {_dotted(_NEEDED)} (Hopper)",
            "use a Hopper or Blackwell GPU, or remove +fp8",
        )
    if hardware.cuda is None or hardware.cuda < _CUDA:
        found = "without CUDA" if hardware.cuda is None else f"for CUDA {_dotted(hardware.cuda)}"
        raise ConfigError(
            asked,
            f"torch built {found}; cuBLASLt's blockwise FP8 GEMM needs {_dotted(_CUDA)}",
            f"install a torch built for CUDA {_dotted(_CUDA)} or newer, or remove +fp8",
        )


def check_transformer_engine(asked: str, hardware: Hardware, *, otherwise: str = "") -> None:
    """Refuse an absent or untried TransformerEngine.

    Args:
        otherwise: what may be done instead of installing it.

    Raises:
        ConfigError: which version is there.
    """
    found, supported = hardware.transformer_engine, TRANSFORMER_ENGINE
    fix = INSTALL_TRANSFORMER_ENGINE + otherwise
    if found is None:
        raise ConfigError(asked, "TransformerEngine is not installed", fix)
    if not supported.contains(Version(found).base_version):
        raise ConfigError(f"{asked}, with TransformerEngine{supported}", f"TransformerEngine {found}", fix)


def refuse_coarse_scales(recipe: Recipe, asked: str) -> None:
    """Refuse one scale a tensor, channel or token on a GPU. There vLLM's own methods hold other codes than were sent.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{asked} with fp8.recipe.weights={recipe.weights}, fp8.recipe.activations={recipe.activations}",
        "a GPU, where vLLM requantises the parts of fused layers to one scale: "
        "the rollout would not hold the codes it was sent",
        "set fp8.recipe.weights=block and fp8.recipe.activations=group; "
        "other scales run on CPU (VERL_PLATFORM=cpu, trainer.device=cpu)",
    )


def check_megatron_core(asked: str, hardware: Hardware) -> None:
    """Refuse an absent or untried megatron-core.

    Raises:
        ConfigError: which version is there.
    """
    found = hardware.megatron_core
    if found is None or not MEGATRON_CORE.contains(Version(found).base_version):
        found = "megatron-core is not installed" if found is None else f"megatron-core {found}"
        fix = f"install megatron-core{MEGATRON_CORE} and the Megatron-Bridge that goes with it, or use +fp8=unified"
        raise ConfigError(f"{asked}, with megatron-core{MEGATRON_CORE}", found, fix)


def _check_recipe(asked: str, recipe: Recipe) -> None:
    if recipe.weights != "block":
        refuse_coarse_scales(recipe, asked)
    if recipe.weight_block != GPU_BLOCK:
        raise ConfigError(
            f"{asked} with fp8.recipe.weight_block={list(recipe.weight_block)}",
            "GPU kernels for blocks of 128x128 only",
            "set fp8.recipe.weight_block=[128,128]; other blocks run on the CPU reference only",
        )


@functools.cache
def _probe() -> Hardware:
    if cpu_platform():
        return Hardware()
    import torch

    cuda = torch.version.cuda
    return Hardware(
        capability=_capability() if cuda and torch.cuda.device_count() else None,
        cuda=tuple(int(part) for part in cuda.split(".")[:2]) if cuda else None,
        transformer_engine=_version("transformer_engine_torch", "transformer_engine"),
        megatron_core=_version("megatron-core"),
    )


def _capability() -> tuple[int, int]:
    # By NVML: torch.cuda.get_device_capability() initialises CUDA, after which the driver and vLLM's server process
    # could no longer fork. All GPUs of a run are of one kind, so the first one speaks for them.
    major, minor = ctypes.c_int(), ctypes.c_int()
    handle = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        codes = (
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
        )
    except (OSError, AttributeError):
        codes = (-1,)
    if any(codes):
        import torch

        return torch.cuda.get_device_capability()
    return major.value, minor.value


def _version(*names: str) -> str | None:
    # The metapackage `transformer_engine` installs without the extension; a source build has only the former.
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
