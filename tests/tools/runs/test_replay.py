"""The dump, its replay, and the pages of ``replay`` and ``report``."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from verl_fp8.__main__ import main
from verl_fp8.correction.ais import AISConfig, ais_weights
from verl_fp8.correction.dump import SCHEMA, DumpWriter, check_folder, files, flatten, read_step
from verl_fp8.correction.reweight import AISState
from verl_fp8.correction.verls_methods import rollout_correction
from verl_fp8.errors import ConfigError
from verl_fp8.switches.settings import METHOD_KEYS, DumpSettings
from verl_fp8.tools.runs import report
from verl_fp8.tools.runs.figures import Profile, Totals, add_profiles, measure, mismatch
from verl_fp8.tools.runs.replay import edges, methods, weigh

CONFIG = {"is_correction": {"method": "none"}, "adv_estimator": "grpo", "model": "a/model", "fp8": {"mode": "unified"}}


def jagged_batch(seed=0, rows=12, longest=40, spread=0.1, padding=0):
    """A batch as verl keeps it: jagged tensors, keys and tags. Rows 4 and 5 have a masked stretch, as tool calls
    leave."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=g).tolist()
    old = [-2 * torch.rand(n, generator=g) for n in lengths]
    data = {
        "old_log_probs": old,
        "rollout_log_probs": [row + spread * torch.randn(len(row), generator=g) for row in old],
        "advantages": [torch.randn(1, generator=g).expand(n).clone() for n in lengths],
        "response_mask": [
            (torch.arange(n) % 3 > 0).long() if i in (4, 5) else torch.ones(n, dtype=torch.int64)
            for i, n in enumerate(lengths)
        ],
        "rm_scores": [torch.nn.functional.pad(torch.rand(1, generator=g), (n - 1, 0)) for n in lengths],
    }
    for i in range(rows - padding, rows):
        data["response_mask"][i].zero_()
    nested = {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in data.items()}
    keys = [f"prompt{i // 4}_{i % 4}_0" for i in range(rows)]
    return TensorDict(nested, batch_size=rows), keys, [{"is_padding": i >= rows - padding} for i in range(rows)]


def write(folder, *, steps=2, run="a run", config=CONFIG, settings=None, first_step=1, **batch):
    """A dump of `steps` batches through the writer; the writer."""
    writer = DumpWriter(settings or DumpSettings(str(folder)), run, config, first_step)
    for step in range(first_step, first_step + steps):
        writer.write(
            *jagged_batch(seed=step, **batch),
            step,
            0,
            method=config["is_correction"]["method"],
            rejected_fraction="0.0",
        )
    return writer


@pytest.fixture
def dump(tmp_path):
    """A dump of three batches."""
    write(tmp_path / "dump", steps=3)
    return tmp_path / "dump"


# ---------------------------------------------------------------- writing


def test_a_file_gives_back_the_batch(tmp_path):
    """Every value, flat and in order, dtypes as the module says, without the padding rows."""
    data, keys, tags = jagged_batch(padding=2)
    DumpWriter(DumpSettings(str(tmp_path)), "r", CONFIG, 1).write(data, keys, tags, 5, 1, method="ais")
    (path,) = files(tmp_path)
    step = read_step(path)
    n = sum(len(row) for row in data["advantages"].unbind()[:10])
    mask = data["response_mask"].values()[:n].bool()
    for name in ("old_log_probs", "rollout_log_probs", "advantages"):
        assert torch.equal(step.tensors[name], torch.where(mask, data[name].values()[:n], 0.0))
    assert torch.equal(step.tensors["response_mask"].bool(), mask)
    assert step.tensors["lengths"].tolist() == [len(row) for row in data["advantages"].unbind()[:10]]
    assert step.tensors["groups"].tolist() == [i // 4 for i in range(10)]
    assert step.step == 5
    assert json.loads(step.metadata["config"]) == CONFIG
    # 13 bytes a token, 12 a response, and the header.
    assert path.stat().st_size < 13 * n + 12 * 10 + 4096


def test_tokens_that_are_not_finite_are_masked_and_counted():
    """So that a value that is not finite in a dump always means a damaged file; under the mask they are nobody's
    business."""
    data, keys, tags = jagged_batch()
    data["old_log_probs"].values()[0] = math.nan
    data["rollout_log_probs"].values()[1] = -math.inf
    masked = int((data["response_mask"].values() == 0).nonzero()[0])
    data["old_log_probs"].values()[masked] = math.nan
    tensors, lost = flatten(data, keys, tags)
    assert lost == 2
    assert tensors["response_mask"][:2].tolist() == [0, 0]
    assert all(bool(t.isfinite().all()) for t in tensors.values())


def test_a_dump_stops_at_its_limits(tmp_path, capfd):
    """dump_steps counts steps, dump_max_bytes bounds the folder; reaching one is said once and training goes on."""
    writer = write(tmp_path / "a", steps=5, settings=DumpSettings(str(tmp_path / "a"), steps=2))
    assert [read_step(p).step for p in files(tmp_path / "a")] == [1, 2]
    assert writer.full
    assert capfd.readouterr().out.count("dump_steps=2 reached") == 1
    size = files(tmp_path / "a")[0].stat().st_size
    write(tmp_path / "b", steps=9, settings=DumpSettings(str(tmp_path / "b"), max_bytes=3 * size + 5000))
    total = sum(p.stat().st_size for p in (tmp_path / "b").iterdir())
    assert 0 < total <= 3 * size + 5000
    assert capfd.readouterr().out.count("dump_max_bytes") == 1


def test_no_half_written_file_is_left(dump):
    """Files are written under another name and moved; the folder holds nothing else."""
    assert sorted(p.name for p in dump.iterdir()) == [f"step_000000{i}_00.safetensors" for i in (1, 2, 3)]


def test_another_runs_dump_is_not_touched(dump):
    """Another run, or the same one starting over, is refused with the key; a resumed one goes on."""
    with pytest.raises(ConfigError, match=r"is_correction\.dump.*of the run a run"):
        check_folder(dump, "another run", resumed=True)
    with pytest.raises(ConfigError, match="starts over"):
        write(dump)
    check_folder(dump, "a run", resumed=True)
    before = {p.name: p.read_bytes() for p in files(dump)}
    write(dump, first_step=3, steps=2)
    assert [read_step(p).step for p in files(dump)] == [1, 2, 3, 4]
    assert files(dump)[0].read_bytes() == before["step_0000001_00.safetensors"]


def test_a_resumed_run_counts_what_is_there(dump):
    """The size limit is the folder's, not the process's."""
    total = sum(p.stat().st_size for p in files(dump))
    writer = write(dump, first_step=4, steps=3, settings=DumpSettings(str(dump), max_bytes=total + 10))
    assert writer.full
    assert len(files(dump)) == 3


def test_the_driver_looks_at_the_folder(dump, tmp_path):
    """The check before Ray starts: this command line would write over another run's dump."""
    from verl_fp8.rules.run import validate_run
    from verl_fp8.tools.overrides import compose

    base = [
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.adv_estimator=grpo",
        "+is_correction=ais",
    ]
    with pytest.raises(ConfigError, match=r"is_correction\.dump"):
        validate_run(compose([*base, f"is_correction.dump={dump}"]))
    validate_run(compose([*base, f"is_correction.dump={tmp_path / 'new'}"]))


# ---------------------------------------------------------------- damaged dumps


def rewrite(path, change, metadata=None):
    """Rewrite a dump file with changed tensors or metadata."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {**header, **(metadata or {})})


DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-40]), "no readable safetensors"),
    "header only": (lambda p: p.write_bytes(p.read_bytes()[:20]), "no readable safetensors"),
    "empty": (lambda p: p.write_bytes(b""), "no readable safetensors"),
    "other schema": (
        lambda p: rewrite(p, lambda t: None, {"schema": "verl_fp8.correction.dump/9"}),
        "schema 'verl_fp8.correction.dump/9'",
    ),
    "no schema": (lambda p: save_file(load_file(p), p), "schema None"),
    "no step": (lambda p: rewrite(p, lambda t: None, {"step": "x"}), "metadata"),
    "config": (lambda p: rewrite(p, lambda t: None, {"config": "[1]"}), "metadata"),
    "nan": (
        lambda p: rewrite(p, lambda t: t["old_log_probs"][3:5].fill_(math.nan)),
        "2 of .* values of old_log_probs not finite",
    ),
    "infinity": (lambda p: rewrite(p, lambda t: t["advantages"][:1].fill_(math.inf)), "advantages not finite"),
    "tensor missing": (lambda p: rewrite(p, lambda t: t.pop("scores")), "tensors advantages"),
    "dtype": (lambda p: rewrite(p, lambda t: t.update(scores=t["scores"].double())), "scores of dtype torch.float64"),
    "shape": (lambda p: rewrite(p, lambda t: t.update(groups=t["groups"][:-1].clone())), "groups of dtype"),
    "lengths": (lambda p: rewrite(p, lambda t: t["lengths"].add_(1)), "lengths that sum"),
    "mask": (lambda p: rewrite(p, lambda t: t["response_mask"].fill_(2)), "response_mask"),
    "another run": (lambda p: rewrite(p, lambda t: None, {"run": "b run"}), "run b run"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_dump_is_named_in_one_sentence(dump, capsys, kind):
    """Exit code 2, the file and what is wrong with it on one line of stderr, no traceback."""
    damage, sentence = DAMAGE[kind]
    damage(files(dump)[1])
    assert main(["replay", str(dump)]) == 2
    printed = capsys.readouterr().err.strip()
    assert re.search(sentence, printed)
    assert "step_0000002_00.safetensors" in printed
    assert "\n" not in printed


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda t: t / "nowhere", "no such folder"),
    (lambda t: t, "no step_"),
])  # fmt: skip
def test_no_dump(tmp_path, capsys, make, sentence):
    """A path that is no dump."""
    assert main(["replay", str(make(tmp_path))]) == 2
    assert sentence in capsys.readouterr().err


# ---------------------------------------------------------------- the methods


def padded(step):
    """The whole batch as verl pads it."""
    (_, inside, block), *_ = step.row_blocks(math.inf)
    return inside, block


@pytest.mark.parametrize("method", ["tis", "tis_seq", "icepop", "mis", "geo_rs", "k3_rs"])
@pytest.mark.parametrize("normalize", [False, True])
def test_verls_methods_are_verls(dump, method, normalize, monkeypatch):
    """Weights and kept tokens equal one call of verl's function on the whole padded batch, though replay cuts it into
    blocks."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    from verl_fp8.tools.runs import replay as module

    if normalize and method in ("geo_rs", "k3_rs"):
        pytest.skip("no weights to normalise")
    monkeypatch.setattr(module, "_BLOCK", 64)
    step = read_step(files(dump)[0])
    wide = {
        "geo_rs": ["geo_rs.low=0.99", "geo_rs.high=1.01"],
        "icepop": ["icepop.low=0.95", "icepop.high=1.1"],
        "tis": ["tis.clip=1.1"],
        "k3_rs": ["k3_rs.max_k3=0.004"],
    }
    settings = methods([*wide.get(method, []), *([f"{method}.batch_normalize=true"] if normalize else [])])[method]
    weights, kept, _ = weigh(step, settings, AISState())
    node = {k: v for k, v in rollout_correction(settings).items() if k != "bypass_mode"}
    inside, block = padded(step)
    proto, mask, _ = compute_rollout_correction_and_rejection_mask(
        block["old_log_probs"], block["rollout_log_probs"], block["response_mask"].float(), **node
    )
    valid = step.tensors["response_mask"].bool()
    assert torch.equal(kept, mask[inside] > 0)
    if proto is not None:
        assert torch.equal(weights[valid], proto.batch["rollout_is_weights"][inside][valid])
    else:
        assert bool((weights == 1).all())
    assert (
        method == "tis_seq" or normalize or bool((kept != valid).any() | (weights != weights.clamp(0.95, 1.0999)).any())
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ais_is_ais(dump, level):
    """The weights of ais_weights on the padded batch; alpha to float64 rounding, since token level regroups the
    rows."""
    step = read_step(files(dump)[0])
    weights, kept, metrics = weigh(step, methods([f"ais.level={level}"])["ais"], AISState())
    inside, block = padded(step)
    mask = block["response_mask"].bool()
    result = ais_weights(
        block["old_log_probs"], block["rollout_log_probs"], block["advantages"], mask, AISConfig(level=level)
    )
    assert metrics["ais/alpha"] == pytest.approx(result.alpha, rel=1e-12)
    assert torch.allclose(
        weights[step.tensors["response_mask"].bool()], result.weights[inside][mask[inside]], rtol=2**-22, atol=0
    )
    assert torch.equal(kept, step.tensors["response_mask"].bool())


def test_all_methods_with_the_groups_own_values():
    """Every method of the switch, and AIS with delta=auto; each with what its group says."""
    found = methods([])
    assert set(found) == {*METHOD_KEYS, "ais_auto"}
    assert found["icepop"].parameters["high"] == 5.0
    assert found["ais_auto"].parameters["delta"] == "auto"


def test_the_runs_own_values_and_overrides():
    """The run's own method comes with its own values; --set wins over both."""
    own = {"method": "ais", "clip": 3.0, "delta": 0.5, "scope": "mini_batch", "dump": "/x"}
    found = methods(["tis.clip=9", "ais.gamma=2"], own)
    assert found["ais"].parameters["clip"] == 3.0
    assert found["ais"].parameters["gamma"] == 2
    assert found["tis"].parameters["clip"] == 9


@pytest.mark.parametrize(
    "override", ["foo.clip=1", "tis=1", "tis.clip", "tis.delta=1", "tis.clip=[", "ais.clip=-1", "tis.clip=x"]
)
def test_a_wrong_override_is_named(dump, capsys, override):
    """--set with an unknown method or key, or a bad value: exit code 2 and one line."""
    assert main(["replay", str(dump), "--set", override]) == 2
    printed = capsys.readouterr().err.strip()
    assert "\n" not in printed
    assert "is_correction" in printed or override in printed


# ---------------------------------------------------------------- the figures


def step_of(old, rollout, advantages, mask, lengths):
    """A DumpStep from lists."""
    from verl_fp8.correction.dump import DumpStep

    return DumpStep(
        1,
        {},
        {
            "old_log_probs": torch.tensor(old),
            "rollout_log_probs": torch.tensor(rollout),
            "advantages": torch.tensor(advantages),
            "response_mask": torch.tensor(mask, dtype=torch.uint8),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "scores": torch.zeros(len(lengths)),
            "groups": torch.zeros(len(lengths), dtype=torch.int32),
        },
    )


def test_the_figures_by_hand():
    """Four valid tokens with ratios 1, 2, 4, 1/2 and A = 1, -1, 2, 1; truncated at 2, the last one rejected."""
    ratio = torch.tensor([1.0, 2.0, 4.0, 0.5, 9.0])
    step = step_of(ratio.log().tolist(), [0.0] * 5, [1.0, -1.0, 2.0, 1.0, 7.0], [1, 1, 1, 1, 0], [3, 2])
    weights, kept = torch.tensor([1.0, 2.0, 2.0, 0.5, 1.0]), torch.tensor([True, True, True, False, False])
    found = measure(step, weights, kept, 2.0, Totals())
    v = [1, 2, 2, 0]
    assert found["ess"] == pytest.approx(25 / (4 * 9))
    assert found["weight_mean"] == pytest.approx(5 / 4)
    assert found["weight_max"] == 2.0
    assert found["clip_fraction"] == 0.5  # tokens at the truncation
    assert found["rejected_fraction"] == 0.25
    assert found["bias"] == pytest.approx(
        sum(abs(w - r) * abs(a) for w, r, a in zip(v, (1, 2, 4, 0.5), (1, 1, 2, 1), strict=True)) / 5
    )
    assert found["variance"] == pytest.approx(sum((w * a) ** 2 for w, a in zip(v, (1, 1, 2, 1), strict=True)) / 7)


def test_no_correction_is_unbiased_without_mismatch_and_untruncated_weights_always_are():
    """bias is 0 for the exact token weights, and for none when the log-probs agree; variance of none is 1."""
    data, keys, tags = jagged_batch()
    tensors, _ = flatten(data, keys, tags)
    step = step_of([0.0], [0.0], [0.0], [1], [1])
    step.tensors.clear()
    step.tensors.update(tensors)
    mask = tensors["response_mask"].bool()
    exact = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).double().exp().float()
    # float32 weights: half a unit in the last place of numbers near 1.
    assert measure(step, exact, mask, None, Totals())["bias"] == pytest.approx(0.0, abs=2**-24)
    none = measure(step, torch.ones_like(exact), mask, None, Totals())
    assert none["bias"] > 0.01
    assert (none["variance"], none["ess"]) == (1.0, 1.0)
    step.tensors["rollout_log_probs"] = tensors["old_log_probs"]
    assert measure(step, torch.ones_like(exact), mask, None, Totals())["bias"] == 0.0


def test_pooled_quantiles_are_those_of_all_tokens():
    """The histogram over two batches gives the quantiles of their union to half of a bin of 0.25 %."""
    totals, everything = Totals(), []
    for seed in (1, 2):
        data, keys, tags = jagged_batch(seed=seed, rows=60, spread=0.5)
        tensors, _ = flatten(data, keys, tags)
        step = step_of([0.0], [0.0], [0.0], [1], [1])
        step.tensors.update(tensors)
        mask = tensors["response_mask"].bool()
        weights = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).exp()
        measure(step, weights, mask, None, totals)
        everything.append(weights[mask])
    values = torch.cat(everything)
    for q in (0.99, 0.999):
        rank = min(len(values) - 1, math.ceil(q * len(values)) - 1)
        assert totals.quantile(q) == pytest.approx(values.sort().values[rank].item(), rel=0.0025)
    assert totals.largest == values.max().item()


def test_mismatch_is_verls(dump):
    """k3 and k1 equal verl's own off-policy metrics; float32 there."""
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    step = read_step(files(dump)[0])
    _, block = padded(step)
    verl = compute_offpolicy_metrics(block["old_log_probs"], block["rollout_log_probs"], block["response_mask"].float())
    found = mismatch(step)
    assert found["k3"] == pytest.approx(verl["k3_kl"], rel=1e-3)
    assert found["k1"] == pytest.approx(verl["kl"], rel=1e-3)


def test_profiles_by_position_and_length():
    """Two responses of lengths 1 and 3: each token in its place, and alpha of a bin as of a batch of its tokens."""
    d = [0.1, 0.2, -0.3, 0.4]
    step = step_of(d, [0.0] * 4, [1.0, -1.0, 0.5, 2.0], [1, 1, 1, 1], [1, 3])
    by_position, by_length = Profile(AISConfig()), Profile(AISConfig())
    add_profiles(step, by_position, by_length)
    bins = by_position.bins(edges(3, equal=3))
    assert [b["n_tokens"] for b in bins] == [2, 1, 1]
    assert bins[0]["mean_abs"] == pytest.approx(0.15)
    lengths = by_length.bins(edges(4))
    assert [(b["from"], b["to"], b["n_tokens"]) for b in lengths] == [(1, 2, 1), (2, 4, 3)]
    rows = step.tensors
    alone = ais_weights(
        *(rows[n][1:].view(1, 3) for n in ("old_log_probs", "rollout_log_probs", "advantages")), torch.ones(1, 3)
    )
    for key in ("alpha", "alpha_ess", "alpha_mis", "alpha_var"):
        assert lengths[1][key] == pytest.approx(alone.diagnostics[f"ais/{key}"], rel=1e-6), key


@pytest.mark.parametrize(
    ("size", "equal", "meant"), [(5, None, [0, 1, 2, 4, 8]), (1, None, [0, 1]), (0, 4, [0]), (7, 3, [0, 3, 6, 7])]
)
def test_edges_cover_everything(size, equal, meant):
    """Octaves, or equal bins."""
    assert edges(size, equal=equal) == meant


# ---------------------------------------------------------------- commands and pages


def test_replay_writes_json_and_a_page(dump, tmp_path, capsys):
    """The table on stdout; JSON without NaN; a page that refers to nothing outside itself."""
    assert main(["replay", str(dump), "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    assert "icepop" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [s["step"] for s in found["steps"]] == [1, 2, 3]
    assert set(found["methods"]) == {*METHOD_KEYS, "ais_auto"}
    page = (tmp_path / "r.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)\s*=", page)
    body = page[page.index("</head>") :]
    assert "http" not in body
    for label in ("AIS, delta auto", "IcePop", "geo-RS", "By position", "By length", "Bias against variance"):
        assert label in body


def test_an_output_that_cannot_be_written_is_named(dump, tmp_path, capsys):
    """A folder that is not there."""
    assert main(["replay", str(dump), "--html", str(tmp_path / "no" / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_batch_without_tokens_or_advantages(tmp_path, capsys):
    """Masks of 0 everywhere, and A = 0 everywhere: figures that do not exist are left out, nothing divides by 0."""
    for name, padding, zero in (("a", 12, False), ("b", 0, True)):
        writer = DumpWriter(DumpSettings(str(tmp_path / name)), "r", CONFIG, 1)
        data, keys, _ = jagged_batch(padding=padding)
        if zero:
            data["advantages"] = data["advantages"] * 0
        writer.write(data, keys, [{}] * len(keys), 1, 0, method="none")
        assert (
            main(["replay", str(tmp_path / name), "--json", str(tmp_path / "j"), "--html", str(tmp_path / "h")]) == 0
        ), capsys.readouterr().err


def test_the_schema_is_stated():
    """Changing what a file holds needs a new number."""
    assert SCHEMA == "verl_fp8.correction.dump/1"


@pytest.mark.slow
def test_replay_keeps_one_batch_in_memory(tmp_path):
    """Twelve files of a million tokens (156 MB) replay within 2 GiB, libraries included; measured by the kernel."""
    folder = tmp_path / "big"
    writer = DumpWriter(DumpSettings(str(folder)), "r", CONFIG, 1)
    data, keys, tags = jagged_batch(rows=1000, longest=2000)
    for step in range(1, 13):
        writer.write(data, keys, tags, step, 0, method="none")
    code = (
        "import resource, sys; from verl_fp8.__main__ import main; code = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(folder)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) * 1024 < 2 * 2**30


# ---------------------------------------------------------------- report


STEPS = [{"critic/rewards/mean": 0.1 * i, "ais/alpha": 0.5, "training/rollout_actor_probs_pearson_corr": math.nan}
         for i in range(1, 4)]  # fmt: skip


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """The same three steps written by verl's own file logger and its own TensorBoard logger."""
    from verl.utils.tracking import FileLogger, _TensorboardAdapter

    (tmp_path / "one").mkdir()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "one" / "metrics.jsonl"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "two"))
    for logger in (FileLogger("p", "e"), _TensorboardAdapter("p", "e")):
        for step, data in enumerate(STEPS, start=1):
            logger.log(data, step)
        logger.finish()
    return tmp_path


def test_both_of_verls_logs_read_alike(logs):
    """The file log and TensorBoard give the same series; TensorBoard keeps float32."""
    one, two = report.load(logs / "one"), report.load(logs / "two")
    assert report.series(one, "critic/rewards/mean") == ([1, 2, 3], pytest.approx([0.1, 0.2, 0.3]))
    assert report.series(two, "critic/rewards/mean") == ([1, 2, 3], pytest.approx([0.1, 0.2, 0.3], rel=1e-6))
    assert report.series(one, "training/rollout_actor_probs_pearson_corr") == ([], [])


def test_report_compares_runs(logs, capsys):
    """A column a run, a page with a chart for what a run has logged, and JSON."""
    page = logs / "page.html"
    assert main(["report", str(logs / "one"), str(logs / "two"), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "one" in out and "two" in out
    body = page.read_text()
    body = body[body.index("</head>") :]
    assert "http" not in body
    assert "AIS alpha" in body and "Reward" in body
    assert "Sync bytes" not in body
    assert main(["report", str(logs / "one"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["one"]["steps"] == 3


def test_runs_of_one_name_stay_apart(logs, capsys):
    """Two folders called alike are told apart by their paths."""
    other = logs / "x" / "one"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_bytes((logs / "one" / "metrics.jsonl").read_bytes())
    assert main(["report", str(logs / "one"), str(other), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "none among"),
        (lambda p: p.write_text("hello\n"), "line 1"),
        (lambda p: p.write_text('{"step": 1}\n'), "line 1"),
        (lambda p: p.write_text(""), "no steps"),
    ],
)
def test_a_log_that_is_none_is_named(tmp_path, capsys, make, sentence):
    """Exit code 2 and one line."""
    path = tmp_path / "run.jsonl"
    make(path)
    assert main(["report", str(path)]) == 2
    printed = capsys.readouterr().err.strip()
    assert sentence in printed
    assert "\n" not in printed


def test_a_run_still_writing_is_read(logs):
    """Half a line at the end is a step that is being written."""
    path = logs / "one" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "da')
    assert len(report.load(path)) == 3
