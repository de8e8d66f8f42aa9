"""``verl-fp8`` in the hands of a newcomer: wrong words get one sentence that names them, never a traceback."""

import pytest

import verl_fp8
from verl_fp8.__main__ import main


@pytest.fixture
def cli(capsys):
    """cli(*arguments) -> (exit code, stdout, stderr), in this process."""

    def run(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
        return (code, *capsys.readouterr())

    return run


def test_without_a_command_the_help_is_printed(cli):
    """Exit code 2, and every command with what it does."""
    code, _, err = cli()
    assert code == 2 and all(f"    {c} " in err for c in ("check", "explain", "certify", "doctor", "replay", "report"))


def test_the_version(cli):
    """``--version`` without a command."""
    assert cli("--version") == (0, f"verl-fp8 {verl_fp8.__version__}\n", "")


@pytest.mark.parametrize("command", ["check", "explain", "certify", "attribute", "doctor", "replay", "report"])
def test_every_command_has_help(cli, command):
    """Also those that hand everything on to Hydra, whose own help is another."""
    code, out, _ = cli(command, "--help")
    assert code == 0 and f"verl-fp8 {command}" in out and "hydra" not in out.lower()


@pytest.mark.parametrize("command", ["check", "explain", "certify", "attribute"])
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--fp8=unified", "unrecognized arguments: --fp8=unified"),
        ("-fp8=unified", "unrecognized arguments: -fp8=unified"),
        ("+fp8", "'+fp8'"),
        ("\N{EN DASH}fp8=unified", "EN DASH"),
        ("+fp8\N{FULLWIDTH EQUALS SIGN}unified", "FULLWIDTH EQUALS SIGN"),
        ("+fp8=unifi\N{LATIN SMALL LETTER E WITH ACUTE}d", "E WITH ACUTE"),
    ],
)
def test_a_wrong_word_is_named(cli, command, line, named):
    """What Hydra would answer with its usage or a lexer's complaint."""
    code, out, err = cli(command, *line.split())
    assert code == 2 and out == "" and err.startswith("refused: ") and named in err
    assert "usage:" not in err and "Traceback" not in err and "hydra.run.dir" not in err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("+fp8=null", "must be a string"),
        ("+fp8=true", "must be a string"),
        ("+is_correction=AIS", "is_correction/AIS"),
        ("is_correction=ais", "use +is_correction=ais"),
        ("++fp8=unified", "++fp8=unified"),
        ("+fp8=unified fp8.recipes.scale_format=pow2", "fp8.recipes"),
        ("+fp8.exact=True +fp8=unified", "fp8.exact=True"),
        ("+fp8=unified --multirun", "--multirun"),
        ("+fp8=unified --capability nine", "--capability nine"),
    ],
)
def test_a_wrong_switch_is_named(cli, line, named):
    """Groups with wrong values, prefixes and keys."""
    code, _, err = cli("check", *line.split())
    assert code == 2 and named in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["replay", "report"])
@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_a_run_is_named(cli, command, folder, tmp_path):
    """An empty folder and one that is not there."""
    code, _, err = cli(command, str(tmp_path / folder))
    assert code == 2 and str(tmp_path) in err and "fix:" in err
