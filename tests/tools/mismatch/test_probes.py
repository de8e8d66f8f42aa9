"""Probes record what the modules of a model compute."""

import torch

from tests.tools.mismatch.models import IDS, model
from verl_fp8.tools.mismatch.probes import probes_in_order, recording


def test_a_probe_records_the_modules_value():
    """Every probe of every layer is there in order; projections lie side by side, chunks of a prefill are joined."""
    built = model(fp8=True)
    seen = []
    handle = built.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, args, out: seen.append(out[0]))
    with torch.no_grad(), recording(built) as found:
        built(input_ids=IDS[:1], use_cache=False)
    handle.remove()
    assert set(found) == set(probes_in_order(2)) and len(found) == len(probes_in_order(2))
    assert torch.equal(found["layers.1.qkv"][:, 128:192], seen[0])
    with torch.no_grad(), recording(built) as twice:
        built(input_ids=IDS[:1, :10], use_cache=False)
        built(input_ids=IDS[:1, :10], use_cache=False)
    assert torch.equal(twice["layers.0.gate_up"][:10], found["layers.0.gate_up"][:10]) and len(twice["norm"]) == 20
