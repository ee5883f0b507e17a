"""The trainer under torchrun, interrupted in every way, moved to other ranks, and
started again until its end; and what it makes of a loss on one rank that is not finite,
or far too high.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.system.faults import interruptions as by
from tests.system.faults.jobs import (
    NO_DROPOUT,
    STEPS,
    Job,
    Settings,
    Workplace,
    check_the_same,
)
from tests.system.faults.kills import kill_tree
from trainer.errors import TrainingFailed
from trainer.health.events import EventRow
from trainer.health.watchdog import REQUEUE

PRESSED = {"train.checkpoint.interval_s": 0.05}
"""Hardly a moment without a save under way."""
PRESSED_WITH_LOADERS = PRESSED | {"train.data.num_workers": 1}
MOVED = NO_DROPOUT | {"train.evaluation.interval_steps": 10}
"""A save that follows an evaluation at once is a case of its own under fsdp2, which has
then gathered its weights."""
ROUNDING = 1e-4
"""Sums of fp32 numbers in another order, through all steps."""
FURTHEST = "largest_relative_difference_of_loss"
SPIKE_AT = 21
"""Late enough for a window of losses to hold it against."""
PATIENCE, MOST_ROLLBACKS = 3, 2
EASED = 0.5


def interrupt(
    place: Workplace,
    points: int,
    seed: int,
    interruptions: Sequence[by.Interruption],
    *,
    ranks: int = 2,
    settings: Settings | None = None,
    most_of_a_run: int = 5,
) -> dict[str, Any]:
    """Interrupt runs at so many moments; each must come to the end that an undisturbed
    run comes to, bit for bit.

    ``interruptions`` take turns, ``most_of_a_run`` of them before a run is let to its
    end. What it comes to must not depend on ``settings``.
    """
    expected = place.undisturbed(ranks)
    rng = random.Random(seed)
    struck = runs = halves = 0
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
        runs += 1
        assert runs < 10 * points, "the moments all lie behind its end"
    return {
        "faults": struck,
        "runs": runs,
        "bit_identical": runs,
        "faults_that_left_half_a_checkpoint": halves,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    ranks: int = 2
    strategy: str = "ddp"
    killed: bool = False
    """It ends by SIGKILL, otherwise by SIGTERM; the last stage is let to its end."""


RANKS = (Stage(ranks=2), Stage(ranks=3, killed=True), Stage(ranks=1))
STRATEGIES = (
    Stage(strategy="zero1"),
    Stage(strategy="fsdp2", killed=True),
    Stage(),
    Stage(strategy="fsdp2"),
)
BOTH = (
    Stage(ranks=3, strategy="zero1", killed=True),
    Stage(ranks=1),
    Stage(strategy="fsdp2"),
)


def move(
    place: Workplace, stages: Sequence[Stage], seed: int, points: int = 1
) -> dict[str, Any]:
    """Go through all stages so many times; data and losses must be those of an
    undisturbed run of two ranks."""
    expected = place.undisturbed(2, MOVED)
    whole = expected.record()
    furthest = 0.0
    for point in range(points):
        rng = random.Random(seed + point)
        job = place.job(2, MOVED)
        steps = STEPS // len(stages)
        for stage in stages[:-1]:
            job.ranks, job.settings["train.parallel.strategy"] = (
                stage.ranks,
                stage.strategy,
            )
            process = job.start_and_take(rng.randint(steps // 2, steps - 2))
            if stage.killed:
                kill_tree(process)
                job.end(process)
            else:
                process.terminate()
                assert job.leave(process).exit_code == REQUEUE
        job.ranks, job.settings["train.parallel.strategy"] = (
            stages[-1].ranks,
            stages[-1].strategy,
        )
        found = job.finish()
        assert found.header.world_size == stages[-1].ranks
        assert job.samples() == expected.samples()
        assert [row.step for row in found.steps] == list(range(1, STEPS + 1))
        pairs = list(
            zip(
                [row.loss for row in found.steps],
                [row.loss for row in whole.steps],
                strict=True,
            )
        )
        pairs.append((found.evaluations[-1].loss, whole.evaluations[-1].loss))
        for loss, other in pairs:
            assert loss == pytest.approx(other, rel=ROUNDING)
        furthest = max(
            furthest,
            *(abs(loss / other - 1) for loss, other in pairs if loss and other),
        )
    return {"faults": points * (len(stages) - 1), "runs": points, FURTHEST: furthest}


def leave_out(
    place: Workplace, points: int, seed: int, *, told_late_steps: int = 0
) -> dict[str, Any]:
    """A NaN in one step of one rank, and a spike in another: all ranks leave both steps
    out, and training goes on.

    On a GPU the numbers of a step arrive steps later, and so does the number of those
    left out.
    """
    rng = random.Random(seed)
    for _ in range(points):
        nan = rng.choice([step for step in range(2, STEPS - 1) if step != SPIKE_AT])
        steps = {"non_finite": nan, "spike": SPIKE_AT}
        job = _spiked(place, "skip")
        faults = [("nan", nan), ("spike", SPIKE_AT)]
        record = job.finish(
            [
                {"kind": kind, "step": step, "rank": rng.randrange(2)}
                for kind, step in faults
            ]
        )
        for kind, step in steps.items():
            _check_told(job, record.events, kind, step, "skip")
            assert sum(event.kind == kind for event in record.events) == 1
        assert [row.step for row in record.steps if row.loss is None] == [nan]
        for row in record.steps:
            late, at_once = (
                sum(step + by <= row.step for step in steps.values())
                for by in (told_late_steps, 0)
            )
            assert late <= row.skipped_steps <= at_once
        _check_ranks_agree(job)
    return {"faults": 2 * points, "runs": points}


def not_finite_for_ever(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """NaN from some step on: training rolls back, gives up, and is not tried again
    under the same settings."""
    rng = random.Random(seed)
    settings = {
        "train.health.patience_steps": PATIENCE,
        "train.health.max_rollbacks": MOST_ROLLBACKS,
    }
    for _ in range(points):
        job, step = place.job(2, settings), rng.randint(6, 12)
        left = job.leave(
            job.start(
                [{"kind": "nan_for_ever", "step": step, "rank": rng.randrange(2)}]
            )
        )
        assert (left.exit_code, left.requeue) == (TrainingFailed.exit_code, False)
        assert "training gives up" in left.reason
        assert (
            sum(event.kind == "rolled_back" for event in job.events()) == MOST_ROLLBACKS
        )
        written = job.steps_written()
        assert job.leave(job.start()) == left
        assert "gave up before with the same settings" in job.log.read_text(
            errors="replace"
        )
        assert job.steps_written() == written
    return {"faults": points, "runs": points}


def take(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """A loss that is 20 times too high on one rank, which is only to be told."""
    rng = random.Random(seed)
    for _ in range(points):
        job = _spiked(place, "warn")
        record = job.finish(
            [{"kind": "spike", "step": SPIKE_AT, "rank": rng.randrange(2)}]
        )
        _check_told(job, record.events, "spike", SPIKE_AT, "warn")
        assert record.steps[-1].skipped_steps == 0
        _check_ranks_agree(job)
    return {"faults": points, "runs": points}


def _check_told(
    job: Job, events: tuple[EventRow, ...], kind: str, step: int, action: str
) -> None:
    event = next(one for one in events if one.kind == kind)
    assert (event.step, event.action, event.level) == (step, action, "warning")
    assert event.samples == sorted({sample for _, sample in job.samples()[step]})


def roll_back(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Roll back after a spike; so many times be killed soon after, and start again: it
    is still rolled back, and ends as if it had not been killed.
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
        job.wait_until(
            process, lambda job=job: any(job.checkpoints.glob("step-*-rollback-1"))
        )
        time.sleep(rng.uniform(0, 0.4))
        kill_tree(process)
        job.end(process)
        record = job.finish()
        assert (record.header.resumed_from or "").endswith("-rollback-1")
        check_the_same(job, expected)
    return {"faults": 1 + 2 * points, "runs": 1 + points}


def _spiked(place: Workplace, policy: str) -> Job:
    return place.job(
        2, {"train.health.on_spike": policy, "train.health.window_steps": 16}
    )


def _check_rollback(job: Job, place: Workplace) -> None:
    """That it left out the data since the checkpoint, and no more, and eased the
    learning rate."""
    record, whole = job.record(), place.undisturbed()
    (event,) = (one for one in record.events if one.kind == "rolled_back")
    back, rows = int(event.values["to_step"]), record.header.global_batch_size
    # A GPU's losses are read a step later.
    seen = SPIKE_AT + (job.settings.get("train.device") == "cuda")
    assert SPIKE_AT - 2 <= back < SPIKE_AT
    told = {
        "from_step": seen,
        "first_row_left_out": back * rows,
        "first_row_after": seen * rows,
    }
    assert event.values.items() >= (told | {"rollbacks": 1}).items()
    undone = seen - back
    found, known = job.samples(), whole.samples()
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, samples in found.items():
        if step <= STEPS - undone:
            assert samples == known[step if step <= back else step + undone], step
    left_out = {pair for step in range(back + 1, seen + 1) for pair in known[step]}
    assert left_out.isdisjoint(pair for samples in found.values() for pair in samples)
    rates = [rows_of.steps[back].learning_rate for rows_of in (record, whole.record())]
    assert math.isclose(rates[0], EASED * rates[1])
    assert any(job.checkpoints.glob("step-*-rollback-1"))


def _check_ranks_agree(job: Job) -> None:
    """All ranks have the same weights in the end, and these are numbers."""
    weights = job.weights_sha256()
    assert (len(weights), len(set(weights))) == (job.ranks, 1)
    assert math.isfinite(job.record().evaluations[-1].loss)


@dataclass(frozen=True, slots=True)
class Loop:
    """A fault loop: what is injected, what is then held, and the points of a whole
    soak."""

    name: str
    run: Callable[..., dict[str, Any]]
    """What it does in a place: so many ``points``, by a ``seed``; returns its
    figures."""
    in_full: int
    injected: str = ""
    held: str = ""
    kind: str = "data"
    needs_mount: bool = False

    @property
    def told(self) -> dict[str, Any]:
        return {"injected": self.injected, "held": self.held} if self.injected else {}


def _interrupted(
    *ways: by.Interruption, **options: Any
) -> Callable[..., dict[str, Any]]:
    return partial(interrupt, interruptions=ways, **options)


SAME_END = "same record, weights bit-identical"
NOTHING_LOST = f"code 75, the last step saved; {SAME_END}"
SAME_DATA = "the same data, the loss of every step to 1e-4"
_KILLED = (
    "SIGKILL of torchrun and all that it started{}; a save is nearly always under way"
)
_training = partial(Loop, kind="training")
LOOPS = (
    _training(
        "SIGKILL, 1 rank",
        _interrupted(by.kill_all, ranks=1, settings=PRESSED),
        10,
        _KILLED.format(""),
        SAME_END,
    ),
    *(
        _training(
            f"SIGKILL, {ranks} ranks",
            _interrupted(by.kill_all, ranks=ranks, settings=PRESSED_WITH_LOADERS),
            10,
            _KILLED.format(", with loader processes"),
            SAME_END,
        )
        for ranks in (2, 3)
    ),
    _training(
        "signal to one rank",
        _interrupted(by.signal_rank),
        8,
        "SIGTERM, SIGINT, SIGUSR1, SIGUSR2 or SIGHUP to one rank",
        NOTHING_LOST,
    ),
    _training(
        "signal to torchrun",
        _interrupted(by.signal_torchrun),
        3,
        "SIGTERM to torchrun",
        NOTHING_LOST,
    ),
    _training(
        "torchrun dead",
        _interrupted(by.kill_torchrun),
        2,
        "SIGKILL to torchrun alone",
        f"the ranks notice, and leave; {NOTHING_LOST}",
    ),
    _training(
        "out of time",
        _interrupted(by.run_out_of_time, most_of_a_run=1),
        2,
        "`train.stop_after_s` shorter than the training",
        f"over before that time; {NOTHING_LOST}",
    ),
    _training(
        "second signal",
        _interrupted(by.signal_twice),
        3,
        "two SIGTERMs while a rank hangs",
        f"gone within 3 s, code 75, older checkpoints whole; {SAME_END}",
    ),
    _training(
        "hung rank",
        _interrupted(by.hang),
        3,
        "a rank sleeps; `train.parallel.timeout_s = 8`",
        f"over within 53 s, code 75, a traceback names the place; {SAME_END}",
    ),
    _training(
        "dead rank",
        _interrupted(by.kill_rank),
        3,
        "SIGKILL of one rank",
        f"code 75; {SAME_END}",
    ),
    _training(
        "bug on a rank",
        _interrupted(by.raise_on_rank),
        2,
        "an exception on one rank",
        f"code 70, its reason and traceback; {SAME_END}",
    ),
    _training(
        "rank that cannot begin",
        _interrupted(by.fail_before_it_begins),
        2,
        "a rank other than the first lacks its local disk's variable",
        f"code 3 and its reason, not 75; {SAME_END}",
    ),
    _training(
        "truncated checkpoint",
        by.truncate,
        60,
        "one file of the newest checkpoint cut short, or absent",
        "passed over, the one before is used",
    ),
    _training(
        "truncated checkpoint, resumed",
        _interrupted(by.damage),
        3,
        "SIGKILL, and the newest checkpoint cut short",
        f"passed over, and the record says so; {SAME_END}",
    ),
    _training(
        "full disk",
        by.fill,
        3,
        "the disk of the checkpoints, or of the whole run, is filled for a while; one"
        " that is too small at the start",
        "training goes on, the old checkpoint is whole, the next save works, no row is"
        " lost; refused with code 3",
        needs_mount=True,
    ),
    _training(
        "sick steps, left out",
        leave_out,
        2,
        "one NaN and one loss times 20 on one rank, `on_spike = skip`",
        "all ranks leave out both, and agree to the bit",
    ),
    _training(
        "spike, taken",
        take,
        1,
        "one loss times 20 on one rank, `on_spike = warn`",
        "told, with its samples; all ranks agree to the bit",
    ),
    _training(
        "spike, rolled back",
        roll_back,
        3,
        "one loss times 20 on one rank, `on_spike = rollback`; SIGKILL soon after",
        "the data since the checkpoint is left out, the rate eased; killed or not, the"
        " same weights",
    ),
    _training(
        "sick for ever",
        not_finite_for_ever,
        2,
        "NaN from a step on",
        "2 rollbacks, then code 76; started again it is refused",
    ),
    _training(
        "other ranks",
        partial(move, stages=RANKS),
        2,
        "2, then 3 (SIGKILLed), then 1 ranks",
        SAME_DATA,
    ),
    _training(
        "other strategies",
        partial(move, stages=STRATEGIES),
        1,
        "zero1, fsdp2 (SIGKILLed), ddp, fsdp2, each with evaluations on the way",
        SAME_DATA,
    ),
)
