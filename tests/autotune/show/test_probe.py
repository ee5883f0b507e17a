from pathlib import Path

import pytest

from autotune.show.probe import ProbedModel, probe_answer
from tests.autotune.profiles import example_profile


@pytest.mark.parametrize(
    ("driver", "known"), [("580.1", "measured"), (None, "measured"), ("0.0 (nullgpu)", "allocator")]
)
def test_peaks_of_a_pretended_gpu_are_the_allocators(driver, known):
    profile = example_profile()
    profile = profile.model_copy(update={"fingerprint": profile.fingerprint.model_copy(update={"driver": driver})})
    told = probe_answer(ProbedModel(path=Path("p.toml"), profile=profile, trials=(), previous=None))
    assert told["bytes_known"] == known
