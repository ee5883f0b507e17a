"""Dips of a throughput curve, and the kernels that explain them."""

import pytest

from autotune.evidence.kernels import KernelTime
from autotune.evidence.probe import CurvePoint
from autotune.memory.decide.throughput_dip import deepest_dip, grown_kernels
from autotune.trials.job_figures import KernelFigures
from testbed.examples.kernels import H100


def curve_of(rates, half_width=None):
    """Return a curve with these rates, and intervals of a relative half-width."""
    points = []
    for size, rate in rates.items():
        low = high = None
        if half_width is not None:
            low, high = rate * (1 - half_width), rate * (1 + half_width)
        points.append(
            CurvePoint(
                size=size,
                units_per_s=rate,
                step_s=1.0,
                timed_steps=4,
                units_per_s_low=low,
                units_per_s_high=high,
            )
        )
    return points


def kernels_of(tokens, **seconds):
    """Return the kernels of a step, with the seconds of each by its name."""
    kernels = tuple(
        KernelTime(name=name, calls=11.0, seconds=value)
        for name, value in seconds.items()
    )
    return KernelFigures(
        kernels=kernels,
        units_per_step=tokens,
        step_s=sum(seconds.values()),
        roofline=H100,
    )


def test_finds_the_deepest_dip():
    # Measured on an H100: bert-120m at 64, 256 and 440 sequences of 512.
    dip = deepest_dip(curve_of({64: 589_900.0, 256: 538_400.0, 440: 608_716.0}))
    assert dip.smaller.size == 64
    assert dip.larger.size == 256


@pytest.mark.parametrize(
    "curve",
    [
        curve_of({}),
        curve_of({64: 100.0}),
        curve_of({64: 100.0, 128: 101.0, 256: 99.5}),
        curve_of({64: 100.0, 128: 95.0}, half_width=0.03),
    ],
    ids=["no curve", "one size", "level", "noise"],
)
def test_no_dip_without_a_clear_fall(curve):
    assert deepest_dip(curve) is None


def test_names_the_kernels_that_grew():
    # The layer norms of the same steps: 3.3 ms at 64 sequences, 58.6 ms at 256.
    smaller = kernels_of(32_768, triton_layer_norm_3=0.0033, gemm=0.022, copy=0.001)
    larger = kernels_of(131_072, triton_layer_norm_7=0.0586, gemm=0.088, copy=0.006)
    first, second = grown_kernels(smaller, larger)
    assert first.name == "triton_layer_norm_"
    assert first.ratio == pytest.approx(4.44, abs=0.01)
    assert second.name == "copy"
