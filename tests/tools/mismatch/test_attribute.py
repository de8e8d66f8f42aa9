"""``verl-fp8 attribute``: a difference is attributed to its cause, where it acts."""

import json

from tests.tools.mismatch.models import IDS, MANY, RECIPE, START, model
from verl_fp8.tools.mismatch.attribute import attribute, attribution_page, rows, text
from verl_fp8.tools.mismatch.causes import causes


def test_a_cause_that_changes_no_bit_is_said(exact_model):
    """The table marks it and the text names it: it can't be acted on this machine, which says nothing about another."""
    built, fp8 = exact_model
    found = attribute(built, IDS, START, fp8=fp8) | {"seconds": 1.0}
    assert not found["causes"]["batch shape"]["acts"] and found["causes"]["attention eager"]["acts"]
    still = ", ".join(name for name, row in found["causes"].items() if not row["acts"])
    assert f"no bit changed on this machine, which says nothing about another: {still}" in text(found)


def test_the_table_says_where_it_starts():
    """Attention acts in layer 0, the head in no layer; one ulp of the scales is seen; JSON and HTML keep the result."""
    found = attribute(model(fp8=True), MANY, START, fp8=True)
    alone = {name: row["alone"] for name, row in found["causes"].items()}
    assert alone["attention eager"]["starts"] == 0 and alone["lm_head"]["starts"] is None
    assert alone["weight scales"]["max"] > 0 and alone["batch shape"]["max"] == 0
    assert found["all"]["k3"] > 0 and found["tokens"] == MANY.numel() - 16 * START
    assert {n for n, row in found["causes"].items() if "without" in row} == {
        c.name for c in causes(fp8=True) if c.ordinary
    }
    found |= {"model": "tiny", "recipe": RECIPE.to_dict(), "seconds": 1.0}
    assert json.loads(json.dumps(found)) == found
    assert all(name in text(found) for name in found["causes"]) and len(rows(found)) == len(found["causes"]) + 1
    page = attribution_page(found)
    assert "weight scales" in page and "http-equiv" not in page and 'src="http' not in page
