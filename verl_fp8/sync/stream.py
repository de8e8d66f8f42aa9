"""The weight sync's contents: what the trainer sends, and how the rollout knows that it holds exactly that.

How it works, in ten lines. After each step vLLM needs the new weights, and a weight that arrives changed, late or in
the wrong place gives no error: the rollout only samples from another model. So the trainer quantises each weight once
and sends the codes, and a manifest at the end lets the rollout prove what it received::

    <layer>.weight             [N, K] float8_e4m3fn, of each FP8 layer
    <layer>.weight_scale_inv   [row blocks, column blocks] float32, right after its codes
    everything else            bfloat16, as the trainer's forward sees it
    verl_fp8.manifest          JSON in uint8, last: recipe, digest of the FP8 layers, a checksum of every tensor

:class:`Incoming` compares the bytes with the manifest, and recipe and layers with its own; the worker then compares
the loaded parameters with the bytes (verl_fp8.rollout.worker). Any difference raises.

What surprises: a sync that merely ends proves nothing, so :meth:`Incoming.finish` wants the manifest. With
``fp8.weight_sync=bf16`` the weights travel in bf16, and the rollout quantises them by the same function.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from verl_fp8.errors import DataError, SyncError
from verl_fp8.layers.filter import digest_of_layers
from verl_fp8.numerics.quantize import FIX_THE_WEIGHTS, QuantizedTensor, quantize_weight
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.checksum import checksum

MANIFEST = "verl_fp8.manifest"
SCALE_SUFFIX = ".weight_scale_inv"
WEIGHT_SUFFIX = ".weight"


@dataclass
class SyncStats:
    """Bytes of one sync, as sent: all of it, and the FP8 layers' part with their number of weights."""

    total_bytes: int = 0
    fp8_bytes: int = 0
    fp8_weights: int = 0

    @property
    def bytes_per_weight(self) -> float:
        """Bytes sent for one weight of an FP8 layer, scales included."""
        return self.fp8_bytes / max(self.fp8_weights, 1)


def layer_of(name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` -> ``model.layers.0.mlp.up_proj``."""
    return name.removesuffix(WEIGHT_SUFFIX)


def codes_of_weight(weight: torch.Tensor, settings: Fp8Settings) -> QuantizedTensor:
    """The weight as the trainer's forward quantises it, from bf16; Triton does it on a GPU in one pass, to the same
    bits."""
    recipe, rounded = settings.recipe, weight.to(torch.bfloat16)
    if not weight.is_cuda:
        return quantize_weight(rounded, recipe)
    from verl_fp8.numerics import quantize_triton

    return quantize_triton.quantize(rounded, recipe.weight_block, scale_format=recipe.scale_format, eps=recipe.eps)


def outgoing(
    weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]],
    settings: Fp8Settings,
    fp8_layers: Iterable[str],
    *,
    skip: frozenset[str] = frozenset(),
    stats: SyncStats | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Turn the trainer's full weights into the sync's stream.

    Args:
        weights: (name, tensor) under Hugging Face names, one at a time; parameters may be fp32 masters, FP8 layers may
            be quantised already (verl_fp8.sync.gather).
        settings: recipe and transport.
        fp8_layers: names of the FP8 linear layers.
        skip: names not to send: the tied duplicate of an embedding (vLLM refuses it, verl then hangs).
        stats: counted into while the stream is consumed.

    Raises:
        DataError: a weight has a non-finite value; names the tensor.
        SyncError: a layer that should be FP8 never came by.
    """
    stats = SyncStats() if stats is None else stats
    fp8 = set(fp8_layers)
    pending, checksums = set(fp8), {}

    def emit(name: str, tensor: torch.Tensor, *, of_fp8_layer: bool) -> tuple[str, torch.Tensor]:
        checksums[name] = checksum(tensor)
        stats.total_bytes += tensor.nbytes
        if of_fp8_layer:
            stats.fp8_bytes += tensor.nbytes
        return name, tensor

    for name, tensor in weights:
        if name in skip:
            continue
        layer = layer_of(name)
        if name.endswith(WEIGHT_SUFFIX) and layer in fp8:
            pending.discard(layer)
            stats.fp8_weights += tensor.shape.numel()
            if settings.weight_sync == "bf16":
                yield emit(name, _finite(name, tensor.to(torch.bfloat16)), of_fp8_layer=True)
                continue
            try:
                quantized = tensor if isinstance(tensor, QuantizedTensor) else codes_of_weight(tensor, settings)
            except DataError as error:
                raise DataError(f"ship {name} as FP8 codes", error.found, error.fix) from error
            yield emit(name, quantized.data, of_fp8_layer=True)
            yield emit(layer + SCALE_SUFFIX, quantized.scale_inv, of_fp8_layer=True)
        else:
            # verl's FSDP2 forward computes with bf16 copies of the fp32 masters; the rollout gets the same copies.
            tensor = _finite(name, tensor.to(torch.bfloat16)) if tensor.is_floating_point() else tensor
            yield emit(name, tensor, of_fp8_layer=False)
    if pending:
        raise SyncError(
            f"{len(fp8)} FP8 layers in the weight sync",
            f"no weight for {sorted(pending)[:4]}",
            "report this: the engine and the layer filter disagree",
        )
    data = _manifest(settings, fp8, checksums)
    stats.total_bytes += data.nbytes
    yield MANIFEST, data


def _manifest(settings: Fp8Settings, fp8: set[str], checksums: dict[str, str]) -> torch.Tensor:
    manifest = {
        "recipe": settings.recipe.canonical(),
        "layers": digest_of_layers(fp8),
        "n_layers": len(fp8),
        "transport": settings.weight_sync,
        "checksums": checksums,
    }
    return torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    # One pass: infinities and NaN stay in a sum. A sum that overflows by itself only leads to the closer look.
    if not math.isfinite(tensor.sum(dtype=torch.float32).item()) and (bad := ~torch.isfinite(tensor)).any():
        raise DataError(
            f"ship {name} in {str(tensor.dtype).removeprefix('torch.')}",
            f"{int(bad.sum())} values that are not finite, of {tensor.numel()}",
            FIX_THE_WEIGHTS,
        )
    return tensor


@dataclass
class Incoming:
    """The receiving end of one sync.

    Args:
        settings: the rollout's own.
        fp8_layers: names of the layers the rollout runs in FP8, as vLLM resolved them.
    """

    settings: Fp8Settings
    fp8_layers: frozenset[str]
    _checksums: dict[str, str] = field(default_factory=dict)
    _complete: bool = False

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """One bucket in, the tensors to load out: the manifest is checked and removed, bf16 weights are quantised.

        Raises:
            SyncError: the manifest contradicts what was received or how the rollout is set up.
        """
        load = []
        for name, tensor in weights:
            if name == MANIFEST:
                self._check(json.loads(bytes(tensor.cpu().numpy())))
                continue
            self._checksums[name] = checksum(tensor)
            layer = layer_of(name)
            is_fp8 = name.endswith(WEIGHT_SUFFIX) and layer in self.fp8_layers
            if is_fp8 and self.settings.weight_sync == "bf16":
                quantized = codes_of_weight(tensor, self.settings)
                load += [(name, quantized.data), (layer + SCALE_SUFFIX, quantized.scale_inv)]
            elif is_fp8 != (tensor.dtype == torch.float8_e4m3fn):
                raise SyncError(
                    f"{name} in {'FP8' if is_fp8 else 'high precision'}, as the rollout runs it",
                    f"{tensor.dtype} from the trainer",
                    "both sides must resolve the same fp8.recipe.exclude",
                )
            else:
                load.append((name, tensor))
        return load

    def finish(self) -> None:
        """Raise unless the manifest came and agreed: without it nothing was proved."""
        if not self._complete:
            raise SyncError(
                "a verified FP8 weight sync",
                "a stream without the manifest: the trainer is not running verl_fp8's engine",
                "give trainer and rollout the same +fp8 group",
            )

    def _check(self, manifest: dict) -> None:
        recipe = self.settings.recipe.canonical()
        if manifest["recipe"] != recipe:
            raise SyncError(
                "one FP8 recipe on both sides",
                f"trainer {manifest['recipe']}, rollout {recipe}",
                "set fp8.recipe.* once, for both",
            )
        if manifest["layers"] != digest_of_layers(self.fp8_layers):
            raise SyncError(
                f"the trainer's {manifest['n_layers']} FP8 layers in the rollout",
                f"another set of {len(self.fp8_layers)} layers",
                "compare fp8.recipe.exclude with the layers vLLM lists at start",
            )
        if manifest["transport"] != self.settings.weight_sync:
            raise SyncError(
                f"fp8.weight_sync={self.settings.weight_sync}",
                f"{manifest['transport']} from the trainer",
                "set it once",
            )
        sent = manifest["checksums"]
        different = [n for n in sent if self._checksums.get(n) != sent[n]] + [
            n for n in self._checksums if n not in sent
        ]
        if different:
            raise SyncError(
                "the trainer's bytes in the rollout",
                f"{len(different)} of {len(sent)} tensors differ or are missing, e.g. {different[0]}",
                "start the run again; if it comes back, the transport (shared memory, IPC) corrupts data",
            )
        self._complete = True
