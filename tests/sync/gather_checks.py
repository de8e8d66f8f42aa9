"""What test_gather.py starts, once a rank: FSDP2 shards a module over gloo, stock verl and verl_fp8 gather it.

    RANK=r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=p python gather_checks.py

Rank 0 prints one JSON object, check -> what it found; tests/trainer/hosted.py says how one of them is chosen. Both ways
run verl's own engine methods on the module; bytes are those of the collectives' results.
"""

import functools
import json
import os
import types

import hosted
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils.fsdp_utils import get_shard_placement_fn
from verl.workers.engine.fsdp import transformer_impl

from verl_fp8.errors import DataError
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.gather import full_weights
from verl_fp8.sync.stream import SyncStats, outgoing

ENGINE = transformer_impl.FSDPEngineWithLMHead
# name -> [out, in] of the FP8 layers: even and odd on two ranks, whole blocks and not, fewer rows than ranks.
LINEAR = {"a": (512, 256), "b": (192, 320), "c": (577, 192), "d": (129, 65), "e": (1, 64), "f": (130, 128)}
EXPERTS = {"even": 4, "odd": 3}
WIDTH, HIDDEN = 48, 130


def model() -> torch.nn.Module:
    """fp32 masters of every kind: linear with bias, fused experts, an embedding with its tied duplicate, a buffer."""
    torch.manual_seed(0)
    root = torch.nn.Module()
    for name, (out, columns) in LINEAR.items():
        root.add_module(name, torch.nn.Linear(columns, out))
        root.get_submodule(name).weight.data.mul_(torch.rand(out, 1) + 0.01)
    for name, count in EXPERTS.items():
        experts = torch.nn.Module()
        experts.gate_up_proj = torch.nn.Parameter(torch.randn(count, 2 * WIDTH, HIDDEN))
        experts.down_proj = torch.nn.Parameter(torch.randn(count, HIDDEN, WIDTH))
        mlp = torch.nn.Module()
        mlp.add_module("experts", experts)
        layer = torch.nn.Module()
        layer.add_module("mlp", mlp)
        root.add_module(name, layer)
    root.embed = torch.nn.Embedding(301, 64)
    root.lm_head = torch.nn.Linear(64, 301, bias=False)
    root.lm_head.weight = root.embed.weight
    root.register_buffer("steps", torch.tensor([7]))
    return root


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LAYERS = [
    *LINEAR,
    *(
        f"{name}.mlp.experts.{e}.{leaf}"
        for name, count in EXPERTS.items()
        for e in range(count)
        for leaf in PROJECTIONS
    ),
]


class Gathered(TorchDispatchMode):
    """Counts the bytes that collectives return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname in ("all_gather_into_tensor", "all_reduce"):
            self.bytes += out.nbytes
        return out


def engine(module: torch.nn.Module) -> types.SimpleNamespace:
    """What verl's two export methods read of an engine."""
    return types.SimpleNamespace(
        module=module,
        _uses_fsdp2_cpu_offload_policy=False,
        _is_offload_param=False,
        _qat_enabled=False,
        model_config=types.SimpleNamespace(lora={}, hf_config=types.SimpleNamespace(model_type="qwen3_moe")),
    )


def stream(
    module: torch.nn.Module, settings: Fp8Settings, layers: list[str], *, stock: bool
) -> tuple[list, int, SyncStats]:
    """(the sync's stream, bytes gathered for it, its statistics)."""
    skip, stats = frozenset({"lm_head.weight"}), SyncStats()
    with Gathered() as gathered:
        if stock:
            weights = ENGINE.get_per_tensor_param(engine(module))[0]
        else:
            shards = ENGINE.get_per_tensor_param_shard(engine(module))[0]
            unfuse = functools.partial(transformer_impl.unfuse_moe_params, model_type="qwen3_moe")
            weights = full_weights(shards, settings, layers, unfuse, skip=skip)
        sent = list(outgoing(weights, settings, layers, skip=skip, stats=stats))
    return sent, gathered.bytes, stats


def differences(module: torch.nn.Module, settings: Fp8Settings, layers: list[str]) -> list[str]:
    """Names whose tensors, or whose places in the stream, are not stock's (manifest included)."""
    ours, theirs = (stream(module, settings, layers, stock=stock)[0] for stock in (False, True))
    found = [] if [n for n, _ in ours] == [n for n, _ in theirs] else ["the order of names"]
    other = dict(theirs)
    for name, tensor in ours:
        same = tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        if not same or not torch.equal(
            tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)
        ):
            found.append(name)
    return found


# ---------------------------------------------------------------- the checks


@functools.cache
def sharded(placement: str) -> torch.nn.Module:
    """The model over two ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if placement == "by rows":
        return fully_shard(model(), mesh=mesh)
    if placement == "as verl does":
        return fully_shard(model(), mesh=mesh, shard_placement_fn=get_shard_placement_fn(world))
    return fully_shard(model(), mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("ddp", "fsdp")))


def recipe(mode: str = "unified", **values) -> Fp8Settings:
    """Settings of one recipe."""
    return Fp8Settings.parse({"mode": mode, "recipe": values})


PLACEMENTS = ("by rows", "as verl does", "on a mesh with replicas")
BLOCKS_128 = {"weight_block": [128, 128], "scale_format": "fp32"}
BLOCKS_64 = {"weight_block": [64, 64], "scale_format": "pow2"}
# Experts of which one projection stays in bf16 go another way.
MIXED = [name for name in LAYERS if not name.endswith(".0.up_proj")]


def stream_blocks_of_128(module) -> list[str]:
    """Blocks of 128x128, fp32 scales."""
    return differences(module, recipe(**BLOCKS_128), LAYERS)


def stream_blocks_of_64(module) -> list[str]:
    """Blocks of 64x64, pow2 scales."""
    return differences(module, recipe(**BLOCKS_64), LAYERS)


def stream_blocks_of_128_beside_bf16_experts(module) -> list[str]:
    """Blocks of 128x128, one projection of the experts in bf16."""
    return differences(module, recipe(**BLOCKS_128), MIXED)


def stream_blocks_of_64_beside_bf16_experts(module) -> list[str]:
    """Blocks of 64x64, one projection of the experts in bf16."""
    return differences(module, recipe(**BLOCKS_64), MIXED)


def stream_a_scale_a_channel(module) -> list[str]:
    """Per-channel scales; experts are quantised in blocks only."""
    return differences(module, recipe("rollout", weights="channel", activations="token"), list(LINEAR))


def stream_a_scale_a_tensor(module) -> list[str]:
    """Per-tensor scales; experts are quantised in blocks only."""
    return differences(module, recipe("rollout", weights="tensor", activations="tensor"), list(LINEAR))


def stream_bf16_transport(module) -> list[str]:
    """fp8.weight_sync=bf16."""
    return differences(module, Fp8Settings.parse({"mode": "unified", "weight_sync": "bf16"}), LAYERS)


def large() -> torch.nn.Module:
    """Only FP8 layers, of a size where padding of odd shards is nothing."""
    layers = (torch.nn.Linear(k, n, bias=False) for n, k in ((768, 576), (576, 768), (192, 576)))
    return fully_shard(torch.nn.Sequential(*layers), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def bytes_gathered(block: int) -> dict[str, int]:
    """Bytes that collectives return, ours and stock's, and the number of weights."""
    module, settings = large(), recipe(weight_block=[block, block])
    ours, theirs = (stream(module, settings, ["0", "1", "2"], stock=stock)[1:] for stock in (False, True))
    return {"ours": ours[0], "stock": theirs[0], "weights": ours[1].fp8_weights}


def nan_on_one_rank() -> list[str]:
    """What each rank raises for a NaN on the last one; where one does not, the other waits for ever."""
    module, world = large(), dist.get_world_size()
    if dist.get_rank() == world - 1:
        module[1].weight.to_local().data[-1, -1] = float("nan")
    try:
        stream(module, recipe(weight_block=[64, 64]), ["0", "1", "2"], stock=False)
        raised = "nothing raised"
    except DataError as error:
        raised = str(error)
    messages: list = [None] * world
    dist.all_gather_object(messages, raised)
    return messages


def main() -> None:
    """The checks asked for, by both ranks in one order, since each of them is a series of collectives."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    streams = [(name, check) for name, check in globals().items() if name.startswith("stream_")]
    checks = {
        f"{name} {placement}": lambda check=check, placement=placement: check(sharded(placement))
        for placement in PLACEMENTS
        for name, check in streams
    }
    checks |= {f"bytes_gathered {block}": functools.partial(bytes_gathered, block) for block in (128, 64)}
    found = hosted.run(checks, {"nan_on_one_rank": nan_on_one_rank}, prefix="")
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
