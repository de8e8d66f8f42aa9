"""The weight sync's contents: codes, scales, manifest, and what the receiving end refuses."""

import json

import pytest
import torch

from verl_fp8.errors import DataError, SyncError
from verl_fp8.numerics.quantize import quantize
from verl_fp8.rollout.worker import loaded_shard
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.stream import MANIFEST, Incoming, SyncStats, outgoing

LAYERS = ("m.0.q_proj", "m.0.o_proj")


def settings(**kwargs):
    return Fp8Settings.parse({"mode": "unified", "recipe": {"weight_block": [64, 64]}, **kwargs})


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed.weight", torch.randn(32, 128, generator=generator)),
        ("m.0.q_proj.weight", torch.randn(192, 128, generator=generator)),
        ("m.0.q_proj.bias", torch.randn(192, generator=generator)),
        ("m.0.o_proj.weight", torch.randn(128, 192, generator=generator)),
        ("lm_head.weight", torch.randn(32, 128, generator=generator)),
        ("counter", torch.tensor([3], dtype=torch.int64)),
    ]


def sent(transport="codes", **kwargs):
    return list(outgoing(weights(), settings(weight_sync=transport), LAYERS, **kwargs))


def incoming(**kwargs):
    return Incoming(settings(**kwargs), frozenset(LAYERS))


def test_codes_are_the_quantisers_of_the_bf16_weight():
    """The stream holds the quantiser's own codes and scales of the bf16 weight, and bf16 for the rest."""
    stream = dict(sent())
    for name, weight in weights():
        if name.removesuffix(".weight") in LAYERS:
            expected = quantize(weight.to(torch.bfloat16), (64, 64))
            assert torch.equal(stream[name].view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(stream[name.removesuffix(".weight") + ".weight_scale_inv"], expected.scale_inv)
        elif weight.is_floating_point():
            assert torch.equal(stream[name], weight.to(torch.bfloat16))
        else:
            assert torch.equal(stream[name], weight)


def test_bytes_are_counted_as_sent():
    """One byte a weight and four bytes a scale for the FP8 layers; the total is what crossed the transport."""
    stats = SyncStats()
    stream = sent(stats=stats)
    n_weights, n_scales = 2 * 192 * 128, 3 * 2 + 2 * 3
    assert stats.fp8_bytes == n_weights + 4 * n_scales
    assert stats.bytes_per_weight == (n_weights + 4 * n_scales) / n_weights
    assert stats.total_bytes == sum(tensor.nbytes for _, tensor in stream)


def test_skipped_names_are_not_sent():
    """A tied duplicate never reaches the transport."""
    assert "lm_head.weight" not in dict(sent(skip=frozenset({"lm_head.weight"})))


@pytest.mark.parametrize("transport", ["codes", "bf16"])
def test_both_transports_load_the_same_bytes(transport):
    """bf16 transport, quantised on arrival, gives the very codes and scales that codes transport ships."""
    receiver = incoming(weight_sync=transport)
    loaded = dict(receiver.take(sent(transport)))
    receiver.finish()
    reference = {name: tensor for name, tensor in sent() if name != MANIFEST}
    assert loaded.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(loaded[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_buckets_of_one_tensor_are_enough():
    """The manifest covers tensors that arrived in earlier buckets."""
    receiver = incoming()
    for item in sent():
        receiver.take([item])
    receiver.finish()


def test_a_stream_without_manifest_is_refused():
    """Stock verl's stream proves nothing and must not pass as an FP8 sync."""
    receiver = incoming()
    receiver.take(sent()[:-1])
    with pytest.raises(SyncError, match="manifest"):
        receiver.finish()


def flip_code(stream):
    stream["m.0.q_proj.weight"].view(torch.uint8)[5, 7] ^= 1


def flip_scale_ulp(stream):
    stream["m.0.o_proj.weight_scale_inv"].view(torch.int32)[0, 0] += 1


def flip_norm(stream):
    stream["m.0.q_proj.bias"].view(torch.int16)[0] ^= 1


def drop(stream):
    del stream["m.0.q_proj.bias"]


def add(stream):
    stream["extra"] = torch.zeros(1)
    stream[MANIFEST] = stream.pop(MANIFEST)


@pytest.mark.parametrize("damage", [flip_code, flip_scale_ulp, flip_norm, drop, add])
def test_any_difference_of_bytes_stops_the_sync(damage):
    """One bit of a code, one ulp of one scale, a bf16 bit, a missing or a foreign tensor: each is seen."""
    stream = dict(sent())
    damage(stream)
    with pytest.raises(SyncError, match="bytes"):
        incoming().take(stream.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": {"weight_block": [64, 64], "scale_format": "pow2"}}, "recipe"),
        ({"recipe": {"weight_block": [64, 64], "eps": 1e-10}}, "recipe"),
        ({"weight_sync": "bf16"}, "fp8.weight_sync|precision"),
    ],
)
def test_another_recipe_is_refused(change, message):
    """The rollout compares the trainer's recipe and transport with its own."""
    with pytest.raises(SyncError, match=message):
        receiver = incoming(**change)
        receiver.take([(n, t) for n, t in sent() if t.dtype != torch.float8_e4m3fn])
        receiver.finish()


def test_another_layer_set_is_refused():
    """A layer that the rollout keeps in bf16 must not arrive as codes, nor the other way round."""
    fewer = Incoming(settings(), frozenset(LAYERS[:1]))
    with pytest.raises(SyncError, match="o_proj"):
        fewer.take(sent())
    more = Incoming(settings(), frozenset({*LAYERS, "lm_head"}))
    with pytest.raises(SyncError, match="lm_head"):
        more.take(sent())


def test_a_non_finite_weight_names_the_tensor():
    """NaN in one layer's weights raises with that tensor's name."""
    bad = [(n, t.clone()) for n, t in weights()]
    bad[3][1][0, 0] = float("nan")
    with pytest.raises(DataError) as caught:
        list(outgoing(bad, settings(), LAYERS))
    assert "m.0.o_proj.weight" in str(caught.value)


def test_a_layer_that_never_came_is_an_error():
    """An FP8 layer without a weight in the stream cannot pass silently."""
    with pytest.raises(SyncError, match="m.1.q_proj"):
        list(outgoing(weights(), settings(), (*LAYERS, "m.1.q_proj")))


def test_manifest_is_json():
    """The manifest is plain JSON with one checksum a tensor."""
    stream = sent()
    manifest = json.loads(bytes(stream[-1][1].numpy()))
    assert stream[-1][0] == MANIFEST
    assert manifest["checksums"].keys() == {name for name, _ in stream[:-1]}


@pytest.mark.parametrize("rank", [0, 1])
def test_loaded_shard_of_a_fused_column_parallel_layer(rank):
    """Parts of a fused parameter are compared at their own offsets, codes and scales alike, key heads replicated or
    not."""
    q, k = torch.arange(256 * 4).reshape(256, 4), torch.arange(128 * 4).reshape(128, 4) + 10_000
    # TP 2: q is divided, k has a single head and is replicated.
    parameter = torch.cat((q[rank * 128 : (rank + 1) * 128], k))
    for index, full in ((0, q), (1, k)):
        held, expected = loaded_shard(parameter, full, [128, 128], index, (1, 1), (rank, 2))
        assert torch.equal(held, expected)
    scales = torch.arange(2 * 4).reshape(2, 4)
    held, expected = loaded_shard(scales[rank : rank + 1], scales, [128], 0, (128, 1), (rank, 2))
    assert torch.equal(held, expected)


def test_loaded_shard_of_a_row_parallel_layer():
    """A row-parallel layer holds a slice of columns."""
    full = torch.arange(8 * 6).reshape(8, 6)
    held, expected = loaded_shard(full[:, 3:], full, [8], 0, (1, 1), (1, 2))
    assert torch.equal(held, expected)


def test_loaded_shard_sees_a_swapped_layout():
    """Two parts loaded in the wrong order differ from what they should hold."""
    gate, up = torch.zeros(4, 2), torch.ones(4, 2)
    held, expected = loaded_shard(torch.cat((up, gate)), gate, [4, 4], 0, (1, 1), (0, 1))
    assert not torch.equal(held, expected)
