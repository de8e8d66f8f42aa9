"""``verl-fp8 report``: verl's own logs of one run or several."""

import json
import math

import pytest

from verl_fp8.__main__ import main
from verl_fp8.tools.runs import report

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
