"""Peak tensor memory of a training step through FP8 experts, against a dense swap of the same weights.

    python tests/benchmarks/moe_memory.py [--experts 32 --top-k 4 --hidden 512 --width 256 --tokens 512]

Three ways over one set of weights: the fused experts path (verl_fp8.trainer.experts), an nn.Linear a projection and
expert turned into ReferenceFp8Linear ("dense swap"), and transformers' own bf16 grouped_mm. Counted by torch's
MemTracker: bytes of live storages, weights and their gradients included. The reference backend's, which dequantises on
the way; ratios are what carries over.
"""

import argparse
import copy

import torch
import transformers
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from verl_fp8.numerics.experts import mix_experts
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer import experts, reference


class DenseExperts(nn.Module):
    """The same experts as separate linear layers: gate, up and down of each."""

    def __init__(self, fused: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.num_experts, self.act_fn = fused.num_experts, fused.act_fn
        gates, ups = fused.gate_up_proj.detach().chunk(2, dim=1)
        weights = zip(gates, ups, fused.down_proj.detach(), strict=True)
        self.layers = nn.ModuleList(nn.ModuleList(self.linear(w, recipe) for w in three) for three in weights)

    @staticmethod
    def linear(weight: torch.Tensor, recipe: Recipe) -> nn.Linear:
        """One FP8 linear layer that owns a copy of ``weight``."""
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(weight.clone())
        return reference.to_reference(made, recipe)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def grouped(rows, counts):
            parts = rows.split(counts)
            return torch.cat(
                [
                    down(self.act_fn(gate(p)) * up(p))
                    for p, (gate, up, down) in zip(parts, self.layers, strict=True)
                    if len(p)
                ]
            )

        return mix_experts(x, index, weights, self.num_experts, grouped)


def peak(module: nn.Module, inputs: tuple) -> tuple[int, torch.Tensor]:
    """(bytes at the peak of one forward and backward, the output)."""
    x = inputs[0].clone().requires_grad_()
    tracker = MemTracker()
    tracker.track_external(module, *inputs, x)
    with tracker:
        y = module(x, *inputs[1:])
        y.sum().backward()
    snapshot = tracker.get_tracker_snapshot("peak")
    return sum(v["Total"] for v in snapshot.values()), y.detach()


def main() -> None:
    """Measure and print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 32), ("top-k", 4), ("hidden", 512), ("width", 256), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=args.hidden, moe_intermediate_size=args.width,
        num_experts=args.experts, num_experts_per_tok=args.top_k,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    plain = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config).to(torch.bfloat16)
    nn.init.normal_(plain.gate_up_proj, std=0.02)
    nn.init.normal_(plain.down_proj, std=0.02)
    recipe = Recipe()
    fused = copy.deepcopy(plain)
    experts.to_reference(fused, recipe)
    x = torch.randn(args.tokens, args.hidden, dtype=torch.bfloat16)
    scores, index = torch.randn(args.tokens, args.experts).softmax(-1).topk(args.top_k)
    inputs = (x, index, scores.to(torch.bfloat16))
    weights = sum(p.nbytes for p in plain.parameters())
    print(
        f"{args.experts} experts {args.hidden}x{args.width}, {args.tokens} tokens, {args.top_k} each; "
        f"weights {weights / 2**20:.0f} MiB"
    )
    results = {name: peak(m, inputs) for name, m in (
        ("fp8 experts path", fused), ("fp8 dense swap", DenseExperts(plain, recipe)), ("bf16 grouped_mm", plain)
    )}  # fmt: skip
    for name, (size, _) in results.items():
        print(f"{name:18} peak {size / 2**20:8.1f} MiB  {size / weights:5.2f} x weights")
    same = torch.equal(results["fp8 experts path"][1], results["fp8 dense swap"][1])
    print(f"outputs of the first two equal to the bit: {same}")


if __name__ == "__main__":
    main()
