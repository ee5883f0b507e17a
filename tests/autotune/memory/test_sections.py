"""Texts of a profile about its probe."""

from autotune.memory.sections import reasons_of
from testbed.examples.profiles import but, example_profile


def test_knee_of_three_sizes_is_reported():
    probe = example_profile().evidence.probe.model_copy(
        update={"knee_micro_batch_sizes": [3, 1, 2]}
    )
    reasons = reasons_of(but(example_profile(), evidence={"probe": probe}))
    assert "throughput levels off between 1 and 3 sequences" in reasons
