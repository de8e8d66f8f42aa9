"""The exact mode's operations: independence of batch and order, agreement of the two sides' use of them, gradients."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics import exact
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import convert_linears
from verl_fp8.trainer.exact import ExactDense, check_config, make_exact, make_fp32_head

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
ARCHS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def tiny(arch="qwen3", *, exact_mode=True, fp8=True, attn="sdpa"):
    config_class, model_class = ARCHS[arch]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        attn_implementation=attn,
        architectures=[model_class.__name__],
    )
    model = model_class(config).to(torch.bfloat16).eval()
    if fp8:
        recipe = Recipe(weight_block=(64, 64), activation_block=(1, 64), gradient_block=(1, 64))
        convert_linears(model, recipe, LayerFilter())
    if exact_mode:
        make_exact(model)
    return model


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("arch", ARCHS)
def test_forward_does_not_depend_on_the_batch(arch):
    """Alone, in a batch, left-padded: the same bits for the same tokens, of every architecture."""
    model = tiny(arch)
    ids = torch.randint(0, 64, (5, 24), generator=torch.Generator().manual_seed(1))
    together = logits(model, ids)
    for row in range(5):
        assert torch.equal(logits(model, ids[row : row + 1])[0], together[row])
    padded = torch.cat((torch.zeros(5, 7, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(5, 7, dtype=torch.long), torch.ones_like(ids)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(logits(model, padded, attention_mask=mask, position_ids=positions)[:, 7:], together)


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_sequences_equal_separate_ones(arch):
    """Sequences packed into one row (verl's remove_padding) give the same bits as each alone."""
    model = tiny(arch)
    parts = [torch.randint(0, 64, (1, n), generator=torch.Generator().manual_seed(n)) for n in (5, 17, 9)]
    positions = torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    packed = logits(model, torch.cat(parts, dim=1), position_ids=positions)[0]
    assert torch.equal(packed, torch.cat([logits(model, p)[0] for p in parts]))


def test_the_stock_model_does_depend_on_it():
    """The two tests above can fail: without the exact mode, eager and fused attention give other logits."""
    ids = torch.randint(0, 64, (5, 24), generator=torch.Generator().manual_seed(1))
    stock = [logits(tiny(exact_mode=False, attn=attn), ids) for attn in ("eager", "sdpa")]
    ours = [logits(tiny(attn=attn), ids) for attn in ("eager", "sdpa")]
    assert not torch.equal(*stock)
    assert torch.equal(*ours)


def test_apply_rope_is_hugging_faces():
    """One rotary formula: ours on half tables equals Hugging Face's function on doubled ones, bit for bit."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q = torch.randn(2, 3, 11, 64).to(torch.bfloat16)
    cos, sin = exact.rope_table(torch.arange(11), 64, 10_000.0, torch.bfloat16)
    theirs, _ = apply_rotary_pos_emb(q, q, torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])
    ours = exact.apply_rope(q.transpose(1, 2), cos[None], sin[None]).transpose(1, 2)
    assert torch.equal(ours, theirs)


def test_one_ulp_of_the_scales_is_seen(monkeypatch):
    """A third of the weight scales one ulp off (448 / amax written the PyTorch way) changes the logits."""
    from verl_fp8.numerics import linear

    model, original = tiny(), linear.quantize_weight
    ids = torch.randint(0, 64, (16, 64), generator=torch.Generator().manual_seed(2))
    before = logits(model, ids)

    def nudged(weight, recipe):
        quantized = original(weight, recipe)
        quantized.scale_inv.view(torch.int32).view(-1)[::3] += 1
        return quantized

    monkeypatch.setattr(linear, "quantize_weight", nudged)
    assert not torch.equal(before, logits(model, ids))
    monkeypatch.undo()
    assert torch.equal(before, logits(model, ids))


def test_one_ulp_of_one_scale_is_seen():
    """One scale of one block one ulp off changes the float64 product of every row that meets the block."""
    from verl_fp8.numerics.linear import gemm
    from verl_fp8.numerics.quantize import quantize

    generator = torch.Generator().manual_seed(4)
    x, w = torch.randn(8, 256, generator=generator), torch.randn(128, 256, generator=generator)
    x_q, w_q = quantize(x, (1, 128)), quantize(w, (128, 128))
    before = gemm(x_q, w_q, torch.float64, accumulate=torch.float64)
    w_q.scale_inv.view(torch.int32)[0, 1] += 1
    after = gemm(x_q, w_q, torch.float64, accumulate=torch.float64)
    assert (before != after).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_flow_to_every_parameter(arch):
    """Backward in ordinary precision: every parameter gets a finite gradient that is not zero, as in the stock
    model."""
    model = tiny(arch).train()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0, name


def test_gradients_equal_the_ordinary_operations():
    """with_ordinary_backward returns exactly the gradient of the ordinary function."""
    x = torch.randn(6, 32, requires_grad=True)
    w = torch.randn(32, requires_grad=True)

    def ordinary(a, b):
        return torch.nn.functional.rms_norm(a, (32,), b, 1e-6)

    g = torch.randn(6, 32)
    exact.with_ordinary_backward(lambda a, b: exact.rms_norm(a, b, 1e-6), ordinary, x, w).backward(g)
    expected = torch.autograd.grad(ordinary(x, w), (x, w), g)
    assert torch.equal(x.grad, expected[0]) and torch.equal(w.grad, expected[1])


def test_checkpointing_changes_nothing():
    """Gradient checkpointing recomputes the same bits: loss and gradients are equal."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    grads = []
    for checkpointing in (False, True):
        model = tiny().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_state_dict_keys_stay():
    """Exports and checkpoints see the stock model's keys."""
    assert tiny().state_dict().keys() == tiny(exact_mode=False, fp8=False).state_dict().keys()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (transformers.GPT2Config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (transformers.MixtralConfig(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
        (transformers.LlamaConfig(architectures=["LlamaForCausalLM"], hidden_act="gelu"), "gelu"),
        (
            transformers.LlamaConfig(
                architectures=["LlamaForCausalLM"],
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            ),
            "linear",
        ),
    ],
)
def test_undefined_models_are_refused_by_name(config, found):
    """What is not defined in one place for both sides is refused, by name."""
    with pytest.raises(ConfigError, match=found):
        check_config(config)


def test_fp32_head_gives_float32_logits():
    """fp8.lm_head=fp32 computes logits in float32 even under autocast; the stock head rounds them to bf16."""
    model, stock = tiny(exact_mode=False, fp8=False), tiny(exact_mode=False, fp8=False)
    make_fp32_head(model)
    ids = torch.arange(8)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = logits(model, ids), logits(stock, ids)
    assert ours.dtype == torch.float32 and theirs.dtype == torch.bfloat16
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(ours, torch.nn.functional.linear(hidden.float(), model.lm_head.weight.float()))


def test_unconverted_linears_become_exact_too():
    """A layer kept in bf16 is computed by the same definition on both sides, not by the platform's GEMM."""
    model = tiny(fp8=False)
    kinds = {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert kinds == {ExactDense}
