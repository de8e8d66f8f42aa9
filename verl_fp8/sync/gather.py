"""From FSDP2's shards to the sync's full tensors: quantised, or cast to bf16, before they are gathered.

Stock verl gathers fp32 masters, four bytes a weight. Here each rank quantises its own part and the codes are gathered,
one byte a weight. The codes are those of the gathered weight, bit for bit, wherever the shards are cut: a block that
lies on several ranks has the largest of their maxima, so one exchange of maxima (four bytes a block) gives every rank
the scales.

Which way a tensor goes follows from its name, shape and placement, hence is the same on every rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_fp8.errors import DataError
from verl_fp8.layers.shapes import FUSED, PROJECTIONS
from verl_fp8.numerics.quantize import FIX_THE_WEIGHTS, QuantizedTensor, amax_bits, quantize_weight, scale_inv_of
from verl_fp8.numerics.recipe import WHOLE
from verl_fp8.switches.settings import Fp8Settings

# What the codes travel as: not every backend of torch.distributed moves float8.
_BYTE = torch.uint8


class Spec(Protocol):
    """Where a shard belongs (verl.workers.engine.spec.ShardSpec)."""

    full_shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None


def full_weights(
    shards: Iterable[tuple[str, torch.Tensor, Spec]],
    settings: Fp8Settings,
    fp8_layers: Iterable[str],
    unfuse: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]],
    *,
    skip: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """Gather a sharded model tensor by tensor; every rank must consume the whole of it.

    Args:
        shards: (name, this rank's part, flat, in bf16 if floating; where it belongs), the same names on every rank.
        settings: recipe and transport.
        fp8_layers: names of the FP8 layers, under the checkpoint's names.
        unfuse: (name, fused experts) -> (name, projection of one expert), verl's.
        skip: names not to gather.

    Yields:
        (checkpoint's name, full tensor): quantised for FP8 layers with ``fp8.weight_sync=codes``, in bf16 else.

    Raises:
        DataError: an FP8 layer's weight has a non-finite value, on every rank if it is on one.
    """
    fp8 = frozenset(fp8_layers) if settings.weight_sync == "codes" else frozenset()
    for name, flat, spec in shards:
        if name in skip:
            continue
        cuts = set(spec.placements or ()) - {Replicate()}
        local = flat.view(_place(spec)[0])
        if name.removesuffix(".weight") in fp8 and local.ndim == 2 and all(type(cut) is Shard for cut in cuts):
            yield name, _matrix(name, local, spec, settings)
        elif (
            cuts <= {Shard(0)}
            and (layers := _expert_layers(name, local))
            and fp8.issuperset(
                f"{name.rpartition('.')[0]}.{expert}.{leaf}" for expert in range(spec.full_shape[0]) for leaf in layers
            )
        ):
            yield from _experts(name, local, spec, settings, layers)
        else:
            # Elementwise, so cast before or after the gathering is the same; the layers among these are quantised after
            # it.
            yield from unfuse([(name, _full(local, spec))])


def _place(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's part."""
    if spec.mesh is None:
        return tuple(spec.full_shape), (0,) * len(spec.full_shape)
    return compute_local_shape_and_global_offset(spec.full_shape, spec.mesh, spec.placements)


def _full(local: torch.Tensor, spec: Spec, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """All parts of a tensor placed like ``spec``'s, of ``shape`` if it is another."""
    if spec.mesh is None:
        return local
    shape = tuple(spec.full_shape) if shape is None else shape
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    whole = {"shape": torch.Size(shape), "stride": stride}
    return DTensor.from_local(local.contiguous(), spec.mesh, spec.placements, **whole).full_tensor()


def _largest(values: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Elementwise maximum over the parts."""
    if spec.mesh is None:
        return values
    placements = [Replicate() if p == Replicate() else Partial("max") for p in spec.placements]
    return DTensor.from_local(values, spec.mesh, placements).full_tensor()


def _scales(name: str, bits: torch.Tensor, dtype: torch.dtype, settings: Fp8Settings) -> torch.Tensor:
    recipe = settings.recipe
    scale_inv = scale_inv_of(bits, dtype, scale_format=recipe.scale_format, eps=recipe.eps)
    if scale_inv is None:
        raise DataError(
            f"ship {name} as FP8 codes",
            "values that are not finite",
            FIX_THE_WEIGHTS,
        )
    return scale_inv


def _codes(weight: torch.Tensor, bits: torch.Tensor | None, settings: Fp8Settings) -> torch.Tensor:
    return quantize_weight(weight, settings.recipe, amax_bits=bits).data.view(_BYTE)


def _matrix(name: str, local: torch.Tensor, spec: Spec, settings: Fp8Settings) -> QuantizedTensor:
    """One [out, in] weight, cut along either dimension, anywhere."""
    sides, (_, offset) = settings.recipe.weight_block, _place(spec)
    # A whole side is the full weight's, not the part's.
    block = tuple(size if side == WHOLE else side for size, side in zip(spec.full_shape, sides, strict=True))
    bits = torch.zeros([-(-size // unit) for size, unit in zip(spec.full_shape, block, strict=True)], dtype=torch.int32)
    bits = bits.to(local.device)
    # Zeros up to the block's edge raise no maximum; a whole side has no edge to line up with.
    top, left = (0 if side == WHOLE else start % side for start, side in zip(offset, sides, strict=True))
    padded = torch.nn.functional.pad(local, (left, 0, top, 0)) if local.numel() and (top or left) else local
    row, column = (start // unit for start, unit in zip(offset, block, strict=True))
    here = slice(row, row - (-padded.shape[0] // block[0])), slice(column, column - (-padded.shape[1] // block[1]))
    if local.numel():
        bits[here] = amax_bits(padded, block)
    bits = _largest(bits, spec)
    scale_inv = _scales(name, bits, local.dtype, settings)
    codes = local.to(_BYTE)
    if local.numel():
        codes = _codes(padded, bits[here], settings)[top:, left:]
    return QuantizedTensor(_full(codes, spec).view(torch.float8_e4m3fn), scale_inv, sides)


def _expert_layers(name: str, local: torch.Tensor) -> tuple[str, ...]:
    """The projections in a fused experts tensor, () if it is none."""
    leaf = name.rpartition(".")[2]
    if local.ndim != 3 or leaf not in FUSED:
        return ()
    return PROJECTIONS[:2] if leaf == FUSED[0] else PROJECTIONS[2:]


def _experts(
    name: str, local: torch.Tensor, spec: Spec, settings: Fp8Settings, layers: tuple[str, ...]
) -> Iterator[tuple[str, QuantizedTensor]]:
    """The projections of all experts of a fused [experts, out, in] tensor, whole experts on each rank."""
    block, dtype = settings.recipe.weight_block, local.dtype
    count, out, columns = spec.full_shape
    rows = out // len(layers)
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    bits = torch.zeros((local.shape[0], len(layers), *blocks), dtype=torch.int32, device=local.device)
    codes = torch.empty(local.shape, dtype=_BYTE, device=local.device)
    parts = [(e, i, slice(i * rows, (i + 1) * rows)) for e in range(local.shape[0]) for i in range(len(layers))]
    matrices = [(bits[e, i], codes[e, part], local[e, part]) for e, i, part in parts]
    for found, _, weight in matrices:
        found.copy_(amax_bits(weight, block))
    gathered = _full(bits, spec, (count, len(layers), *blocks))
    scale_inv = _scales(name, gathered, dtype, settings)
    for found, into, weight in matrices:
        into.copy_(_codes(weight, found, settings))
    codes = _full(codes, spec).view(torch.float8_e4m3fn)
    base = name.rpartition(".")[0]
    for expert in range(count):
        for i, layer in enumerate(layers):
            data = codes[expert, i * rows : (i + 1) * rows]
            yield f"{base}.{expert}.{layer}.weight", QuantizedTensor(data, scale_inv[expert, i], block)
