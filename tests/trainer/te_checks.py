"""What tests/trainer/test_te.py asserts about one version of TransformerEngine; each check runs inside te_host.py."""

import copy
import inspect
import itertools

import te_host
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import Float8BlockScaling

from verl_fp8.errors import ContractError, DataError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer import te
from verl_fp8.trainer.convert import BACKENDS, convert_linears

RECIPES = [Recipe(scale_format=s, backward=b, eps=e) for s, b, e in itertools.product(
    ("fp32", "pow2"), ("fp8", "high_precision", "dequantized"), (0.0, 1e-4)
)]  # fmt: skip


def block_of(backend, recipe, bias=True, dtype=torch.bfloat16):
    """Two linear layers with ragged sizes, converted."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(192, 144, bias=bias), nn.SiLU(), nn.Linear(144, 80, bias=bias)).to(dtype)
    convert_linears(module, recipe, LayerFilter(), backend)
    return module


def run(module, x, recompute=False):
    """Output and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def check_signatures():
    """The arguments te.py passes are accepted under these names."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    wanted = [
        "A",
        "B",
        "out",
        "quantization_params",
        "out_dtype",
        "layout",
        "m_splits",
        "gelu",
        "grad",
        "accumulate",
        "bias",
    ]
    assert list(inspect.signature(general_grouped_gemm).parameters)[:11] == wanted
    options = {"rowwise", "columnwise", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim"}
    assert options <= inspect.signature(Float8BlockQuantizer).parameters.keys()
    module = inspect.signature(te.transformer_engine().Linear.__init__).parameters
    assert {"in_features", "out_features", "bias", "params_dtype", "device"} <= module.keys()
    assert {"enabled", "recipe"} <= inspect.signature(te.transformer_engine().autocast.__init__).parameters.keys()
    assert {"fp8_format", "backward_override"} <= inspect.signature(Float8BlockScaling).parameters.keys()


def check_recipe_read_back():
    """Every recipe of ours arrives in the object, whatever TransformerEngine's environment variables say."""
    for recipe in RECIPES:
        built = te.te_recipe(recipe)
        for name in te.QPARAMS:
            params = getattr(built, name)
            assert (params.power_2_scale, params.amax_epsilon) == (recipe.scale_format == "pow2", recipe.eps), name
        assert built.backward_override == (None if recipe.backward == "fp8" else recipe.backward)


def check_constructor_traps():
    """Why te_recipe sets attributes: the constructor ignores the scale format."""
    assert Float8BlockScaling(use_f32_scales=True).fp8_quant_fwd_weight.power_2_scale
    assert te.te_recipe(Recipe(scale_format="fp32")).fp8_quant_fwd_weight.power_2_scale is False


def check_conversion_keeps_parameters():
    """The same Parameter objects under the same state-dict keys, no extra state, mode kept; loads a plain state
    dict."""
    plain = nn.Sequential(nn.Linear(192, 144), nn.Linear(144, 80, bias=False)).eval()
    parameters, state = dict(plain.named_parameters()), {k: v.clone() for k, v in plain.state_dict().items()}
    convert_linears(plain, Recipe(), LayerFilter(), "te")
    assert all(isinstance(m, te.transformer_engine().Linear) and not m.training for m in plain)
    assert {n: id(p) for n, p in plain.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert list(plain.state_dict()) == list(state)
    assert not plain.load_state_dict(state).missing_keys
    assert "_is_fsdp2" not in plain[0].__dict__  # no forward has run


def check_converts_on_meta():
    """A model on the meta device converts, and its layers stay there."""
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(128, 128))
    convert_linears(plain, Recipe(), LayerFilter(), "te")
    assert plain[0].weight.device.type == "meta"


def check_equals_the_reference():
    """Forward, dgrad, wgrad and bias gradient: bit-equal to the reference layer, for every recipe, without and with
    autocast."""
    for recipe, autocast in itertools.product(RECIPES, (False, True)):
        x = torch.randn(3, 45, 192, dtype=torch.float32 if autocast else torch.bfloat16, generator=torch.manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = run(block_of("reference", recipe), x)
            found = run(block_of("te", recipe), x)
        names = ("y", "dx", "dW1", "db1", "dW2", "db2")
        different = [n for n, a, b in zip(names, expected, found, strict=True) if not torch.equal(a, b)]
        assert not different, (recipe, autocast, different)


def check_what_is_quantized():
    """One layer's calls: activation 1x128, weight 128x128 and gradient 1x128, all from bf16 with the recipe's
    format."""
    recipe = Recipe(scale_format="fp32", eps=1e-4)
    module = nn.Sequential(nn.Linear(192, 144, bias=False)).bfloat16()
    convert_linears(module, recipe, LayerFilter(), "te")
    te_host.CALLS.clear()
    run(module, torch.randn(100, 192, dtype=torch.bfloat16))
    quantized = [call[1:] for call in te_host.CALLS if call[0] == "quantize"]
    end = (torch.bfloat16,), ("fp32", 1e-4, False)
    assert quantized == [
        ((128, 192), *end[0], (1, 128), *end[1]),
        ((144, 192), *end[0], (128, 128), *end[1]),
        ((128, 144), *end[0], (1, 128), *end[1]),
    ]
    assert [call[3] for call in te_host.CALLS if call[0] == "gemm"] == [True, True, True]


def check_recompute():
    """Non-reentrant checkpointing recomputes in FP8 and gives the same bits."""
    x = torch.randn(40, 192, dtype=torch.bfloat16)
    module = block_of("te", Recipe())
    plain = run(module, x)
    module.zero_grad()
    te_host.CALLS.clear()
    again = run(module, x, recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert sum(call[0] == "gemm" for call in te_host.CALLS) == 2 * 2 + 4


def check_fsdp2():
    """Sharded by FSDP2 with fp32 masters and bf16 compute, recomputed: the bits of the unsharded bf16 model; experts
    too.

    TransformerEngine sees the sharding, keeps no weight codes and quantises the gathered weight again in the backward.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    x = torch.randn(40, 192, dtype=torch.bfloat16)
    expected = run(block_of("te", Recipe()), x)
    module = block_of("te", Recipe()).float()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    te_host.CALLS.clear()
    found = run(module, x, recompute=True)
    found = [t.full_tensor().bfloat16() if hasattr(t, "full_tensor") else t for t in found]
    different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not different, different
    assert module[0].is_fsdp2 and module[2].is_fsdp2
    weights = sum(call[0] == "quantize" and call[3] == (128, 128) for call in te_host.CALLS)
    assert weights == 6, weights  # forward, recomputation, dgrad; two layers
    expected = run_experts(experts_of("te", Recipe()), ROUTINGS[0])
    module = experts_of("te", Recipe()).float()
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = run_experts(module, ROUTINGS[0], recompute=True)
    found = [t.full_tensor().bfloat16() if hasattr(t, "full_tensor") else t for t in found]
    different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not different, different
    torch.distributed.destroy_process_group()


def experts_of(backend, recipe):
    """The experts of a Qwen3-MoE layer, converted: 5 of them, 128 wide."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(0)
    module = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=144, moe_intermediate_size=128, num_experts=5))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module = module.bfloat16()
    BACKENDS[backend].experts(module, recipe)
    return module


def run_experts(module, index, recompute=False):
    """Output and gradients of input, routing weights and both parameters."""
    generator = torch.manual_seed(1)
    x = torch.randn(len(index), 144, dtype=torch.bfloat16, generator=generator).requires_grad_()
    weights = torch.rand(index.shape, dtype=torch.bfloat16, generator=generator).requires_grad_()
    y = checkpoint(module, x, index, weights, use_reentrant=False) if recompute else module(x, index, weights)
    y.float().square().sum().backward()
    # Zeros where no gradient arrived (no expert at all), as everywhere in the reference.
    leaves = (x, weights, *module.parameters())
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


# Two experts a token: 150 tokens for expert 0, a few for the others, none for the last; one token; other ranks' experts
# only.
ROUTINGS = (
    torch.stack([torch.zeros(150, dtype=torch.long), torch.tensor([1, 1, 2, 3, 5])[torch.arange(150) % 5]], dim=1).flip(
        0
    ),
    torch.tensor([[3, 1]]),
    torch.full((3, 2), 5),
)


def check_experts_equal_the_reference():
    """Fused experts by the grouped GEMM: forward, dgrad, wgrad and the router's gradient bit-equal, every recipe and
    routing."""
    for recipe, index in itertools.product(RECIPES, ROUTINGS):
        expected, found = (run_experts(experts_of(backend, recipe), index) for backend in ("reference", "te"))
        names = ("y", "dx", "dweights", "dW_gate_up", "dW_down")
        different = [n for n, a, b in zip(names, expected, found, strict=True) if not torch.equal(a, b)]
        assert not different, (recipe, len(index), different)


def check_experts_recompute_and_freeze():
    """Recomputed, with frozen experts, and under no_grad: the same bits, and no product that nobody wants."""
    recipe, index = Recipe(), ROUTINGS[0]
    module = experts_of("te", recipe)
    plain = run_experts(module, index)
    module.zero_grad()
    te_host.CALLS.clear()
    assert all(torch.equal(a, b) for a, b in zip(plain, run_experts(module, index, recompute=True), strict=True))
    # Four experts have tokens; two projections; forward twice, dgrad, wgrad.
    assert sum(call[0] == "gemm" for call in te_host.CALLS) == 4 * 2 * 4
    frozen = experts_of("te", recipe).requires_grad_(False)
    te_host.CALLS.clear()
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], run_experts(frozen, index)[:3], strict=True))
    assert sum(call[0] == "gemm" for call in te_host.CALLS) == 4 * 2 * 2
    with torch.no_grad():
        x = torch.randn(150, 144, dtype=torch.bfloat16, generator=torch.manual_seed(1))
        weights = torch.ones(index.shape, dtype=torch.bfloat16)
        assert torch.equal(module(x, index, weights), experts_of("reference", recipe)(x, index, weights))


def check_experts_padding():
    """Each expert's tokens are filled up to whole blocks, quantised along tokens and hidden; its weight in 128x128."""
    te_host.CALLS.clear()
    run_experts(experts_of("te", Recipe()), torch.tensor([[3, 1]]))
    quantized = [call[1:] for call in te_host.CALLS if call[0] == "quantize"]
    up = [((128, 144), (1, 128))] * 2 + [((256, 144), (128, 128))] * 2
    down = [((128, 128), (1, 128))] * 2 + [((144, 128), (128, 128))] * 2
    backward = [((128, 144), (1, 128))] * 2 + down[2:] + [((128, 256), (1, 128))] * 2 + up[2:]
    assert [(shape, block) for shape, _, block, *_ in quantized] == up + down + backward


def check_dequantize_is_ours():
    """Float8BlockwiseQTensor's own dequantize() of our codes and scales equals ours."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    for scale_format, dimensions, shape in itertools.product(("fp32", "pow2"), (1, 2), ((130, 200), (256, 384))):
        x = torch.randn(shape, dtype=torch.bfloat16)
        quantizer = Float8BlockQuantizer(
            te_host.DType.kFloat8E4M3, rowwise=True, columnwise=False,
            force_pow_2_scales=scale_format == "pow2", block_scaling_dim=dimensions,
        )  # fmt: skip
        block = (1, 128) if dimensions == 1 else (128, 128)
        for dtype in (torch.bfloat16, torch.float32):
            theirs = te_host.quantize(x, quantizer).dequantize(dtype=dtype)
            assert torch.equal(theirs, quantize(x, block, scale_format=scale_format).dequantize(dtype))


def check_refuses_another_dtype():
    """A float32 weight under bf16 activations is refused: its codes would differ."""
    module = block_of("te", Recipe(), dtype=torch.float32)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(4, 192))
    except DataError as error:
        assert "param_dtype=bf16" in str(error)
    else:
        raise AssertionError("no refusal")


def check_other_quantizers_are_refused():
    """A layer whose quantisers are not the recipe's raises at its first forward."""
    module = block_of("te", Recipe())
    module[0].recipe = Recipe(scale_format="pow2")
    try:
        module(torch.randn(4, 192, dtype=torch.bfloat16))
    except ContractError as error:
        assert "activation quantiser" in str(error)
    else:
        raise AssertionError("no refusal")


def check_copies():
    """A converted model can be deep-copied and gives the same bits."""
    x = torch.randn(40, 192, dtype=torch.bfloat16)
    module = block_of("te", Recipe())
    assert torch.equal(module(x), copy.deepcopy(module)(x))
