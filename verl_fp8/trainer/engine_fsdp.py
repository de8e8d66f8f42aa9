"""verl's FSDP2 engine with FP8 linear layers and an FP8 weight sync, under a backend name of its own.

How it works, in ten lines. verl builds a Hugging Face model in fp32, shards it by FSDP2, trains it in bf16, and sends
its weights to vLLM. Four moments of that are ours:

* build: :func:`prepare_module` swaps the linear layers before FSDP2 shards them; parameters and keys stay::

      weight    [N, K] fp32 master, sharded; gathered by FSDP2 in bf16, quantised in each forward
      x, y      [..., K] and [..., N] bfloat16

* sync: each rank quantises its shard and the codes are gathered, a byte a weight (verl_fp8.sync.gather);
* metrics: the figures of a sync travel with the next batch, as ``fp8/*``;
* checkpoint: the recipe is written beside verl's files, and another recipe refuses to resume.

What surprises: with ``fp8.mode=rollout`` nothing is FP8 here, and the model is converted all the same, to a backend
that changes nothing, since the sync needs the list of layers. verl's FSDP code branches on its own strategy names, so
the engine calls itself ``fsdp2``. :class:`Fp8SyncMixin` is any engine's part; verl_fp8.trainer.engine_megatron puts it
over verl's Megatron engine.
"""

import functools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from verl_fp8.errors import ConfigError
from verl_fp8.numerics import exact
from verl_fp8.switches.hardware import probe, resolve_backend
from verl_fp8.switches.settings import BACKEND, Fp8Settings
from verl_fp8.sync.gather import full_weights
from verl_fp8.sync.stream import SyncStats, outgoing
from verl_fp8.trainer import checkpoint
from verl_fp8.trainer.convert import Backend, ConversionReport, convert_linears
from verl_fp8.trainer.exact import make_exact, make_fp32_head, match_log_softmax

# The trainer of fp8.mode=rollout: every layer the filter lets through is named, and stays in bf16.
UNCHANGED = Backend(name="bf16", linear=lambda linear, recipe: linear, experts=lambda experts, recipe: None)


def prepare_module(module: torch.nn.Module, fp8: Fp8Settings) -> tuple[ConversionReport, str]:
    """Make a Hugging Face causal LM, not yet sharded, into the trainer's model, in place.

    Args:
        module: as verl builds it.
        fp8: the settings.

    Returns:
        The layers that are FP8 on some side, and what computes them in the trainer: a backend, or ``bf16``.

    Raises:
        ConfigError: the model or the machine cannot do what is asked.
    """
    backend = "bf16"
    if fp8.layer_filter is None:
        linears = [n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
        report = ConversionReport((), dict.fromkeys(linears, "fp8.mode=bf16"), len(linears))
    elif fp8.mode == "unified":
        backend = resolve_backend("reference" if fp8.exact else fp8.backend, fp8.recipe, probe())
        report = convert_linears(module, fp8.recipe, fp8.layers, backend=backend)
    else:
        # The trainer stays in bf16; the sync needs the same list of layers.
        report = convert_linears(module, fp8.recipe, fp8.layers, UNCHANGED.name, {UNCHANGED.name: UNCHANGED})
    if fp8.exact:
        make_exact(module)
    elif fp8.lm_head == "fp32":
        make_fp32_head(module)
    return report, backend


def _no_lora() -> ConfigError:
    return ConfigError("+fp8", "LoRA adapters", "remove actor_rollout_ref.model.lora_rank")


class Fp8SyncMixin:
    """The FP8 weight sync, its figures and the recipe in the checkpoint, over any of verl's engines.

    Attributes:
        fp8: the settings; set before verl's ``__init__``.
        _fp8_layers: names of the layers that are FP8 on some side; set when the module is built.
    """

    fp8: Fp8Settings
    _fp8_layers: tuple[str, ...]
    _fp8_sync: Mapping[str, float] = MappingProxyType({})

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
        """The weights for the rollout: FP8 codes and scales of the FP8 layers, bf16 for the rest, and the manifest."""
        weights, peft_config = super().get_per_tensor_param(
            layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs
        )
        if peft_config is not None:
            raise _no_lora()
        return self._counted(weights), None

    def _counted(self, weights) -> Iterator[tuple[str, torch.Tensor]]:
        stats, start = SyncStats(), time.perf_counter()
        yield from outgoing(weights, self.fp8, self._fp8_layers, skip=self._tied(), stats=stats)
        self._fp8_sync = {
            "fp8/sync_bytes": float(stats.total_bytes),
            "fp8/sync_bytes_per_weight": stats.bytes_per_weight,
            "fp8/sync_seconds": time.perf_counter() - start,
        }

    def _tied(self) -> frozenset[str]:
        """The duplicate of a tied embedding: vLLM refuses it."""
        return frozenset(
            {"lm_head.weight"} if getattr(self.model_config.hf_config, "tie_word_embeddings", False) else ()
        )

    def train_batch(self, data, loss_function):
        """verl's, plus the figures of the sync that the batch's rollout used (they reach the log as ``fp8/*``)."""
        output = super().train_batch(data, loss_function)
        if "metrics" in output:
            # verl keeps a list of micro-batch values under every name and joins the ranks' lists.
            output["metrics"].update({name: [value] for name, value in self._fp8_sync.items()})
        return output

    def save_checkpoint(self, local_path, *args, **kwargs):
        """verl's checkpoint plus the recipe it was trained with."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if torch.distributed.get_rank() == 0:
            checkpoint.write(Path(local_path), self._fp8_identity())

    def load_checkpoint(self, local_path, *args, **kwargs):
        """Resume; refuses a checkpoint of another recipe, or one that is cut.

        Raises:
            ConfigError: names what differs.
            DataError: names the file.
        """
        if local_path is not None:
            checkpoint.compare(Path(local_path), self._fp8_identity())
            checkpoint.check_files(Path(local_path), torch.distributed.get_rank())
        return super().load_checkpoint(local_path, *args, **kwargs)

    def _fp8_identity(self) -> dict:
        return {"mode": self.fp8.mode, "recipe": self.fp8.recipe.to_dict(), "layers": sorted(self._fp8_layers)}


class Fp8EngineMixin(Fp8SyncMixin):
    """The FP8 parts, over any of verl's FSDP engines with a language-model head."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.fp8 = engine_config.settings(probe().capability)
        # verl's FSDP code branches on its own strategy names.
        object.__setattr__(engine_config, "strategy", "fsdp2")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self):
        module = super()._build_module()
        report, backend = prepare_module(module, self.fp8)
        self._fp8_layers = report.converted
        if self.fp8.exact:
            match_log_softmax(transformer_impl)
        if self.rank == 0:
            role = "reference policy" if self.engine_config.forward_only else "actor"
            if role == "actor" and any(".experts." in name for name in report.converted):
                # They travel with rollout.enable_rollout_routing_replay only, to verl's Megatron and VeOmni engines.
                print(
                    "fp8/router_agreement is not measured: "
                    "verl hands the rollout's choices of experts to no FSDP engine",
                    flush=True,
                )
            if self.fp8.mode == "unified":
                print(f"{report.summary()} [{role}, backend {backend}, recipe {self.fp8.recipe.digest()}]", flush=True)
            elif self.fp8.layer_filter is None:
                print(f"no FP8 layer (fp8.mode=bf16), lm_head {self.fp8.lm_head} [{role}]", flush=True)
            else:
                print(
                    f"FP8 rollout of {len(report.converted)} of {report.total} linear layers, {role} in bf16, "
                    f"{self.fp8.recipe.granularity}",
                    flush=True,
                )
        return module

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
        """As :class:`Fp8SyncMixin`'s, from the shards and their ShardSpec: quantised before they are gathered
        (verl_fp8.sync.gather)."""
        if hasattr(self.module, "peft_config"):
            raise _no_lora()
        shards, _ = self.get_per_tensor_param_shard()
        unfuse = functools.partial(
            transformer_impl.unfuse_moe_params, model_type=self.model_config.hf_config.model_type
        )
        return self._counted(full_weights(shards, self.fp8, self._fp8_layers, unfuse, skip=self._tied())), None

    def _logprobs_from_logits(self, **kwargs):
        """Called by a verl whose source asks the engine (patches/0003); elsewhere verl_fp8.trainer.exact does
        it."""
        if self.fp8.exact:
            return exact.log_probs(kwargs["logits"], kwargs["labels"])
        return super()._logprobs_from_logits(**kwargs)


def register() -> None:
    """Register the engine for CUDA, and for CPU where verl_fp8's CPU platform is active. Idempotent."""
    known = EngineRegistry._engines.get("language_model", {}).get(BACKEND, {})
    device = get_device_name()
    if device in known:
        return
    base = transformer_impl.FSDPEngineWithLMHead
    if device == "cpu":
        from verl_fp8.cpu.platform import cpu_engine

        base = cpu_engine(transformer_impl)
    engine = type("Fp8FSDPEngineWithLMHead", (Fp8EngineMixin, base), {"__doc__": Fp8EngineMixin.__doc__})
    EngineRegistry.register(model_type="language_model", backend=BACKEND, device=device)(engine)
