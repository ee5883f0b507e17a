"""The trainer under torchrun, interrupted in every way, and started again until it comes to its end."""

import random
from collections.abc import Sequence
from typing import Any

from tests.system.faults.interruptions import Interruption
from tests.system.faults.jobs import Settings, Workplace, check_the_same

PRESSED = {"train.checkpoint.interval_s": 0.05}
"""Hardly a moment without a save under way."""
WITH_LOADERS = {"train.data.loader_workers": 1}


def interrupt(
    place: Workplace,
    points: int,
    seed: int,
    interruptions: Sequence[Interruption],
    *,
    ranks: int = 2,
    settings: Settings | None = None,
    most_of_a_run: int = 5,
) -> dict[str, Any]:
    """Interrupt runs at so many moments; each must come to the end that an undisturbed run comes to, bit for bit.

    ``interruptions`` take turns, ``most_of_a_run`` of them before a run is let to its end. What it comes to must not
    depend on ``settings``.
    """
    expected = place.undisturbed(ranks)
    rng = random.Random(seed)
    struck = runs = starts = halves = steps_taken_again = 0
    while struck < points:
        job = place.job(ranks, settings)
        for _ in range(min(most_of_a_run, points - struck)):
            hit = interruptions[struck % len(interruptions)](job, rng)
            struck += hit
            halves += any(job.checkpoints.glob(".step-*.partial"))
            if not hit:
                break
        job.finish()
        check_the_same(job, expected)
        steps_taken_again += job.steps_written() - len(job.record().steps)
        runs += 1
        starts += job.starts
        assert runs < 10 * points, "the moments all lie behind its end"
    return {
        "faults": struck,
        "ranks": ranks,
        "runs": runs,
        "bit_identical": runs,
        "starts": starts,
        "steps_taken_again": steps_taken_again,
        "faults_that_left_half_a_checkpoint": halves,
    }
