"""Both switches through stock verl, Ray and vLLM on a mixture of experts."""

import pytest

pytestmark = pytest.mark.e2e


def test_unified_fp8_and_ais_on_a_mixture_of_experts(train, make_model, tmp_path):
    """Every expert of both layers in FP8 on both sides, one recipe, one byte a weight, each sync verified by value."""
    run = train(
        make_model("qwen3_moe"), tmp_path, "+fp8=unified", "+is_correction=ais", "trainer.total_training_steps=3"
    )
    assert run.code == 0, run.log[-3000:]
    assert len(run.steps) == 3
    # 2 layers x (4 attention + 8 experts x 3); 2 routers and lm_head are kept.
    ((converted, total, recipe),) = set(run.found(r"FP8: converted (\d+) of (\d+) linear layers .* recipe (\w+)\]"))
    ((layers, kernels, rolled),) = set(run.found(r"FP8 rollout: (\d+) linear layers, kernel ([\w, ]+), recipe (\w+)"))
    assert (converted, total, layers) == ("56", "59", "56") and recipe == rolled
    assert kernels == "ReferenceFp8BlockKernel, ReferenceFp8Experts"
    assert set(run.metric("fp8/sync_bytes_per_weight")) == {1 + 4 / 128**2}
    assert all(0 < alpha <= 1 for alpha in run.metric("ais/alpha"))
    assert min(run.metric("actor/grad_norm")) > 0
    # Why the routers' agreement is no metric is said once.
    assert len(run.found("fp8/router_agreement is not measured")) == 1
