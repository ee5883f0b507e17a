"""A speedup within five per cent is precise enough."""

import pytest

from autotune.base.interval import Interval
from autotune.baseline.decide.precision import is_precise


@pytest.mark.parametrize(
    ("low", "high", "precise"),
    [
        pytest.param(0.96, 1.04, True, id="within 4 %"),
        pytest.param(0.93, 1.02, True, id="within 4.5 %, not symmetric"),
        pytest.param(0.9, 1.1, False, id="within 10 %"),
        pytest.param(None, None, False, id="no bounds"),
    ],
)
def test_ratio_within_five_per_cent_is_precise(low, high, precise):
    assert is_precise(Interval(value=1.0, low=low, high=high)) is precise
