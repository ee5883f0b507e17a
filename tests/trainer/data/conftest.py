"""The layouts of micro-batches, for tests that hold for all of them."""

import pytest


@pytest.fixture(params=["padded", "dynamic", "bucketed", "packed"])
def layout(request) -> str:
    return request.param
