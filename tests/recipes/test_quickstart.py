"""The quickstart's command line: what is wrong is said before anything is installed, and nobody's folder is emptied."""

import shutil
import subprocess

import pytest

STAND_IN = '#!/bin/sh\necho python "$@"\nexit 7\n'


@pytest.fixture(scope="module")
def place(root, tmp_path_factory):
    """A copy of the recipes in a folder with a space; its environment is set up, its python only says its arguments."""
    place = tmp_path_factory.mktemp("a place")
    shutil.copytree(root / "recipes", place / "recipes")
    shutil.copy(root / "pyproject.toml", place)
    (place / ".venv" / "bin").mkdir(parents=True)
    (place / ".venv" / "bin" / "python").write_text(STAND_IN)
    (place / ".venv" / "bin" / "python").chmod(0o755)
    shutil.copy(root / "pyproject.toml", place / ".venv" / ".verl_fp8_setup")
    return place


def quickstart(place, *arguments, cwd, **environment):
    """One run from another directory."""
    command = ["bash", str(place / "recipes" / "quickstart.sh"), *arguments]
    env = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "foo"], "--model is one of smollm2 tiny, not 'foo'"),
        (["--model"], "--model needs a value"),
        (["--steps=0"], "--steps is a whole number from 1 to 999, not '0'"),
        (["--steps", "many"], "not 'many'"),
        (["--fp8", "e4m3"], "--fp8 is one of unified rollout rollout_per_tensor bf16 off"),
        (["--correction", "ais tis"], "--correction is one of ais tis"),
        (["--correction", "AIS"], "not 'AIS'"),
        (["--bogus"], "'--bogus' is neither an option nor an override"),
        (["-x"], "'-x' is neither"),
        (["unified"], "'unified' is neither"),
        (["+fp8=rollout"], "write --fp8 rollout instead"),
        (["+is_correction=tis"], "write --correction tis instead"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_named(place, tmp_path, arguments, said):
    """Exit code 2, the argument, the usage; nothing is started."""
    run = quickstart(place, *arguments, cwd=tmp_path)
    assert run.returncode == 2 and said in run.stderr and "quickstart.sh [--model" in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("out", [".", "full", "file", "/"])
def test_nobodys_folder_is_emptied(place, tmp_path, out):
    """--out names a folder with something else in it, or a file: refused, and all is still there."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("too")
    run = quickstart(place, "--out", out, cwd=tmp_path)
    assert run.returncode == 2 and "holds something else than a run" in run.stderr
    assert (tmp_path / "full" / "thesis.txt").read_text() == "years" and (tmp_path / "file").exists()


def test_it_runs_from_any_directory(place, tmp_path):
    """Good arguments reach the stand-in with absolute paths, whatever the working directory, spaces included."""
    run = quickstart(
        place, "--model=tiny", "--steps", "2", "--out", "mine", "trainer.save_freq=1", "~a.b", cwd=tmp_path
    )
    assert run.returncode == 7 and f"prepare.py --model tiny --out {place}/runs/tiny" in run.stdout
    (place / "runs" / "tiny" / "data").mkdir(parents=True, exist_ok=True)
    (place / "runs" / "tiny" / "data" / "val.parquet").touch()
    for _ in range(2):  # the second time into the first one's folder
        run = quickstart(
            place, "--model=tiny", "--steps", "2", "--out", "mine", "trainer.save_freq=1", "~a.b", cwd=tmp_path
        )
        assert run.returncode == 7
        log = (tmp_path / "mine" / "train.log").read_text()
        assert f"hydra.run.dir={tmp_path}/mine/hydra" in log and log.rstrip().endswith("trainer.save_freq=1 ~a.b")
        assert "trainer.total_training_steps=2" in log and "+fp8=unified +is_correction=ais" in log


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('case "$*" in *ensurepip*) exit 1 ;; esac', "apt install python3-venv"),
        (
            'case "$*" in --version) echo Python 3.8.1 ;; *) exit 1 ;; esac',
            "is Python 3.8.1; needed is Python 3.10 to 3.12",
        ),
        (None, "set PYTHON=/path/to/python3.12"),
    ],
    ids=["no venv module", "old", "none"],
)
def test_a_python_that_will_not_do_is_named(root, tmp_path, body, said):
    """One sentence with what to install, and no half-made .venv that a second attempt would take for a whole one."""
    shutil.copytree(root / "recipes", tmp_path / "recipes")
    shutil.copy(root / "pyproject.toml", tmp_path)
    python = tmp_path / "python3"
    if body is not None:
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
    run = quickstart(tmp_path, "--model", "tiny", cwd=tmp_path, PYTHON=str(python))
    assert run.returncode == 1 and said in run.stderr and not (tmp_path / ".venv").exists()
