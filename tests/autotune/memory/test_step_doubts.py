"""Judgement of the memory of a trial's steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.decide.step_doubts import (
    FLATTER,
    LEAST_BYTES,
    doubt_of,
    first_prediction,
    ignores_size,
    next_prediction,
)
from autotune.trials.job_figures import StepFigures

MIB = 2**20


def figures(peaks, kept, **more):
    known = {
        "steps": len(kept),
        "step_s": (0.1,) * len(kept),
        "units_per_step": 1.0,
        "peak_bytes": max(peaks, default=1),
        "non_pytorch_bytes": None,
        "optimizer_steps": 3,
        "trains": False,
        "gradient_bytes": 0,
        "host_peak_bytes": 1,
    }
    return StepFigures(
        step_peak_bytes=tuple(peaks), kept_bytes=tuple(kept), **known | more
    )


def test_growth_after_first_step_is_a_leak():
    assert doubt_of(
        figures([50 * MIB] * 4, [10 * MIB, 20 * MIB, 30 * MIB, 40 * MIB])
    ) == ("leaks", 10 * MIB)
    assert doubt_of(figures([50 * MIB] * 3, [10 * MIB, 30 * MIB, 30 * MIB])) is None
    assert doubt_of(figures([50 * MIB] * 3, [10 * MIB, 30 * MIB, 10 * MIB])) is None


def test_differing_peaks_after_first_step_are_doubtful():
    assert doubt_of(figures([90 * MIB, 50 * MIB, 70 * MIB], [MIB] * 3)) == (
        "varies",
        20 * MIB,
    )
    assert doubt_of(figures([90 * MIB, 50 * MIB, 50 * MIB], [MIB] * 3)) is None
    assert doubt_of(figures([], [MIB] * 3)) is None


def test_smaller_last_batches_are_no_doubt():
    of_epochs = [90 * MIB, *[70 * MIB, 70 * MIB, 50 * MIB] * 3]
    assert doubt_of(figures(of_epochs[:4], [MIB] * 4)) is None
    for last in ([70 * MIB, 50 * MIB], [50 * MIB, 70 * MIB]):  # to be confirmed
        assert doubt_of(figures([90 * MIB, *last], [MIB] * 3)) == ("varies", 20 * MIB)
    assert doubt_of(figures(of_epochs, [MIB] * 10)) is None
    assert doubt_of(
        figures([90 * MIB, 50 * MIB, 50 * MIB, *[70 * MIB] * 7], [MIB] * 10)
    ) == ("varies", 20 * MIB)
    assert doubt_of(figures([90 * MIB, 50 * MIB, *[70 * MIB] * 8], [MIB] * 10)) is None
    random_lengths = [
        90 * MIB,
        *(size * MIB for size in (31, 70, 44, 58, 61, 39, 69, 50, 47)),
    ]
    assert doubt_of(figures(random_lengths, [MIB] * 10)) == ("varies", 39 * MIB)


@given(st.lists(st.integers(0, LEAST_BYTES // 2), min_size=3, max_size=10))
def test_noise_is_no_doubt(noise):
    assert (
        doubt_of(
            figures(
                [100 * MIB + extra_bytes for extra_bytes in noise],
                [10 * MIB + extra_bytes for extra_bytes in noise],
            )
        )
        is None
    )


@given(st.integers(1, 64), st.integers(1, 10**9), st.integers(0, 10**9))
def test_first_prediction_covers_its_trial(size, growing, base):
    prediction = first_prediction(size, figures([base + growing] * 3, [base] * 3))
    assert prediction.peak_bytes(size) >= base + growing
    assert prediction.peak_bytes(2 * size) - prediction.peak_bytes(size) >= growing


def test_second_fit_corrects_the_prediction():
    steep = first_prediction(4, figures([104 * MIB] * 3, [0] * 3))
    assert next_prediction([(4, 104 * MIB)], steep) is steep
    grown = next_prediction([(4, 104 * MIB), (8, 120 * MIB)], steep).peak_bytes
    assert grown(10) - grown(8) == 8 * MIB


def test_flat_second_fit_flattens_only_so_far():
    steep = first_prediction(4, figures([104 * MIB] * 3, [0] * 3))
    flat = next_prediction([(4, 104 * MIB), (8, 104 * MIB)], steep).peak_bytes
    assert flat(8) == 104 * MIB
    assert flat(9) - flat(8) == (steep.peak_bytes(9) - steep.peak_bytes(8)) / FLATTER


def test_no_growth_gives_no_prediction():
    assert first_prediction(4, figures([MIB] * 3, [MIB] * 3)) is None
    assert first_prediction(4, figures([], [MIB] * 3)) is None


@pytest.mark.parametrize("exact", [True, False])
def test_size_without_effect_is_ignored(exact):
    assert ignores_size([(4, 10 * MIB), (4096, 10 * MIB)], exact=exact)
    assert not ignores_size([(4, 10 * MIB), (64, 10 * MIB)], exact=exact)
    assert not ignores_size([(4, 10 * MIB), (4096, 100 * MIB)], exact=exact)


def test_growth_that_ends_is_ignored_size():
    ended = [(4, 10 * MIB), (512, 40 * MIB), (2048, 40 * MIB)]
    assert ignores_size(ended) == (512, 2048)
    assert ignores_size(ended, exact=False) is None  # 512 may have met leftovers
    assert not ignores_size([(4, 10 * MIB), (512, 40 * MIB), (520, 40 * MIB)])
