"""The page of ``verl-fp8 replay``, as the command writes it."""

import json
import re

import pytest

from verl_fp8.__main__ import main
from verl_fp8.switches.settings import METHOD_KEYS


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
