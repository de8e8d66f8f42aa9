"""What the model's layers allow: models that cannot be FP8 as asked stop the run before Ray."""

import json
from pathlib import Path

import pytest
import transformers

from tests.driver import SWITCHES
from tests.rules.lines import said


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (transformers.GptOssConfig(num_hidden_layers=1, num_local_experts=4), "mlp.experts"),
        (transformers.Qwen2_5_VLConfig(), "Qwen2_5_VLConfig"),
        (transformers.GPT2Config(n_layer=1), "GPT2Config"),
    ],
    ids=["experts of another layout", "vision", "no nn.Linear"],
)
def test_a_model_that_would_not_be_fp8_is_refused(tmp_path, config, key):
    """Layers that vLLM would quantise and the trainer not, or none at all."""
    config.save_pretrained(tmp_path)
    assert key in said(str(tmp_path), SWITCHES)
    assert said(str(tmp_path), ["+is_correction=ais"]) is None


def test_an_already_quantised_model_is_refused(tiny_model, tmp_path):
    """Its weights are codes already; training them needs the unquantised checkpoint."""
    values = json.loads(Path(tiny_model, "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "quantization_config" in said(str(tmp_path), SWITCHES)


def test_experts_are_quantised_in_blocks_only(make_model):
    """One scale a tensor reaches no expert: refused, with the key that keeps them in bf16 and does pass."""
    model = make_model("qwen3_moe")
    message = said(model, ["+fp8=rollout_per_tensor"])
    assert "fp8.recipe.weights=tensor" in message and "fp8.recipe.exclude=['*.mlp.experts.*']" in message
    assert said(model, ["+fp8=rollout_per_tensor", "fp8.recipe.exclude=['*.mlp.experts.*']"]) is None
