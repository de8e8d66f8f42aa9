"""The swap: which layers of a model are converted, what stays of them, and what is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.trainer.models import RECIPE, assert_equal_dicts, converted_linear, loss_and_gradients, tiny
from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.trainer.convert import BACKENDS, Backend, convert_linears
from verl_fp8.trainer.reference import ReferenceFp8Linear

PROJECTIONS = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
EXPECTED = {f"model.layers.{i}.{p}" for i in range(2) for p in PROJECTIONS}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_set_of_converted_names(kind):
    """Every projection, and not the head."""
    model = tiny(kind)
    before = model.state_dict()
    report = convert_linears(model, RECIPE, LayerFilter())
    assert set(report.converted) == EXPECTED
    assert report.skipped == {"lm_head": "output head"}
    assert {n for n, m in model.named_modules() if isinstance(m, ReferenceFp8Linear)} == EXPECTED
    assert report.summary() == "FP8: converted 14 of 15 linear layers (1 kept: lm_head (output head))"
    assert_equal_dicts(model.state_dict(), before)
    assert type(model.lm_head) is nn.Linear


def test_a_converted_model_differs_and_learns():
    """The forward is FP8 (not bit-equal to stock), and every converted weight gets a gradient."""
    model = tiny()
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    stock, _ = loss_and_gradients(model, ids)
    convert_linears(model, RECIPE, LayerFilter())
    loss, gradients = loss_and_gradients(model, ids)
    assert loss != stock
    assert all(gradients[f"{n}.weight"].any() for n in EXPECTED)


def test_meta_device():
    """verl builds the model on the meta device on all ranks but one: the same layers, nothing materialised."""
    model = tiny(device="meta")
    assert set(convert_linears(model, RECIPE, LayerFilter()).converted) == EXPECTED
    assert all(p.is_meta for p in model.parameters())
    stock = tiny()
    model.load_state_dict(stock.state_dict(), assign=True)
    assert_equal_dicts(model.state_dict(), stock.state_dict())


def test_what_a_module_carries_stays():
    """Parameter objects, requires_grad, dtype, hooks and mode."""
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 32)).eval()
    model[0].weight.requires_grad_(False)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    parameters = list(model.parameters())
    convert_linears(model, RECIPE, LayerFilter())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not model[0].weight.requires_grad
    assert not model[0].training
    model[0](torch.randn(2, 32, dtype=torch.bfloat16))
    assert calls == [1]


def test_a_converted_model_can_be_copied_and_pickled():
    """torch.save of whole modules and deepcopy (reference policies) keep class and recipe."""
    model = converted_linear()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is ReferenceFp8Linear
        assert other[0].recipe == RECIPE
    assert f"fp8={RECIPE.digest()}" in repr(model)


def test_tied_head_stays_tied():
    """A head tied to the embedding is kept, by its name, even if a pattern excludes it as well."""
    model = tiny(tie=True)
    report = convert_linears(model, RECIPE, LayerFilter(exclude=("lm_head",)))
    assert set(report.converted) == EXPECTED
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_weight_of_any_name_stays():
    """The weight's other owner would not follow."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.out = nn.Linear(32, 64, bias=False)
            self.inner = nn.Linear(32, 32)
            self.out.weight = self.embed.weight

    report = convert_linears(Model(), RECIPE, LayerFilter())
    assert report.converted == ("inner",)
    assert report.skipped == {"out": "weight tied to embed"}


class OtherLinear(nn.Linear):
    """A subclass with a forward of its own, as quantised layers have."""


def test_subclasses_stay():
    """Of a subclass we do not know what its forward adds."""
    model = nn.Sequential(OtherLinear(32, 32), nn.Linear(32, 32))
    report = convert_linears(model, RECIPE, LayerFilter())
    assert report.converted == ("1",)
    assert report.skipped == {"0": "not a plain nn.Linear but OtherLinear"}


def test_nothing_to_convert_is_an_error():
    """A run that asked for FP8 must not train in bf16; so converting twice, or a lone layer, is one too."""
    model = nn.Sequential(nn.Linear(32, 32))
    convert_linears(model, RECIPE, LayerFilter())
    for empty in (model, nn.Sequential(nn.ReLU()), nn.Linear(4, 4)):
        with pytest.raises(ConfigError, match="nothing to convert"):
            convert_linears(empty, RECIPE, LayerFilter())


def test_unknown_backend():
    """The key and the known backends are named, and the model is untouched."""
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ConfigError, match=r"fp8\.backend='te2'.*reference"):
        convert_linears(model, RECIPE, LayerFilter(), backend="te2")
    assert type(model[0]) is nn.Linear


def test_peft_is_refused():
    """LoRA's base layers and adapters are plain nn.Linear inside: converting them would quantise the adapter."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ConfigError, match="lora_rank"):
        convert_linears(model, RECIPE, LayerFilter())
    assert not [m for m in model.modules() if isinstance(m, ReferenceFp8Linear)]


class Wrapper(nn.Module):
    """What a backend with modules of its own returns."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight


def test_a_backend_may_return_new_modules_and_limit_shapes():
    """Replacements land under every name a shared module has; `multiple` becomes a reason."""

    def convert(linear, recipe):
        assert recipe is RECIPE
        return Wrapper(linear)

    def no_experts(module, recipe):
        raise AssertionError("there are none")

    other = Backend(name="other", linear=convert, experts=no_experts, multiple=(8, 16))
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared]), "narrow": nn.Linear(24, 32)})
    weight = shared.weight
    report = convert_linears(model, RECIPE, LayerFilter(), "other", {"other": other})
    assert report.converted == ("a", "b.0")
    assert report.skipped == {"narrow": "in_features not a multiple of 16"}
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], Wrapper)
    assert model["a"].weight is weight
    assert {name: backend.name for name, backend in BACKENDS.items()} == {n: n for n in ("reference", "te", "torch")}


def test_summary_counts_by_leaf_and_reason():
    """One line, however many layers."""
    model = nn.ModuleDict(
        {f"layer{i}": nn.ModuleDict({"gate": nn.Linear(32, 4), "fc": nn.Linear(32, 32)}) for i in range(3)}
    )
    summary = convert_linears(model, RECIPE, LayerFilter(exclude=("layer0.fc",))).summary()
    assert summary == (
        "FP8: converted 2 of 6 linear layers (3 kept: gate (MoE router); 1 kept: fc (excluded by 'layer0.fc'))"
    )
