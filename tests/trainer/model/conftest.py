"""Checks of small copies, whose results are cached by the copy's config."""

import pytest

from trainer.model import probe


@pytest.fixture
def no_cached_results():
    """Check models again in this test, and after it."""
    probe.build_and_check.cache_clear()
    yield
    probe.build_and_check.cache_clear()
