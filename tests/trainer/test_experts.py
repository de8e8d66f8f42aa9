"""FP8 experts: the bits of a loop over numerics/quantize.py, forward and backward, and which modules they replace."""

import copy
import json

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from verl_fp8.errors import ConfigError, DataError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.layers.shapes import PROJECTIONS, split_layers
from verl_fp8.numerics.linear import Fp8LinearFunction
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.rules.tensor_parallel import check_tensor_parallel
from verl_fp8.trainer.convert import convert_linears
from verl_fp8.trainer.exact import check_config
from verl_fp8.trainer.experts import IMPLEMENTATION, to_reference
from verl_fp8.trainer.reference import ReferenceFp8Linear

EXPERTS, HIDDEN, WIDTH = 6, 256, 128


def config(**changes):
    """A Qwen3-MoE of one layer."""
    shape = dict(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=256, moe_intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=128, num_experts=EXPERTS, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen3MoeConfig(**(shape | changes))


def model(dtype=torch.bfloat16, **changes):
    """It, with random weights."""
    torch.manual_seed(0)
    made = transformers.Qwen3MoeForCausalLM(config(**changes)).to(dtype)
    for layer in made.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)
    return made


def experts_of(recipe, dtype=torch.bfloat16):
    """The experts of its layer, in FP8."""
    module = model(dtype).model.layers[0].mlp.experts
    to_reference(module, recipe)
    return module


def uneven(tokens: int):
    """Two experts a token: expert 0 gets every token, the last one none, the others a few."""
    other = torch.tensor([1, 1, 1, 2, 3, 3, 4])[torch.arange(tokens) % 7]
    return torch.stack([torch.zeros(tokens, dtype=torch.long), other], dim=1).flip(0)


def loop(module, recipe, x, index, weights):
    """One Fp8LinearFunction a projection and expert on rows picked by hand; gradients in x, weights and the returned
    lists."""
    gate_up = [w.detach().clone().requires_grad_() for w in module.gate_up_proj]
    down = [w.detach().clone().requires_grad_() for w in module.down_proj]
    # Each (token, place) has its own leaf, so that no summation order is autograd's.
    leaves = {(t, j): x[t].detach().clone().requires_grad_() for t in range(x.shape[0]) for j in range(index.shape[1])}
    parts = {}
    for expert in range(len(gate_up)):
        places = [tuple(p) for p in (index == expert).nonzero().tolist()]
        if not places:
            continue
        rows = torch.stack([leaves[p] for p in places])
        gate, up = Fp8LinearFunction.apply(rows, gate_up[expert], recipe).chunk(2, dim=-1)
        out = Fp8LinearFunction.apply(torch.nn.functional.silu(gate) * up, down[expert], recipe)
        parts |= {(t, j): row * weights[t, j] for (t, j), row in zip(places, out, strict=True)}
    y = torch.stack([total([parts.get((t, j)) for j in range(index.shape[1])], x[t]) for t in range(x.shape[0])])
    return y, leaves, gate_up, down


def total(rows, like):
    """The sum of rows in float32, rounded once; None counts as zeros."""
    summed = torch.zeros_like(like, dtype=torch.float32)
    for row in rows:
        summed = summed if row is None else summed + row.float()
    return summed.to(like.dtype)


def grad(tensor):
    """A gradient, zeros where none arrived."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("backward", ["fp8", "high_precision", "dequantized"])
@pytest.mark.parametrize("case", ["uneven", "one token", "one expert", "other ranks' experts", "no expert at all"])
def test_bits_are_those_of_a_loop_over_numerics(case, backward, scale_format):
    """Output and every gradient, whatever the routing: experts without tokens, one token, indices of other ranks."""
    recipe = Recipe(backward=backward, scale_format=scale_format)
    module = experts_of(recipe)
    index = {
        "uneven": uneven(40),
        "one token": torch.tensor([[4, 1]]),
        "one expert": torch.full((17, 1), 3),
        "other ranks' experts": torch.where(uneven(20) == 1, EXPERTS, uneven(20)),
        "no expert at all": torch.full((3, 2), EXPERTS),
    }[case]
    torch.manual_seed(1)
    x = torch.randn(index.shape[0], HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(index.shape, dtype=torch.bfloat16, requires_grad=True)
    y = module(x, index, weights)
    dy = torch.randn_like(y)
    y.backward(dy)

    own = weights.detach().clone().requires_grad_()
    expected, leaves, gate_up, down = loop(module, recipe, x, index, own)
    if expected.requires_grad:
        expected.backward(dy)
    dx = torch.stack([total([grad(leaves[t, j]) for j in range(index.shape[1])], x[t]) for t in range(x.shape[0])])
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, dx) and torch.equal(grad(weights), grad(own))
    assert torch.equal(grad(module.gate_up_proj), torch.stack([grad(w) for w in gate_up]))
    assert torch.equal(grad(module.down_proj), torch.stack([grad(w) for w in down]))


def test_a_batch_without_tokens():
    """A micro-batch may be empty; the weights' gradients are zeros."""
    module = experts_of(Recipe())
    x = torch.zeros(0, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y = module(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.shape == (0, HIDDEN) and x.grad.shape == x.shape and not module.gate_up_proj.grad.any()


def test_a_token_gives_the_same_bits_in_any_batch():
    """Alone or among others: nothing in a token's output depends on what else is there."""
    module, x, index = experts_of(Recipe()), torch.randn(33, HIDDEN, dtype=torch.bfloat16), uneven(33)
    weights = torch.rand(33, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        whole = module(x, index, weights)
        assert torch.equal(
            torch.cat([module(x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(33)]), whole
        )


def test_gradients_only_where_they_are_wanted():
    """Frozen experts, or an input without gradient: nothing is computed for them."""
    module, index = experts_of(Recipe()), uneven(8)
    weights = torch.rand(8, 2, dtype=torch.bfloat16)
    module(torch.randn(8, HIDDEN, dtype=torch.bfloat16), index, weights).sum().backward()
    assert module.down_proj.grad.any()
    module = experts_of(Recipe()).requires_grad_(False)
    x = torch.randn(8, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    module(x, index, weights).sum().backward()
    assert x.grad.any() and module.gate_up_proj.grad is None


def test_autocast_and_fp32_masters_are_quantised_from_bf16():
    """As nn.functional.linear under autocast: the weight's bf16 copy is quantised, not the master."""
    plain, index = experts_of(Recipe(), torch.float32), uneven(12)
    rounded = copy.deepcopy(plain).to(torch.bfloat16)
    x, weights = torch.randn(12, HIDDEN), torch.rand(12, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = plain(x, index, weights)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rounded(x.to(torch.bfloat16), index, weights.to(torch.bfloat16)))


def test_recomputation_gives_the_same_gradients():
    """Gradient checkpointing runs the forward a second time."""
    module, index, weights = experts_of(Recipe()), uneven(20), torch.rand(20, 2, dtype=torch.bfloat16)
    x = torch.randn(20, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    module(x, index, weights).square().sum().backward()
    first = x.grad.clone(), module.gate_up_proj.grad.clone()
    x.grad = module.gate_up_proj.grad = None
    checkpoint(module, x, index, weights, use_reentrant=False).square().sum().backward()
    assert torch.equal(x.grad, first[0]) and torch.equal(module.gate_up_proj.grad, first[1])


def test_a_weight_that_is_not_finite_is_refused():
    """As in a dense layer."""
    module = experts_of(Recipe())
    with torch.no_grad():
        module.down_proj[4, 0, 0] = float("nan")
    x, weights = torch.randn(4, HIDDEN, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
    with pytest.raises(DataError, match="not finite"):
        module(x, torch.tensor([[4, 0]] * 4), weights)


def test_the_conversion_counts_experts_under_the_checkpoints_names():
    """Three projections of each expert; router and head are kept with their reasons; keys of the state dict stay."""
    plain = model()
    keys = list(plain.state_dict())
    report = convert_linears(plain, Recipe(), LayerFilter())
    prefix = "model.layers.0"
    assert set(report.converted) == {f"{prefix}.self_attn.{n}_proj" for n in "qkvo"} | {
        f"{prefix}.mlp.experts.{e}.{p}" for e in range(EXPERTS) for p in PROJECTIONS
    }
    assert report.skipped == {f"{prefix}.mlp.gate": "MoE router", "lm_head": "output head"}
    assert report.total == len(report.converted) + 2
    assert list(plain.state_dict()) == keys
    assert split_layers(plain.config, LayerFilter())[0] == report.converted


def test_the_router_and_the_heads_compute_as_before():
    """Their modules are transformers' own, and a training step reaches all of them."""
    plain = model()
    kinds = {
        name: type(plain.get_submodule(name))
        for name in ("model.layers.0.mlp.gate", "lm_head", "model.layers.0.mlp.experts")
    }
    convert_linears(plain, Recipe(), LayerFilter())
    assert {name: type(plain.get_submodule(name)) for name in kinds} == kinds
    ids = torch.randint(0, 64, (2, 9))
    plain(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in plain.parameters())


def test_the_shared_expert_is_fp8_and_its_gate_is_not():
    """Qwen2-MoE: a dense expert beside the routed ones, weighed by a linear layer of one output."""
    shape = config().to_dict() | {"shared_expert_intermediate_size": 256}
    plain = transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **{k: v for k, v in shape.items() if k not in ("model_type", "architectures", "layer_types")}
        )
    )
    report = convert_linears(plain, Recipe(), LayerFilter())
    mlp = plain.model.layers[0].mlp
    assert type(mlp.shared_expert.gate_proj) is ReferenceFp8Linear and type(mlp.shared_expert_gate) is torch.nn.Linear
    assert (
        report.skipped["model.layers.0.mlp.shared_expert_gate"]
        == report.skipped["model.layers.0.mlp.gate"]
        == "MoE router"
    )
    assert mlp.experts.config._experts_implementation == IMPLEMENTATION


def test_an_excluded_layers_experts_stay_as_they_were():
    """One configuration object serves all layers; only the converted experts' copy changes."""
    plain = model(num_hidden_layers=2)
    before = plain.config._experts_implementation
    report = convert_linears(plain, Recipe(), LayerFilter(exclude=("model.layers.0.mlp.*",)))
    kinds = [layer.mlp.experts.config._experts_implementation for layer in plain.model.layers]
    assert kinds == [before, IMPLEMENTATION] and plain.config._experts_implementation == before
    assert sum(".experts." in name for name in report.converted) == 3 * EXPERTS
    assert IMPLEMENTATION not in json.dumps(plain.config.to_dict(), default=str)


def test_a_part_of_a_layers_experts_cannot_be_excluded():
    """vLLM has one precision for all experts of a layer."""
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts"):
        convert_linears(model(), Recipe(), LayerFilter(exclude=("*.experts.1.*",)))


def test_the_torch_backend_takes_experts_and_refuses_a_cpu():
    """Conversion as with the reference; what they compute is in test_scaled_mm.py. On a CPU they say so."""
    plain = model()
    report = convert_linears(plain, Recipe(), LayerFilter(), "torch")
    experts = plain.model.layers[0].mlp.experts
    assert report.converted == split_layers(plain.config, LayerFilter())[0]
    assert experts.config._experts_implementation == IMPLEMENTATION
    with pytest.raises(ConfigError, match=r"fp8\.backend=reference"):
        experts(torch.randn(2, HIDDEN, dtype=torch.bfloat16), uneven(2), torch.ones(2, 2))


def test_a_width_that_is_no_multiple_of_the_block_is_refused():
    """A block over gate and up rows is one that neither the sync nor vLLM has."""
    with pytest.raises(ConfigError, match=r"intermediate size of 192, no multiple of 128.*weight_block"):
        convert_linears(model(moe_intermediate_size=192), Recipe(), LayerFilter())
    small = Recipe(weight_block=(64, 64), activation_block=(1, 64), gradient_block=(1, 64))
    assert convert_linears(model(moe_intermediate_size=192), small, LayerFilter()).converted


def test_exact_mode_refuses_the_architecture_by_name():
    """fp8.exact defines every operation of a model; the router's and the experts' are not among them."""
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM"):
        check_config(config(architectures=["Qwen3MoeForCausalLM"]))


# Qwen/Qwen3-30B-A3B's config.json; two of its 48 equal layers, as the rule looks at each by itself.
QWEN3_30B_A3B = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=2,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, tie_word_embeddings=False,
)  # fmt: skip


def parallel(tp: int, **kwargs) -> None:
    """check_tensor_parallel on it."""
    big = transformers.Qwen3MoeConfig(**QWEN3_30B_A3B)
    converted, _, shapes = split_layers(big, LayerFilter())
    assert len(converted) == 2 * (4 + 3 * 128)
    check_tensor_parallel(big, shapes, converted, (128, 128), tp, **kwargs)


@pytest.mark.parametrize("tp", [1, 2])
def test_qwen3_30b_a3b_takes_tensor_parallelism_of_two(tp):
    """768 / 2 = 384 is three blocks."""
    parallel(tp)


def test_qwen3_30b_a3b_refuses_tensor_parallelism_of_four():
    """768 / 4 = 192 is a block and a half, where vLLM would go over to blocks of 64; expert parallelism resolves it."""
    with pytest.raises(ConfigError) as raised:
        parallel(4)
    assert (
        "model.layers.0.mlp.experts.0.gate_proj has out_features 768 / 4 = 192, no multiple of 128"
        in raised.value.found
    )
    assert "smaller blocks than the trainer" in raised.value.found
    assert "actor_rollout_ref.rollout.expert_parallel_size=4" in raised.value.fix
    assert "tensor_model_parallel_size=4" in raised.value.asked
    parallel(4, expert_parallel=True)
