"""The parts of a rule: refusals and the exceptions they are, and tables of keys."""

import pytest
from omegaconf import OmegaConf

from verl_fp8.errors import ConfigError, DataError, is_number
from verl_fp8.rules.refuse import Key, Refusal, caught, get, number, off, table, zero

CONFIG = OmegaConf.create({"a": {"b": 2, "null": None, "flag": True, "text": "high"}, "same": "${a.b}"})


def test_a_value_is_read_by_its_path():
    """Interpolations resolved; an absent or empty key reads as the default."""
    assert (get(CONFIG, "a.b"), get(CONFIG, "same")) == (2, 2)
    assert (get(CONFIG, "a.null", 7), get(CONFIG, "a.absent", 7), get(CONFIG, "absent.key")) == (7, 7, None)


@pytest.mark.parametrize(("value", "wanted"), [(1, True), (0.5, True), (True, False), ("1", False), (None, False)])
def test_true_is_no_number(value, wanted):
    """To Python it is one; to a user ``fp8.recipe.eps=true`` is a mistake."""
    assert is_number(value) is wanted


@pytest.mark.parametrize("path", ["a.flag", "a.text"])
def test_what_must_be_a_number_is_refused_otherwise(path):
    """The message names the key and shows the value."""
    with pytest.raises(ConfigError, match=rf"{path}=.*not a number"):
        number(CONFIG, path, 0)


def test_a_table_yields_every_row_that_does_not_hold():
    """In its order; a row with a number that is none is a refusal like any other."""
    rows = (
        Key("a.b", (2,), "", "never"),
        Key("a.b", (1, 3), "; tried with 1, 3", "set {path}=1"),
        Key("a.flag", off, ", which is on", "set {path}=false"),
        Key("a.text", zero, "", "never", numeric=True),
        Key("a.absent", (5,), "", "never", default=5),
    )
    assert [(r.found, r.fix) for r in table(CONFIG, "+fp8", rows)] == [
        ("a.b=2; tried with 1, 3", "set a.b=1"),
        ("a.flag=True, which is on", "set a.flag=false"),
        ("not a number", "set a.text to a number"),
    ]


def test_a_refusal_is_its_exception():
    """There and back, with its kind and the error behind it; two of the same words are one."""

    def check():
        raise DataError("a", "b", "c") from OSError("d")

    (refusal,) = caught(check)
    assert refusal == Refusal("a", "b", "c", DataError)
    error = refusal.error()
    assert type(error) is DataError and str(error) == str(refusal) and isinstance(error.__cause__, OSError)
    assert list(caught(lambda: None)) == []
