"""What vLLM derives from weights after loading, in real vLLM: a sync reaches it, a check finds one that did not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm import _custom_ops

from verl_fp8.errors import SyncError
from verl_fp8.rollout import derived

HAS_PACK = hasattr(torch.ops._C, "causal_conv1d_weight_pack")


def checks(folder: Path, *arguments: str) -> dict:
    """One run of derived_checks.py in a process of its own."""
    script = Path(__file__).with_name("derived_checks.py")
    run = subprocess.run(
        [sys.executable, str(script), str(folder), *arguments], capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> dict:
    """A tiny DeepSeek-V3 in FP8, kv_b_proj included, synced twice from trainers with other weights, then spoilt."""
    return checks(tmp_path_factory.mktemp("mla"), "deepseek_v3")


@pytest.fixture(scope="module")
def delta(tmp_path_factory) -> dict:
    """The same with a tiny Qwen3-Next."""
    return checks(tmp_path_factory.mktemp("delta"), "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("sync", [1, 2])
def test_decoding_uses_the_weights_of_the_sync(latent, sync):
    """Decoding multiplies by W_UK and W_UV, prefill by kv_b_proj. Measured: mean |difference| to the trainer 0.0134 and
    0.0139 decoded, 0.0113 and 0.0126 prefilled; 0.186 decoded with stale ones."""
    assert latent[f"sync {sync}"] == "" and latent["probed"] == 2
    found, stale = latent[f"compared {sync}"], latent["stale"]
    assert found["decode mean"] < 2 * found["prefill mean"]
    assert 4 * found["decode k3"] < stale["decode k3"]


@pytest.mark.slow
def test_a_dropped_rebuild_is_invisible_to_prefill_and_found_by_the_probe(latent):
    """Nothing compared with what was sent could find it: every byte of kv_b_proj is the trainer's."""
    assert "W_UK of model.layers.0.self_attn" in latent["rebuild dropped"]
    assert latent["stale"]["prefill mean"] < 2 * latent["compared 1"]["prefill mean"]
    assert 4 * latent["stale"]["prefill mean"] < latent["stale"]["decode mean"]
    assert latent["whole again"] == ""


@pytest.mark.slow
def test_one_value_is_found(latent):
    """One of 131,072 is one FP8 code off."""
    assert "W_UV of model.layers.0.self_attn" in latent["one value"]


@pytest.mark.slow
def test_what_no_sync_reaches_is_refused_by_name(latent):
    """A layer that vLLM packed for AMX, and one whose method derives something unknown."""
    assert "attention_config.backend=CPU_MLA" in latent["packed for AMX"]
    assert "kv_b_proj holds Packing" in latent["another method"]
    assert latent["backend"] == "CPU_MLA"  # chosen for it on every processor


@pytest.mark.slow
def test_graphs_keep_their_addresses(latent, delta):
    """Two weights a layer of MLA; the packed convolution where the processor has AVX-512-BF16."""
    assert latent["same storage"] and latent["derived"] == 4
    assert delta["same storage"] and delta["derived"] == int(torch.cpu._is_avx512_bf16_supported())


@pytest.mark.slow
def test_a_sync_reaches_packed_convolutions(delta):
    """Qwen3-Next's delta nets, decoded and prefilled, on processors of both kinds."""
    assert delta["sync 1"] == delta["sync 2"] == delta["whole again"] == ""
    for sync in (1, 2):
        found = delta[f"compared {sync}"]
        assert found["decode mean"] < 2 * found["prefill mean"]


class Holder(torch.nn.Module):
    """A layer whose hook makes a new tensor, as vLLM's do before 0.30 and some of its backends still do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.process_weights_after_loading()

    def process_weights_after_loading(self):
        self.doubled = 2 * self.weight.data


def test_a_hook_that_allocates_ends_in_the_old_storage():
    """What a CUDA graph has captured is an address."""
    holder = Holder()
    held = holder.doubled
    holder.weight.data.fill_(3)
    derived._in_place([holder, None], holder.process_weights_after_loading)
    assert holder.doubled is held and torch.equal(held, torch.full((4, 4), 6.0))


@pytest.mark.skipif(not HAS_PACK or not torch.cpu._is_avx512_bf16_supported(), reason="vLLM packs nothing here")
def test_a_packed_convolution_opens_and_closes():
    """The loader sees the checkpoint's shape; afterwards the kernel sees the new weights where the old ones were."""
    plain = torch.randn(64, 4, dtype=torch.bfloat16)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(_custom_ops.causal_conv1d_weight_pack(plain.clone()), requires_grad=False)
    layer._cpu_unpacked_conv_weight = plain.clone()
    model, address = torch.nn.Sequential(layer), layer.weight.data_ptr()
    derived.open_packed(model)
    assert layer.weight.shape == (64, 1, 4)
    layer.weight.data.copy_(2 * plain[:, None])
    derived.rebuild(model, torch.bfloat16, experts=False)
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer.weight, _custom_ops.causal_conv1d_weight_pack(2 * plain)) and derived.probe(model) == 1
    layer.weight.data.zero_()
    with pytest.raises(SyncError, match="the packed convolution of 0"):
        derived.probe(model)


def test_a_models_own_hook_is_refused():
    """Architectures outside the families may have one; what it makes is unknown."""
    with pytest.raises(SyncError, match="the model holds Holder"):
        derived.refuse(Holder())
