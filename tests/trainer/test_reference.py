"""The reference layer inside real modules: shapes, autocast, gradient checkpointing, FSDP2."""

import copy

import pytest
import torch

from tests.trainer.models import BACKWARDS, RECIPE, assert_equal_dicts, converted_linear, loss_and_gradients, tiny
from verl_fp8.errors import DataError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.linear import fp8_linear_forward
from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import convert_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12, 80), (3, 4, 80), (0, 80), (2, 0, 80), (80,)])
def test_forward_of_any_leading_shape(bias, shape):
    """Tokens are flattened; the bias is added after the rounding to bf16."""
    layer = converted_linear(bias, torch.bfloat16)[0]
    x = torch.randn(shape, dtype=torch.bfloat16)
    expected = fp8_linear_forward(x, quantize(layer.weight.detach(), (32, 32)), RECIPE)
    expected = expected + layer.bias if bias else expected
    assert torch.equal(layer(x), expected)


def test_autocast_quantises_bf16():
    """float32 parameters and inputs under bf16 autocast: quantised from bf16, gradients back in float32."""
    model = converted_linear()
    x = torch.randn(12, 80)
    stock = converted_linear(dtype=torch.bfloat16)
    stock.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, stock(x.bfloat16()))
    y.float().square().sum().backward()
    stock(x.bfloat16()).float().square().sum().backward()
    for parameter, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, expected.grad.float())


def test_a_diverged_weight_stops_the_forward():
    """NaN weights raise where a bf16 layer would train on."""
    model = converted_linear()
    with torch.no_grad():
        model[0].weight[3, 4] = float("nan")
    with pytest.raises(DataError, match=r"\[3, 4\]"):
        model(torch.randn(2, 80))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_checkpointing_is_bit_equal(backward):
    """Non-reentrant gradient checkpointing, as verl switches it on, changes no bit of loss or gradients."""
    model = tiny()
    convert_linears(model, Recipe((32, 32), (1, 32), (1, 32), backward=backward), LayerFilter())
    model.train()
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    loss, gradients = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, regained = loss_and_gradients(model, ids)
    assert torch.equal(loss, again)
    assert_equal_dicts(gradients, regained)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_fsdp2_is_bit_equal(backward):
    """fully_shard with bf16 parameters, resharding after the forward: loss and gradients of the unsharded model."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = tiny()
    convert_linears(model, Recipe((32, 32), (1, 32), (1, 32), backward=backward), LayerFilter())
    sharded = copy.deepcopy(model)
    for parameter in model.parameters():  # not .to(): FSDP2 leaves buffers, the rope frequencies, in float32
        parameter.data = parameter.data.bfloat16()
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    loss, gradients = loss_and_gradients(model, ids)
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(sharded, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        again, regained = loss_and_gradients(sharded, ids)
        regained = {n: g.full_tensor().bfloat16() for n, g in regained.items()}
    finally:
        destroy_process_group()
    assert torch.equal(loss, again)
    assert_equal_dicts(gradients, regained)
