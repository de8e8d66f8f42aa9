"""The vLLM worker's side of the weight sync: it loads the trainer's FP8 codes unchanged and proves it.

How it works, in ten lines. vLLM fuses, shards and repacks what it loads, so a layer may hold other bytes than the
trainer sent with every name and shape right (verl #7986). This extension (``worker_extension_cls``) takes each bucket
of verl's transport, lets vLLM load it, and compares::

    arrived   <layer>.weight           [N, K] float8_e4m3fn      the manifest's checksum says what was sent
              <layer>.weight_scale_inv [row blocks, column blocks] float32
    held      qkv_proj, gate_up_proj   the parts of a fused layer end to end, this rank's share of each
              w13, w2                  [local experts, 2 * width or hidden, ...] of mixture-of-experts layers

:func:`loaded_shard` says which part of which parameter a tensor must be found in; any other byte raises a SyncError.

What surprises: equal bytes do not prove that experts compute with them, so a known input goes through each expert as
well (:func:`probe_experts`, where the kernel is ours). A layer that keeps dequantised weights from the sync before
must drop them at the end of this one.
"""

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_fp8.errors import SyncError
from verl_fp8.layers.filter import digest_of_layers
from verl_fp8.layers.shapes import PROJECTIONS
from verl_fp8.numerics.linear import fp8_linear_forward
from verl_fp8.numerics.quantize import QuantizedTensor
from verl_fp8.numerics.recipe import Recipe, scales_over
from verl_fp8.rollout import derived
from verl_fp8.rollout.serving import DEQUANTIZED
from verl_fp8.switches.hardware import probe
from verl_fp8.switches.settings import settings_of
from verl_fp8.sync.stream import SCALE_SUFFIX, WEIGHT_SUFFIX, Incoming
from verl_fp8.upstream.contract import require


def shard_names(model: torch.nn.Module, prefix: str) -> list[str]:
    """Checkpoint names behind one vLLM module: ``...qkv_proj`` -> q_proj, k_proj, v_proj, else the module itself."""
    parent, _, leaf = prefix.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    return [f"{parent}.{part}" if parent else part for part in parts]


def fp8_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """vLLM's FP8 linear and experts modules of the recipe, by the name of the checkpoint's module."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

    def ours(method: object) -> bool:
        in_blocks = isinstance(method, (Fp8LinearMethod, Fp8MoEMethod)) and method.block_quant
        return in_blocks or hasattr(method, "serves_verl_fp8")  # linear_cpu.reference_method

    return {
        module.layer_name if holds_experts(module) else name: module
        for name, module in model.named_modules()
        if ours(getattr(module, "quant_method", None))
    }


def holds_experts(module: torch.nn.Module) -> bool:
    """Whether one of :func:`fp8_modules` holds the experts of a layer."""
    return hasattr(module, "w13_weight")


def expert_names(prefix: str, module: torch.nn.Module) -> list[str]:
    """Checkpoint names behind vLLM's experts of one layer, three an expert: gate, up, down."""
    experts = module.moe_config.num_logical_experts
    return [f"{prefix}.{expert}.{leaf}" for expert in range(experts) for leaf in PROJECTIONS]


def _kernel(module: torch.nn.Module) -> object:
    method = module.quant_method
    return method.moe_kernel.fused_experts if holds_experts(module) else getattr(method, "fp8_linear", method)


def _expert_shard(
    module: torch.nn.Module, suffix: str, full: torch.Tensor, index: int, unit: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """:func:`~verl_fp8.rollout.worker.loaded_shard` for projection ``index % 3`` of expert ``index // 3``; None if it
    is not here."""
    expert, projection = divmod(index, 3)
    local = module._map_global_expert_id_to_local_expert_id(expert)
    if local < 0:
        return None
    parallel = module.moe_config.moe_parallel_config  # with expert parallelism its tp_size is 1
    tp = (parallel.tp_rank, parallel.tp_size)
    if projection == 2:
        held = getattr(module, f"w2{suffix.replace('.', '_')}").data[local]
        return loaded_shard(held, full, [held.shape[0] * unit[0]], 0, unit, tp)
    held = getattr(module, f"w13{suffix.replace('.', '_')}").data[local]
    return loaded_shard(held, full, [held.shape[0] // 2 * unit[0]] * 2, projection, unit, tp)


def _probed(module: torch.nn.Module) -> bool:
    """Whether the layer's kernel is ours, whose every bit is known."""
    return hasattr(_kernel(module), "product")


def probe_experts(prefix: str, module: torch.nn.Module, recipe: Recipe, sent: dict) -> None:
    """Send a known input through each expert of a layer, and compare with what the trainer's tensors give.

    Equal bytes in w13 and w2 do not prove that the layer computes with them: gate and up may be swapped, experts mapped
    to others' places, an older copy in use.

    Args:
        prefix: the layer's name.
        module: vLLM's experts.
        recipe: the arithmetic.
        sent: (index as in :func:`expert_names`, suffix) -> this rank's part of the tensor that arrived.

    Raises:
        SyncError: the layer's output differs in any bit.
    """
    # Four tokens whose blocks all have their own scale.
    x = (
        torch.linspace(-2, 2, 4 * module.hidden_size)
        .sin()
        .view(4, -1)
        .mul(torch.arange(1, 5)[:, None])
        .to(torch.bfloat16)
    )
    weigh = torch.ones(4, 1)
    for expert in sorted({index // 3 for index, _ in sent}):
        gate, up, down = (
            QuantizedTensor(
                sent[3 * expert + i, WEIGHT_SUFFIX], sent[3 * expert + i, SCALE_SUFFIX], recipe.weight_block
            )
            for i in range(3)
        )
        hidden = torch.nn.functional.silu(fp8_linear_forward(x, gate, recipe)) * fp8_linear_forward(x, up, recipe)
        expected = fp8_linear_forward(hidden, down, recipe)
        ids = torch.full((4, 1), expert, dtype=torch.int32)
        found = module.quant_method.apply(module, x.clone(), weigh, ids, None, None)
        if not torch.equal(found, expected):
            raise SyncError(
                f"expert {expert} of {prefix} computing with the trainer's weights",
                f"{int((found != expected).sum())} of {expected.numel()} values of a known input differ",
                "report this with the vLLM version: its layout of experts changed",
            )


class Fp8WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with a sync that loads codes and scales as they are and checks every one of them."""

    def __new__(cls, **kwargs):
        # vLLM constructs the worker before it builds the model, so registrations made here are seen by every layer.
        settings = settings_of(kwargs.get("vllm_config"))
        if settings is not None and settings.layer_filter is not None and probe().capability is not None:
            from verl_fp8.rollout import serving

            serving.serve(settings)
        if settings is not None and settings.exact:
            from verl_fp8.rollout import exact

            exact.install_exact()
        return super().__new__(cls, **kwargs)

    def _begin_sync(self) -> None:
        """Before the first bucket: which layers are FP8, under which names."""
        require("rollout.worker")
        settings = settings_of(self.model_runner.vllm_config)
        if settings is None:
            raise SyncError(
                "an FP8 rollout", "a vLLM started without the fp8 group", "select +fp8=unified or +fp8=rollout"
            )
        model = self.model_runner.model
        derived.refuse(model)
        derived.open_packed(model)
        self._fp8_modules = fp8_modules(model)
        if probe().capability is not None:
            from verl_fp8.rollout import experts_gpu

            for prefix, module in self._fp8_modules.items():
                if holds_experts(module):
                    experts_gpu.check_experts(_kernel(module), prefix)
        self._fp8_owner = {
            name: (prefix, index)
            for prefix in self._fp8_modules
            for index, name in enumerate(
                expert_names(prefix, self._fp8_modules[prefix])
                if holds_experts(self._fp8_modules[prefix])
                else shard_names(model, prefix)
            )
        }
        self._fp8_incoming = Incoming(settings, frozenset(self._fp8_owner))
        self._fp8_probes = {}
        self._fp8_error = None

    def _end_sync(self) -> None:
        """After the last bucket: the stream was complete, no layer computes with what it held before."""
        self._fp8_incoming.finish()
        for module in self._fp8_modules.values():
            _kernel(module).__dict__.pop(DEQUANTIZED, None)
            module.__dict__.pop(DEQUANTIZED, None)
        model, config = self.model_runner.model, self.model_runner.vllm_config
        derived.rebuild(model, config.model_config.dtype, experts=derived.verl_calls_hooks_of_fp8_alone(config))
        derived.probe(model)
        for prefix, expected in self._fp8_probes.items():
            probe_experts(prefix, self._fp8_modules[prefix], self._fp8_incoming.settings.recipe, expected)
        self._fp8_probes = {}

    def update_weights_from_ipc(self, *args, **kwargs):
        """One weight sync (verl/workers/rollout/vllm_rollout/utils.py); raises instead of leaving a half-loaded
        model."""
        self._begin_sync()
        settings = self._fp8_incoming.settings
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except Exception:
            # verl's receiver cleans up in a finally clause that fails in turn ("cannot close exported pointers exist")
            # while the bucket's tensors are alive in the traceback, and would hide what went wrong.
            if self._fp8_error is not None:
                raise self._fp8_error from None
            raise
        self._end_sync()
        if not getattr(self, "_fp8_announced", False):
            self._fp8_announced = True
            kernels = sorted({type(_kernel(m)).__name__ for m in self._fp8_modules.values()})
            layers = (
                f"{len(self._fp8_owner)} linear layers, kernel {', '.join(kernels)}"
                if kernels
                else "no FP8 layer (fp8.mode=bf16)"
            )
            print(
                f"FP8 rollout: {layers}, "
                f"recipe {settings.recipe.digest()} ({settings.recipe.granularity}), "
                f"layers {digest_of_layers(self._fp8_owner)}, "
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
        """Compare what the modules now hold with what arrived: layouts can be wrong with every name right (verl
        #7986)."""
        tp = (self._fp8_tp_rank(), self.model_runner.vllm_config.parallel_config.tensor_parallel_size)
        for name, tensor in tensors:
            suffix = SCALE_SUFFIX if name.endswith(SCALE_SUFFIX) else WEIGHT_SUFFIX
            owner = self._fp8_owner.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if owner is None:
                continue
            module = self._fp8_modules[owner[0]]
            unit = (1, 1) if suffix == WEIGHT_SUFFIX else tuple(module.weight_block_size)
            if holds_experts(module):
                found = _expert_shard(module, suffix, tensor, owner[1], unit)
                if found is None:  # another rank's expert
                    continue
                held, expected = found
                if _probed(module):
                    self._fp8_probes.setdefault(owner[0], {})[(owner[1], suffix)] = expected.clone()
            else:
                parameter = getattr(module, suffix[1:])
                held, expected = loaded_shard(parameter.data, tensor, module.logical_widths, owner[1], unit, tp)
            same = held.shape == expected.shape and torch.equal(
                held.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8).to(held.device)
            )
            if not same:
                raise SyncError(
                    f"{name} loaded into {owner[0]} unchanged",
                    f"other values (held {tuple(held.shape)}, sent {tuple(expected.shape)}, "
                    f"TP rank {tp[0]} of {tp[1]})",
                    "report this with the vLLM version: its weight loader changed",
                )

    def _fp8_tp_rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()


def loaded_shard(
    parameter: torch.Tensor,
    full: torch.Tensor,
    widths: list[int],
    index: int,
    unit: tuple[int, int],
    tp: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what a fused, tensor-parallel parameter holds of one checkpoint tensor, what it should hold).

    Args:
        parameter: [sum of local output sizes, local input size], of codes or of scales.
        full: the checkpoint tensor [out, in].
        widths: local output sizes of the fused parts, in weights (vLLM's ``logical_widths``).
        index: which part ``full`` is.
        unit: rows and columns of weights that one element of ``full`` stands for: (1, 1) for codes, the block for
            scales, where :data:`~verl_fp8.numerics.recipe.WHOLE` is a side of the whole checkpoint tensor: every rank
            holds its scale.
        tp: (rank, size).
    """
    rank, size = tp
    local = [scales_over(w, unit[0]) for w in widths]
    start = sum(local[:index])
    held = parameter[start : start + local[index]]
    parts = max(full.shape[0] // max(local[index], 1), 1)
    # Fewer distinct parts than ranks: vLLM replicates key and value heads over neighbouring ranks.
    part = rank // max(size // parts, 1)
    expected = full[part * local[index] : (part + 1) * local[index]]
    if held.shape[1] < full.shape[1]:
        expected = expected[:, rank * held.shape[1] : (rank + 1) * held.shape[1]]
    return held, expected
