"""``verl-fp8 certify`` with the real trainer's model and a real vLLM engine: its figures hold, and it sees one ulp."""

import json
import shutil

import pytest
import torch
import transformers

from verl_fp8.sync.stream import MANIFEST
from verl_fp8.tools.mismatch.certify import (
    NEW_TOKENS,
    Trainer,
    certify_command,
    differing_bytes,
    split,
)
from verl_fp8.tools.mismatch.probes import probes_in_order
from verl_fp8.tools.overrides import compose, validate


@pytest.fixture(scope="module")
def job(root, tiny_model):
    """The overrides of the quickstart's tiny run."""
    return ["--config-dir", str(root / "recipes"), "--config-name", "quickstart",
            f"actor_rollout_ref.model.path={tiny_model}", "trainer.resume_mode=disable"]  # fmt: skip


@pytest.fixture
def certified(job, tmp_path, capsys):
    """certified(overrides) -> (exit code, JSON, HTML, stdout and stderr)."""

    def run(*overrides):
        files = tmp_path / "out.json", tmp_path / "out.html"
        code = certify_command(["--json", str(files[0]), f"--html={files[1]}", *job, *overrides])
        found = json.loads(files[0].read_text()) if files[0].exists() else None
        return code, found, files[1].read_text() if files[1].exists() else None, "".join(capsys.readouterr())

    return run


def trainer(job, *overrides):
    """The trainer's half of a composed run."""
    config = compose([*job, *overrides])
    return Trainer(config, validate(config).fp8)


@pytest.mark.slow
def test_an_exact_run_is_certified_exact(certified):
    """fp8.exact=true: every log-prob of 192 sampled tokens, every probe and every byte of the weights are equal."""
    code, found, page, out = certified("+fp8=unified", "fp8.exact=true")
    assert code == 0 and found["verdict"] == "pass" and "Certificate: pass" in page
    assert found["total"]["max"] == 0.0 and found["tokens"] == 8 * NEW_TOKENS
    assert found["points"]["starts"] is None and list(found["points"]["curve"]) == probes_in_order(2)
    assert found["weights"]["differ"] == 0 and "equal to the bit" in out


@pytest.fixture(scope="module")
def loud_model(tiny_model, tmp_path_factory):
    """The tiny model with an output head thirty times as large: it makes far more of any rounding."""
    folder = tmp_path_factory.mktemp("loud") / "model"
    shutil.copytree(tiny_model, folder)
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        module.lm_head.weight.mul_(30)
    module.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_run_that_amplifies_is_split_and_warned_of(certified, loud_model):
    """Beyond the published bands, but no more than the trainer against itself: a warning.

    The links add up to the mismatch, the weights' is exactly 0, and the first probe that differs is named.
    """
    code, found, page, out = certified("+fp8=unified", f"actor_rollout_ref.model.path={loud_model}")
    links = {link["name"]: link for link in found["links"]}
    assert code == 0 and found["verdict"] == "warn" and "Certificate: warn" in page
    mismatch = found["judgements"][0]
    assert mismatch["value"] > mismatch["warns"] and "own floor" in mismatch["note"]
    assert list(links) == ["log-softmax", "weights", "kernels", "rollout noise"]
    assert sum(link["share"] for link in links.values()) == pytest.approx(1)
    assert links["weights"]["max"] == 0.0 and links["kernels"]["max"] > 0 and found["weights"]["differ"] == 0
    assert found["points"]["starts"] in probes_in_order(2) and found["points"]["starts"] in out and "kernels" in page
    assert found["noise"]["trainer again"]["max"] == 0.0


def test_one_ulp_is_seen(job):
    """One scale one ulp off is found in the bytes; a third of them, as 448 / amax gets wrong, in the log-probs too. The
    trainer's own bytes change nothing."""
    ours = trainer(job, "+fp8=unified", "fp8.exact=true")
    sent = ours.weights()
    # One ulp flips a bf16 rounding about once in 10^5 values: many tokens.
    sequences = torch.randint(0, 64, (16, 64), generator=torch.Generator().manual_seed(2)).tolist()
    before = ours.log_probs(sequences, 60)
    assert torch.equal(before[-60:], ours.log_probs(sequences[-1:], 60))
    ours.hold({n: t for n, t in sent.items() if n != MANIFEST}, quantize=True)
    assert torch.equal(before, ours.log_probs(sequences, 60)) and not differing_bytes(sent, sent)
    name = next(n for n in sent if n.endswith("down_proj.weight_scale_inv"))
    held = sent | {name: sent[name].clone()}
    held[name].view(torch.int32)[0, 0] += 1
    assert differing_bytes(held, sent) == [name]
    for scale in (n for n in sent if n.endswith("weight_scale_inv")):
        held[scale] = sent[scale].clone()
        held[scale].view(torch.int32).view(-1)[::3] += 1
    ours.hold({n: t for n, t in held.items() if n != MANIFEST}, quantize=True)
    assert not torch.equal(before, ours.log_probs(sequences, 60))


def test_a_split_adds_up():
    """Shares of the links sum to 1 and weigh each by its part of the whole; a whole of 0 has none."""
    a = torch.tensor([1.0, 2.0]).double()
    links = split([("", a), ("x", a * 0.75), ("y", a * 0.0)])
    assert [link["share"] for link in links] == [0.25, 0.75]
    assert [link["share"] for link in split([("", a), ("x", a)])] == [0.0]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["+is_correction=ais"], "+fp8=unified"),
        (["+fp8=unified", "fp8.exact=perhaps"], "fp8.exact"),
        (
            [
                "+fp8=rollout",
                "fp8.recipe.weight_block=[64,64]",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            ],
            "tensor_model_parallel_size",
        ),
        (["+fp8=bf16", "fp8.recipe.eps=0.1"], "fp8.recipe.eps"),
        (["+fp8=bf16", "fp8.recipe.exclude=['*.0.*']"], "fp8.recipe.exclude"),
        (["+fp8=bf16", "fp8.weight_sync=bf16"], "fp8.weight_sync"),
        (["+fp8=bf16", "actor_rollout_ref.rollout.quantization=fp8"], "actor_rollout_ref.rollout.quantization"),
    ],
)  # fmt: skip
def test_what_cannot_be_certified_is_refused(certified, overrides, key):
    """Exit code 2, one sentence, and the key."""
    code, found, page, out = certified(*overrides)
    assert code == 2 and found is None and page is None and key in out


@pytest.mark.slow
def test_a_rollout_that_fails_is_a_refusal_with_its_error(certified):
    """What vLLM says reaches the user."""
    code, _, _, out = certified("+fp8=unified", "actor_rollout_ref.rollout.max_model_len=100000")
    assert code == 2 and "max_model_len" in out
