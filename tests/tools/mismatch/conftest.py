"""The tiny exact model, with FP8 layers and without."""

import pytest

from tests.tools.mismatch.models import model


@pytest.fixture(scope="module", params=[True, False], ids=["fp8", "bf16"])
def exact_model(request):
    """(model, whether it has FP8 layers)."""
    return model(fp8=request.param), request.param
