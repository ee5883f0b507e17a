"""A run that goes on with other ranks, or another strategy, than it began with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.system.faults.jobs import NO_DROPOUT, STEPS, Workplace
from tests.system.faults.kills import kill_tree
from trainer.watch import REQUEUE

MOVED = NO_DROPOUT | {"train.evaluation.interval_steps": 10}
"""A save that follows an evaluation at once is a case of its own under fsdp2, which has then gathered its weights."""
ROUNDING = 1e-4
"""Sums of fp32 numbers in another order, through all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    ranks: int = 2
    strategy: str = "ddp"
    killed: bool = False
    """It ends by SIGKILL, otherwise by SIGTERM; the last stage is let to its end."""


RANKS = (Stage(ranks=2), Stage(ranks=3, killed=True), Stage(ranks=1))
STRATEGIES = (Stage(strategy="zero1"), Stage(strategy="fsdp2", killed=True), Stage(), Stage(strategy="fsdp2"))
BOTH = (Stage(ranks=3, strategy="zero1", killed=True), Stage(ranks=1), Stage(strategy="fsdp2"))


def move(place: Workplace, stages: Sequence[Stage], seed: int) -> dict[str, Any]:
    """Go through all stages; data and losses must be those of an undisturbed run of two ranks."""
    rng = random.Random(seed)
    expected = place.undisturbed(2, MOVED)
    job = place.job(2, MOVED)
    steps = STEPS // len(stages)
    for stage in stages:
        job.ranks, job.settings["train.parallel.strategy"] = stage.ranks, stage.strategy
        if stage is stages[-1]:
            job.finish()
            break
        before = job.steps_written()
        process = job.start()
        job.wait_for_steps(process, rng.randint(steps // 2, steps - 2), before=before)
        if stage.killed:
            kill_tree(process)
            job.end(process)
        else:
            process.terminate()
            assert job.leave(process).exit_code == REQUEUE
    found, whole = job.record(), expected.record()
    assert found.header.world_size == stages[-1].ranks
    assert job.samples() == expected.samples()
    assert [row.step for row in found.steps] == list(range(1, STEPS + 1))
    pairs = list(zip([row.loss for row in found.steps], [row.loss for row in whole.steps], strict=True))
    pairs.append((found.evaluations[-1].loss, whole.evaluations[-1].loss))
    for loss, other in pairs:
        assert loss == pytest.approx(other, rel=ROUNDING)
    furthest = max(abs(loss / other - 1) for loss, other in pairs if loss and other)
    return {"faults": len(stages) - 1, "runs": 1, "largest_relative_difference_of_loss": furthest}
