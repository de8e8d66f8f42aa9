"""recipes/experiments: the committed results are whole, the table is theirs, the outlier changes nothing but scales."""

import json
import math
import runpy

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import WHOLE


@pytest.fixture(scope="module")
def script(root):
    """The names of recipes/experiments/run.py."""
    return runpy.run_path(str(root / "recipes" / "experiments" / "run.py"))


@pytest.fixture(scope="module")
def results(script):
    """The committed results."""
    return json.loads(script["RESULTS"].read_text())


def test_every_setting_has_every_seed_and_step(script, results):
    """Five settings, three seeds, finite figures for each step; alpha where AIS acts and nowhere else."""
    assert results["steps"] == script["STEPS"] and results["outlier"] == script["OUTLIER"]
    found = [(r["setting"], r["seed"]) for r in results["runs"]]
    assert found == [(setting, seed) for setting in script["SETTINGS"] for seed in script["SEEDS"]]
    for run in results["runs"]:
        assert run["command"] == f"python recipes/experiments/run.py run --only {run['setting']} --seed {run['seed']}"
        figures = {k: v for k, v in run.items() if isinstance(v, list)}
        expected = {"reward", "k3", "mean_abs_logp_diff", "grad_norm", "entropy"}
        assert set(figures) == expected | ({"alpha"} if run["setting"] == "ais" else set())
        for values in figures.values():
            assert len(values) == results["steps"] and all(map(math.isfinite, values))
        assert all(0 <= value <= 1 for value in run["reward"])


def test_the_table_is_the_results(script, results):
    """README.md shows what the script computes from results.json, and the figure is there."""
    assert script["table"](results) in script["README"].read_text()
    assert script["FIGURE"].stat().st_size < 300_000 and script["RESULTS"].stat().st_size < 300_000


def test_the_outlier_reaches_nothing_but_the_scale(script, tiny_model):
    """After two updates logits and every other weight are the same to the bit, whatever its size; the codes are not."""
    ids = torch.arange(3, 43).reshape(2, 20)

    def updated(value):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        script["outlier"](model, value)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        for _ in range(2):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return logits, {n: p.detach() for n, p in model.named_parameters()}

    (small_logits, small), (large_logits, large) = updated(1.0), updated(script["OUTLIER"])
    assert torch.equal(small_logits, large_logits)
    for name, weight in small.items():
        differs = (weight != large[name]).nonzero().tolist()
        linear = "_proj" in name and name.endswith("proj.weight")
        assert len(differs) == linear, name
        if linear:
            coarse = quantize(large[name].bfloat16(), (WHOLE, WHOLE))
            assert coarse.scale_inv.item() == pytest.approx(script["OUTLIER"] / 448, rel=1e-6)
