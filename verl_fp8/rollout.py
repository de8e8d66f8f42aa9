"""The vLLM worker's side: loads the trainer's FP8 codes unchanged and proves it (``worker_extension_cls``)."""

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_fp8.contract import require
from verl_fp8.errors import SyncError
from verl_fp8.recipe import digest_of_layers
from verl_fp8.sync import SCALE_SUFFIX, WEIGHT_SUFFIX, Incoming, loaded_shard
from verl_fp8.vllm_arguments import settings_of

DEQUANTIZED = "_verl_fp8_dequantized"


def shard_names(model: torch.nn.Module, prefix: str) -> list[str]:
    """Checkpoint names behind one vLLM module: ``...qkv_proj`` -> q_proj, k_proj, v_proj, else the module itself."""
    parent, _, leaf = prefix.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    return [f"{parent}.{part}" if parent else part for part in parts]


def fp8_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """vLLM's block-FP8 linear modules by name."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), Fp8LinearMethod) and module.quant_method.block_quant
    }


class Fp8WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with a sync that loads codes and scales as they are and checks every one of them."""

    def __new__(cls, **kwargs):
        # vLLM constructs the worker before it builds the model, so registrations made here are seen by every layer.
        settings = settings_of(kwargs.get("vllm_config"))
        if settings is not None and settings.exact:
            from verl_fp8 import exact_vllm

            exact_vllm.install()
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(self, *args, **kwargs):
        """One weight sync (verl/workers/rollout/vllm_rollout/utils.py); raises instead of leaving a half-loaded model."""
        require("rollout")
        settings = settings_of(self.model_runner.vllm_config)
        if settings is None:
            raise SyncError("an FP8 rollout", "a vLLM started without the fp8 group", "select +fp8=unified or +fp8=rollout")
        model = self.model_runner.model
        self._fp8_modules = fp8_modules(model)
        self._fp8_owner = {
            name: (prefix, index)
            for prefix in self._fp8_modules
            for index, name in enumerate(shard_names(model, prefix))
        }
        self._fp8_incoming = Incoming(settings, frozenset(self._fp8_owner))
        self._fp8_error = None
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except Exception:
            # verl's receiver cleans up in a finally clause that fails in turn ("cannot close exported pointers exist") while
            # the bucket's tensors are alive in the traceback, and would hide what went wrong.
            if self._fp8_error is not None:
                raise self._fp8_error from None
            raise
        self._fp8_incoming.finish()
        for module in self._fp8_modules.values():
            module.__dict__.pop(DEQUANTIZED, None)
        if not getattr(self, "_fp8_announced", False):
            self._fp8_announced = True
            kernels = sorted({type(m.quant_method.fp8_linear).__name__ for m in self._fp8_modules.values()})
            print(
                f"FP8 rollout: {len(self._fp8_owner)} linear layers, kernel {', '.join(kernels)}, "
                f"recipe {settings.recipe.digest()}, layers {digest_of_layers(self._fp8_owner)}, "
                f"weights as {settings.weight_sync}, all bytes equal to the trainer's"
            )

    def _update_weights(self, weights, peft_config, base_sync_done):
        try:
            self._load_bucket(weights, peft_config)
        except Exception as error:
            self._fp8_error = error
            raise

    def _load_bucket(self, weights, peft_config) -> None:
        incoming = getattr(self, "_fp8_incoming", None)
        if incoming is None or peft_config:
            raise SyncError("an FP8 weight sync", "a LoRA or unannounced update", "remove LoRA or +fp8")
        tensors = incoming.take(weights)
        if not tensors:
            return
        model = self.model_runner.model
        # verl keeps vLLM's loader classes aside while the parameters are plain (vllm_quant_utils.load_quanted_weights).
        swapped = []
        for parameter in model.parameters():
            loader_class = getattr(parameter, "subclass_type", None)
            if loader_class is not None and parameter.__class__ is not loader_class:
                swapped.append((parameter, parameter.__class__))
                parameter.__class__ = loader_class
        try:
            model.load_weights(iter(tensors))
        finally:
            for parameter, original in swapped:
                parameter.__class__ = original
        self._verify(tensors)

    def _verify(self, tensors) -> None:
        """Compare what the modules now hold with what arrived: layouts can be wrong with every name right (verl #7986)."""
        tp = (self._fp8_tp_rank(), self.model_runner.vllm_config.parallel_config.tensor_parallel_size)
        for name, tensor in tensors:
            suffix = SCALE_SUFFIX if name.endswith(SCALE_SUFFIX) else WEIGHT_SUFFIX
            owner = self._fp8_owner.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if owner is None:
                continue
            module = self._fp8_modules[owner[0]]
            parameter = getattr(module, suffix[1:])
            unit = (1, 1) if suffix == WEIGHT_SUFFIX else tuple(module.weight_block_size)
            held, expected = loaded_shard(parameter.data, tensor, module.logical_widths, owner[1], unit, tp)
            same = held.shape == expected.shape and torch.equal(
                held.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8).to(held.device)
            )
            if not same:
                raise SyncError(
                    f"{name} loaded into {owner[0]} unchanged",
                    f"other values (held {tuple(held.shape)}, sent {tuple(expected.shape)}, TP rank {tp[0]} of {tp[1]})",
                    "report this with the vLLM version: its weight loader changed",
                )

    def _fp8_tp_rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()
