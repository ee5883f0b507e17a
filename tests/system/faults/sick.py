"""Loss that is not finite, or far too high, on one rank: what the trainer makes of it under real torchrun."""

import math
import random
import time
from typing import Any

from tests.system.faults.jobs import STEPS, Job, Workplace, check_the_same
from tests.system.faults.kills import kill_tree
from trainer.errors import TrainingFailed
from trainer.events import EventRow

SPIKE_AT = 21
"""Late enough for a window of losses to hold it against."""
PATIENCE, MOST_ROLLBACKS = 3, 2
EASED = 0.5


def leave_out(place: Workplace, points: int, seed: int, *, told_late_steps: int = 0) -> dict[str, Any]:
    """A NaN in one step of one rank, and a spike in another: all ranks leave both steps out, and training goes on.

    On a GPU the numbers of a step arrive steps later, and so does the number of those left out.
    """
    rng = random.Random(seed)
    for _ in range(points):
        nan = rng.choice([step for step in range(2, STEPS - 1) if step != SPIKE_AT])
        steps = {"non_finite": nan, "spike": SPIKE_AT}
        job = _spiked(place, "skip")
        faults = [("nan", nan), ("spike", SPIKE_AT)]
        record = job.finish([{"kind": kind, "step": step, "rank": rng.randrange(2)} for kind, step in faults])
        for kind, step in steps.items():
            _check_told(job, record.events, kind, step, "skip")
            assert sum(event.kind == kind for event in record.events) == 1
        assert [row.step for row in record.steps if row.loss is None] == [nan]
        left_out = [sum(step + told_late_steps <= row.step for step in steps.values()) for row in record.steps]
        assert [row.skipped_steps for row in record.steps] == left_out
        _check_ranks_agree(job)
    return {"faults": 2 * points, "runs": points}


def not_finite_for_ever(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """NaN from some step on: training rolls back, gives up, and is not tried again under the same settings."""
    rng = random.Random(seed)
    settings = {"train.health.patience_steps": PATIENCE, "train.health.max_rollbacks": MOST_ROLLBACKS}
    for _ in range(points):
        job, step = place.job(2, settings), rng.randint(6, 12)
        left = job.leave(job.start([{"kind": "nan_for_ever", "step": step, "rank": rng.randrange(2)}]))
        assert (left.exit_code, left.requeue) == (TrainingFailed.exit_code, False)
        assert "training gives up" in left.reason
        assert sum(event.kind == "rolled_back" for event in job.events()) == MOST_ROLLBACKS
        written = job.steps_written()
        assert job.leave(job.start()) == left
        assert "gave up before, and nothing was changed since" in job.log.read_text(errors="replace")
        assert job.steps_written() == written
    return {"faults": points, "runs": points}


def take(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """A loss that is 20 times too high on one rank, which is only to be told."""
    rng = random.Random(seed)
    for _ in range(points):
        job = _spiked(place, "warn")
        record = job.finish([{"kind": "spike", "step": SPIKE_AT, "rank": rng.randrange(2)}])
        _check_told(job, record.events, "spike", SPIKE_AT, "warn")
        assert record.steps[-1].skipped_steps == 0
        _check_ranks_agree(job)
    return {"faults": points, "runs": points}


def _check_told(job: Job, events: tuple[EventRow, ...], kind: str, step: int, action: str) -> None:
    event = next(one for one in events if one.kind == kind)
    assert (event.step, event.action, event.level) == (step, action, "warning")
    assert event.samples == sorted({sample for _, sample in job.samples()[step]})


def roll_back(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Roll back after a spike; so many times be killed soon after, and start again: it is still rolled back, and ends
    as if it had not been killed.
    """
    rng = random.Random(seed)
    fault = {"kind": "spike", "step": SPIKE_AT, "rank": rng.randrange(2)}
    expected = _spiked(place, "rollback")
    expected.finish([fault])
    _check_ranks_agree(expected)
    _check_rollback(expected, place)
    for _ in range(points):
        job = _spiked(place, "rollback")
        process = job.start([fault])
        job.wait_until(process, lambda job=job: any(job.checkpoints.glob("step-*-rollback-1")))
        time.sleep(rng.uniform(0, 0.4))
        kill_tree(process)
        job.end(process)
        record = job.finish()
        assert (record.header.resumed_from or "").endswith("-rollback-1")
        check_the_same(job, expected)
    return {"faults": 1 + 2 * points, "runs": 1 + points}


def _spiked(place: Workplace, policy: str) -> Job:
    return place.job(2, {"train.health.on_spike": policy, "train.health.window_steps": 16})


def _check_rollback(job: Job, place: Workplace) -> None:
    """That it left out the data since the checkpoint, and no more, and eased the learning rate."""
    record, whole = job.record(), place.undisturbed()
    (event,) = (one for one in record.events if one.kind == "rolled_back")
    back, rows = int(event.values["to_step"]), record.header.global_batch_rows
    assert SPIKE_AT - 2 <= back < SPIKE_AT
    told = {"from_step": SPIKE_AT, "first_row_left_out": back * rows, "first_row_after": SPIKE_AT * rows}
    assert event.values.items() >= (told | {"rollbacks": 1}).items()
    undone = SPIKE_AT - back
    found, known = job.samples(), whole.samples()
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, samples in found.items():
        if step <= STEPS - undone:
            assert samples == known[step if step <= back else step + undone], step
    left_out = {pair for step in range(back + 1, SPIKE_AT + 1) for pair in known[step]}
    assert left_out.isdisjoint(pair for samples in found.values() for pair in samples)
    rates = [rows_of.steps[back].learning_rate for rows_of in (record, whole.record())]
    assert math.isclose(rates[0], EASED * rates[1])
    assert any(job.checkpoints.glob("step-*-rollback-1"))


def _check_ranks_agree(job: Job) -> None:
    """All ranks have the same weights in the end, and these are numbers."""
    weights = job.weights_sha256()
    assert (len(weights), len(set(weights))) == (job.ranks, 1)
    assert math.isfinite(job.record().evaluations[-1].loss)
