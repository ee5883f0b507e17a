"""Checks of whether an architecture works, which compute with a small model.

Their results are cached, by the config of the small model.
"""

import pytest

from trainer.model import probe


@pytest.fixture
def no_cached_results():
    """Let checks compute again, in this test and the first time after it."""
    probe.build_and_check.cache_clear()
    yield
    probe.build_and_check.cache_clear()
