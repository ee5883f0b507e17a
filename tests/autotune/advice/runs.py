"""Runs with autocorrelated step times, as real ones have, and profiles to match."""

import itertools
import math
from pathlib import Path

import numpy as np

from autotune.evidence.profile import Evidence
from testbed.examples.checkpoints import exit_of, header_of
from testbed.examples.run_rows import row_of
from testbed.examples.tuning import example_profile
from trainer.formats.run_record import Run

TOKENS = 1000


def run_of(rates, *, ranks=2, **header) -> Run:
    """Return a run with one step for each rate, in non-padding tokens/s."""
    steps = tuple(
        row_of(
            number, non_padding_tokens=TOKENS, step_s=TOKENS / rate, tokens_per_s=rate
        )
        for number, rate in enumerate(rates, start=1)
    )
    return Run(
        directory=Path("runs/r"),
        header=header_of(world_size=ranks, **header),
        steps=steps,
        evaluations=(),
        events=(),
        startup=None,
        end=exit_of(),
    )


SETTLING_STEPS = 300
"""Steps after which an autoregression has forgotten that it began at its mean."""


def noisy(
    seed: int, n: int, *, autocorrelation: float, noise: float, mean: float
) -> list[float]:
    """Return rates whose logarithms are a first-order autoregression.

    Args:
        seed: Seed of the noise.
        n: Number of rates.
        autocorrelation: Correlation of neighbouring rates.
        noise: Standard deviation of the logarithm of a rate.
        mean: Tokens over seconds of many rates.
    """
    normals = np.random.default_rng(seed).normal(size=n + SETTLING_STEPS)
    pushes = normals * math.sqrt(1 - autocorrelation**2) * noise
    logs = list(
        itertools.accumulate(
            pushes, lambda before, push: autocorrelation * before + push
        )
    )
    # Tokens over seconds is a harmonic mean: a log-normal second is longer than its
    # middle.
    return [mean * math.exp(log + noise**2 / 2) for log in logs[SETTLING_STEPS:]]


def add_evidence(profile=None, **parts):
    """Return the profile with only these parts of its evidence."""
    profile = example_profile("d") if profile is None else profile
    kept = {
        name: getattr(profile.evidence, name)
        for name, wanted in parts.items()
        if wanted
    }
    return profile.model_copy(update={"evidence": Evidence(**kept)})
