"""Variants of one model: each differs by its cause and by nothing else, leaves no trace, and is attributed where it acts."""

import json

import pytest
import torch
import transformers

from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.tools.mismatch.attribute import attribute, attribution_page, rows, text, trace
from verl_fp8.tools.mismatch.causes import CodesLinear, causes, contract_quantizer, to_codes, vllm_quantizer
from verl_fp8.tools.mismatch.compare import compare, relative
from verl_fp8.tools.mismatch.probes import order, recording
from verl_fp8.trainer.convert import convert_linears
from verl_fp8.trainer.exact import ExactDense, make_exact
from verl_fp8.trainer.reference import ReferenceFp8Linear

RECIPE = Recipe(weight_block=(64, 64), activation_block=(1, 64), gradient_block=(1, 64))
IDS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
# One ulp of a scale flips a bf16 rounding about once in 10^5 values.
MANY = torch.randint(0, 64, (16, 64), generator=torch.Generator().manual_seed(2))
START = 4


def model(*, fp8: bool):
    """A Qwen3 of two layers, exact; with FP8 codes or without."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    built = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():  # logits and norm weights as different as a trained model's
        built.lm_head.weight.mul_(20)
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    linears = {n: m for n, m in built.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    codes = {n: quantize(m.weight.detach(), RECIPE.weight_block) for n, m in linears.items()}
    make_exact(built)
    if fp8:
        to_codes(built, codes, RECIPE)
    return built


@pytest.fixture(scope="module", params=[True, False], ids=["fp8", "bf16"])
def exact_model(request):
    """(model, whether it has FP8 layers)."""
    return model(fp8=request.param), request.param


def same(a, b) -> bool:
    """Log-probs and streams equal to the bit."""
    return torch.equal(a.log_probs, b.log_probs) and all(map(torch.equal, a.stream, b.stream))


def test_a_cause_acts_and_leaves_no_trace(exact_model):
    """Inside its context something differs, after it the baseline's bits are back; for every cause."""
    built, fp8 = exact_model
    baselines = {ids: trace(built, ids, START) for ids in (IDS, MANY)}
    for cause in causes(fp8=fp8):
        if cause.apply is None:
            continue
        ids = MANY if cause.name == "weight scales" else IDS
        with cause.apply(built):
            changed = trace(built, ids, START)
        # Whether the platform's GEMM reaches a rounding on these tokens depends on the processor: the next test.
        assert cause.name == "gemm order" or not same(baselines[ids], changed), cause.name
        assert same(baselines[ids], trace(built, ids, START)), cause.name


def test_gemm_order_is_another_product_in_every_layer(exact_model):
    """Every linear layer but the head leaves float64 inside the context, and is back after it.

    Bits are no measure here: where two float32 sums differ, the rounding to bf16 hides it on some processors for all tokens."""
    built, fp8 = exact_model
    head = built.get_output_embeddings()
    linears = [m for m in built.modules() if isinstance(m, torch.nn.Linear) and m is not head]

    def products() -> set:
        return {(type(m), getattr(m, "accumulate", None)) for m in linears}

    wide = products()
    with next(c for c in causes(fp8=fp8) if c.name == "gemm order").apply(built):
        assert products() == ({(CodesLinear, torch.float32)} if fp8 else {(torch.nn.Linear, None)})
    assert products() == wide == ({(CodesLinear, torch.float64)} if fp8 else {(ExactDense, None)})


def test_a_cause_that_changes_no_bit_is_said(exact_model):
    """The table marks it and the text names it: it can't be acted on this machine, which says nothing about another."""
    built, fp8 = exact_model
    found = attribute(built, IDS, START, fp8=fp8) | {"seconds": 1.0}
    assert not found["causes"]["batch shape"]["acts"] and found["causes"]["attention eager"]["acts"]
    still = ", ".join(name for name, row in found["causes"].items() if not row["acts"])
    assert f"no bit changed on this machine, which says nothing about another: {still}" in text(found)


def test_the_batch_is_no_cause_of_the_exact_forward(exact_model):
    """Each sequence alone: the same bits."""
    built, _ = exact_model
    assert same(trace(built, IDS, START), trace(built, IDS, START, alone=True))


def test_codes_given_are_codes_computed_with():
    """CodesLinear on a layer's own codes is the reference layer, bit for bit."""
    torch.manual_seed(0)
    reference, other = (torch.nn.Sequential(torch.nn.Linear(128, 192).bfloat16()) for _ in range(2))
    other.load_state_dict(reference.state_dict())
    convert_linears(reference, RECIPE, LayerFilter())
    assert isinstance(reference[0], ReferenceFp8Linear)
    codes = {"0": quantize(other[0].weight.detach(), RECIPE.weight_block)}
    to_codes(other, codes, RECIPE, contract_quantizer, torch.float32)
    x = torch.randn(5, 7, 128).bfloat16()
    with torch.no_grad():
        assert torch.equal(reference(x), other(x))


def test_vllms_quantiser_is_another_one():
    """The same codes where amax is a power of two times 448; else a few codes differ (3.3e-4 counted on normal data)."""
    x = torch.randn(64, 256).bfloat16().clamp(-400, 400)
    ours, theirs = contract_quantizer(x, RECIPE), vllm_quantizer(x, RECIPE)
    share = float((ours.data.view(torch.uint8) != theirs.data.view(torch.uint8)).float().mean())
    assert not torch.equal(ours.scale_inv, theirs.scale_inv) and share < 5e-3
    x[:, ::64] = 448.0
    ours, theirs = contract_quantizer(x, RECIPE), vllm_quantizer(x, RECIPE)
    assert torch.equal(ours.scale_inv, theirs.scale_inv)
    assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))


def test_the_table_says_where_it_starts():
    """Attention acts in layer 0, the head in no layer, one ulp of the scales is seen; the result survives JSON and HTML."""
    found = attribute(model(fp8=True), MANY, START, fp8=True)
    alone = {name: row["alone"] for name, row in found["causes"].items()}
    assert alone["attention eager"]["starts"] == 0 and alone["lm_head"]["starts"] is None
    assert alone["weight scales"]["max"] > 0 and alone["batch shape"]["max"] == 0
    assert found["all"]["k3"] > 0 and found["tokens"] == MANY.numel() - 16 * START
    assert {n for n, row in found["causes"].items() if "without" in row} == {
        c.name for c in causes(fp8=True) if c.ordinary
    }
    found |= {"model": "tiny", "recipe": RECIPE.to_dict(), "seconds": 1.0}
    assert json.loads(json.dumps(found)) == found
    assert all(name in text(found) for name in found["causes"]) and len(rows(found)) == len(found["causes"]) + 1
    page = attribution_page(found)
    assert "weight scales" in page and "http-equiv" not in page and 'src="http' not in page


def test_points_are_the_modules_values():
    """Every point of every layer is there in order; fused ones are the projections side by side, chunks of a prefill joined."""
    built = model(fp8=True)
    seen = []
    handle = built.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, args, out: seen.append(out[0]))
    with torch.no_grad(), recording(built) as found:
        built(input_ids=IDS[:1], use_cache=False)
    handle.remove()
    assert list(order(2)) == [p for p in order(2) if p in found] and set(found) == set(order(2))
    assert torch.equal(found["layers.1.qkv"][:, 128:192], seen[0])
    with torch.no_grad(), recording(built) as twice:
        built(input_ids=IDS[:1, :10], use_cache=False)
        built(input_ids=IDS[:1, :10], use_cache=False)
    assert torch.equal(twice["layers.0.gate_up"][:10], found["layers.0.gate_up"][:10]) and len(twice["norm"]) == 20


def test_figures():
    """k3 = mean(r - 1 - log r), the relative difference in float64, zero for equal tensors."""
    a, b = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -2.0]).double()
    found = compare(a, b)
    assert found["max"] == 0.5 and found["k3"] == pytest.approx((torch.tensor(0.5).double().exp() - 1.5).item() / 2)
    assert relative(a, a) == 0 and relative(torch.zeros(2), torch.zeros(2)) == 0
