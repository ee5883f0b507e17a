"""Fixture that clears the cached results of ``trainer.model.probe``."""

from collections.abc import Iterator

import pytest

from trainer.model import probe


@pytest.fixture
def no_cached_results() -> Iterator[None]:
    """Clear the cache before a test that changes what is checked, and after it."""
    probe.build_and_check.cache_clear()
    yield
    probe.build_and_check.cache_clear()
