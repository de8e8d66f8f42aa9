"""A dump of a run, for replay and its figures."""

import pytest

from tests.tools.runs.dumps import write_dump


@pytest.fixture
def dump(tmp_path):
    """A dump of three batches."""
    write_dump(tmp_path / "dump", steps=3)
    return tmp_path / "dump"
