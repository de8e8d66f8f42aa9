"""What test_gather.py starts, once a rank: FSDP2 shards a module over gloo, stock verl and verl_fp8 gather it.

    RANK=r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=p python gather_checks.py

Rank 0 prints one JSON object. Both ways run verl's own engine methods on the module; bytes are those of the collectives' results.
"""

import functools
import json
import os
import types

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


def main() -> None:
    """All checks; both ranks must take the same path."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    result: dict = {"differences": {}}
    sharded = {
        "by rows": fully_shard(model(), mesh=mesh),
        "as verl does": fully_shard(model(), mesh=mesh, shard_placement_fn=get_shard_placement_fn(world)),
        "on a mesh with replicas": fully_shard(
            model(), mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("ddp", "fsdp"))
        ),
    }
    for placement, module in sharded.items():
        for block, scale_format in ((128, "fp32"), (64, "pow2")):
            settings = Fp8Settings.parse(
                {"mode": "unified", "recipe": {"weight_block": [block, block], "scale_format": scale_format}}
            )
            # Experts of which one stays in bf16 go another way.
            for layers in (LAYERS, [name for name in LAYERS if not name.endswith(".0.up_proj")]):
                result["differences"][f"{placement} {block} {len(layers)}"] = differences(module, settings, layers)
        for weights, activations in (("channel", "token"), ("tensor", "tensor")):
            whole = Fp8Settings.parse({"mode": "rollout", "recipe": {"weights": weights, "activations": activations}})
            # Experts are quantised in blocks only.
            result["differences"][f"{placement} {weights}"] = differences(module, whole, list(LINEAR))
        bf16 = Fp8Settings.parse({"mode": "unified", "weight_sync": "bf16"})
        result["differences"][f"{placement} bf16 transport"] = differences(module, bf16, LAYERS)

    # Bytes: only FP8 layers, of a size where padding of odd shards is nothing.
    large = torch.nn.Sequential(*(torch.nn.Linear(k, n, bias=False) for n, k in ((768, 576), (576, 768), (192, 576))))
    large = fully_shard(large, mesh=mesh)
    result["bytes"] = {}
    for block in (128, 64):
        settings = Fp8Settings.parse({"mode": "unified", "recipe": {"weight_block": [block, block]}})
        ours, theirs = (stream(large, settings, ["0", "1", "2"], stock=stock)[1:] for stock in (False, True))
        result["bytes"][str(block)] = {"ours": ours[0], "stock": theirs[0], "weights": ours[1].fp8_weights}

    # A NaN on one rank must raise on both, or the other waits for ever.
    if rank == world - 1:
        large[1].weight.to_local().data[-1, -1] = float("nan")
    try:
        stream(large, settings, ["0", "1", "2"], stock=False)
        result["nan"] = "nothing raised"
    except DataError as error:
        result["nan"] = str(error)
    messages: list = [None] * world
    dist.all_gather_object(messages, result)
    if rank == 0:
        print(json.dumps({**result, "nan": [m["nan"] for m in messages]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
