"""Fault loops of training: interruptions, other ranks, and bad losses on one rank.

The trainer runs under torchrun and is started again until its end, which is compared
with that of an undisturbed run.
"""

import itertools
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
from trainer.formats.errors import TrainingFailed
from trainer.formats.events import EventRow
from trainer.formats.run_record import Run
from trainer.health.watchdog import REQUEUE

SAVING_OFTEN = {"train.checkpoint.interval_s": 0.05}
"""Nearly always a save is under way."""
SAVING_OFTEN_WITH_LOADERS = SAVING_OFTEN | {"train.data.num_workers": 1}
MOVED = NO_DROPOUT | {"train.evaluation.interval_steps": 10}
"""A save that follows an evaluation at once is a case of its own under fsdp2, which has
then gathered its weights."""
ROUNDING = 1e-4
"""Sums of fp32 numbers in another order, through all steps."""
SPIKE_STEP = 21
"""Late enough for a window of losses to compare it with."""
PATIENCE_STEPS = 3
MOST_ROLLBACKS = 2
LEARNING_RATE_FACTOR = 0.5
"""Factor of the learning rate after a rollback."""


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
    """Interrupt runs; each must end as an undisturbed run, bit for bit.

    ``interruptions`` take turns, ``most_of_a_run`` of them before a run may end. Its
    end must not depend on ``settings``.
    """
    expected = place.undisturbed(ranks)
    rng = random.Random(seed)
    struck = 0
    runs = 0
    partial_checkpoints = 0
    while struck < points:
        job = place.job(ranks, settings)
        for _ in range(min(most_of_a_run, points - struck)):
            interruption = interruptions[struck % len(interruptions)]
            has_struck = interruption(job, rng)
            struck += has_struck
            partial_checkpoints += any(job.checkpoints.glob(".step-*.partial"))
            if not has_struck:
                break
        job.finish()
        check_the_same(job, expected)
        runs += 1
        assert runs < 10 * points, "the moments all lie behind its end"
    return {
        "faults": struck,
        "runs": runs,
        "bit_identical": runs,
        "faults_that_left_half_a_checkpoint": partial_checkpoints,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a run, with its ranks and strategy."""

    ranks: int = 2
    strategy: str = "ddp"
    killed: bool = False
    """True if it ends by SIGKILL, else by SIGTERM; the last stage runs to its end."""


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
    """Run through all stages.

    Data and losses must be those of an undisturbed run of two ranks.
    """
    expected = place.undisturbed(2, MOVED)
    expected_record = expected.record()
    largest_difference = 0.0
    for point in range(points):
        rng = random.Random(seed + point)
        job = place.job(2, MOVED)
        steps = STEPS // len(stages)
        *interrupted_stages, last_stage = stages
        for stage in interrupted_stages:
            job.ranks = stage.ranks
            job.settings["train.parallel.strategy"] = stage.strategy
            process = job.start_and_take(rng.randint(steps // 2, steps - 2))
            if stage.killed:
                kill_tree(process)
                job.end(process)
            else:
                process.terminate()
                assert job.leave(process).exit_code == REQUEUE
        job.ranks = last_stage.ranks
        job.settings["train.parallel.strategy"] = last_stage.strategy
        record = job.finish()
        assert record.header.world_size == last_stage.ranks
        assert job.samples() == expected.samples()
        assert [row.step for row in record.steps] == list(range(1, STEPS + 1))
        for loss, expected_loss in zip(
            _losses(record), _losses(expected_record), strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=ROUNDING)
            if loss and expected_loss:
                difference = abs(loss / expected_loss - 1)
                largest_difference = max(largest_difference, difference)
    return {
        "faults": points * (len(stages) - 1),
        "runs": points,
        "largest_relative_difference_of_loss": largest_difference,
    }


def _losses(record: Run) -> list[float | None]:
    """Return the losses of all steps, and of the last evaluation."""
    return [*(row.loss for row in record.steps), record.evaluations[-1].loss]


def leave_out(
    place: Workplace, points: int, seed: int, *, told_late_steps: int = 0
) -> dict[str, Any]:
    """Inject a NaN and a spike in two steps, each on one rank; all ranks skip both.

    On a GPU the figures of a step arrive ``told_late_steps`` later, and so does the
    number of skipped steps.
    """
    rng = random.Random(seed)
    for _ in range(points):
        nan_step = rng.choice(
            [step for step in range(2, STEPS - 1) if step != SPIKE_STEP]
        )
        bad_steps = (nan_step, SPIKE_STEP)
        job = _job_with_spikes(place, "skip")
        record = job.finish(
            [
                {"kind": "nan", "step": nan_step, "rank": rng.randrange(2)},
                {"kind": "spike", "step": SPIKE_STEP, "rank": rng.randrange(2)},
            ]
        )
        for kind, step in (("non_finite", nan_step), ("spike", SPIKE_STEP)):
            _check_event(job, record.events, kind, step, "skip")
            assert sum(event.kind == kind for event in record.events) == 1
        assert [row.step for row in record.steps if row.loss is None] == [nan_step]
        for row in record.steps:
            skipped = sum(step <= row.step for step in bad_steps)
            reported = sum(step + told_late_steps <= row.step for step in bad_steps)
            assert reported <= row.skipped_steps <= skipped
        _check_ranks_agree(job)
    return {"faults": 2 * points, "runs": points}


def not_finite_for_ever(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Inject NaN from some step on: training rolls back, then gives up.

    It does not start again under the same settings.
    """
    rng = random.Random(seed)
    settings = {
        "train.health.patience_steps": PATIENCE_STEPS,
        "train.health.max_rollbacks": MOST_ROLLBACKS,
    }
    for _ in range(points):
        job = place.job(2, settings)
        step = rng.randint(6, 12)
        fault = {"kind": "nan_for_ever", "step": step, "rank": rng.randrange(2)}
        run_exit = job.leave(job.start([fault]))
        assert run_exit.exit_code == TrainingFailed.exit_code
        assert not run_exit.requeue
        assert "training gives up" in run_exit.reason
        rollbacks = sum(event.kind == "rolled_back" for event in job.events())
        assert rollbacks == MOST_ROLLBACKS
        steps_written = job.steps_written()
        assert job.leave(job.start()) == run_exit
        log = job.log.read_text(errors="replace")
        assert "gave up before with the same settings" in log
        assert job.steps_written() == steps_written
    return {"faults": points, "runs": points}


def take(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Inject a loss that is 20 times too high on one rank, which is only reported."""
    rng = random.Random(seed)
    for _ in range(points):
        job = _job_with_spikes(place, "warn")
        fault = {"kind": "spike", "step": SPIKE_STEP, "rank": rng.randrange(2)}
        record = job.finish([fault])
        _check_event(job, record.events, "spike", SPIKE_STEP, "warn")
        assert record.steps[-1].skipped_steps == 0
        _check_ranks_agree(job)
    return {"faults": points, "runs": points}


def _check_event(
    job: Job, events: tuple[EventRow, ...], kind: str, step: int, action: str
) -> None:
    event = next(event for event in events if event.kind == kind)
    assert (event.step, event.action, event.level) == (step, action, "warning")
    assert event.samples == sorted({sample for _, sample in job.samples()[step]})


def roll_back(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Roll back after a spike; kill soon after, and start again.

    The run is still rolled back, and ends as if it had not been killed.
    """
    rng = random.Random(seed)
    fault = {"kind": "spike", "step": SPIKE_STEP, "rank": rng.randrange(2)}
    expected = _job_with_spikes(place, "rollback")
    expected.finish([fault])
    _check_ranks_agree(expected)
    _check_rollback(expected, place)
    for _ in range(points):
        job = _job_with_spikes(place, "rollback")
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


def _job_with_spikes(place: Workplace, policy: str) -> Job:
    return place.job(
        2, {"train.health.on_spike": policy, "train.health.window_steps": 16}
    )


def _check_rollback(job: Job, place: Workplace) -> None:
    """Check that the data since the checkpoint was left out, and no more.

    The learning rate must be lower afterwards.
    """
    record = job.record()
    undisturbed = place.undisturbed()
    (event,) = [event for event in record.events if event.kind == "rolled_back"]
    to_step = int(event.values["to_step"])
    global_batch_size = record.header.global_batch_size
    # A GPU's losses are read a step later.
    from_step = SPIKE_STEP + (job.settings.get("train.device") == "cuda")
    assert SPIKE_STEP - 2 <= to_step < SPIKE_STEP
    expected_values = {
        "from_step": from_step,
        "first_row_left_out": to_step * global_batch_size,
        "first_row_after": from_step * global_batch_size,
        "rollbacks": 1,
    }
    assert event.values.items() >= expected_values.items()

    undone_steps = from_step - to_step
    samples = job.samples()
    expected_samples = undisturbed.samples()
    assert sorted(samples) == list(range(1, STEPS + 1))
    for step in range(1, STEPS - undone_steps + 1):
        expected_step = step if step <= to_step else step + undone_steps
        assert samples[step] == expected_samples[expected_step], step
    trained = set(itertools.chain.from_iterable(samples.values()))
    for step in range(to_step + 1, from_step + 1):
        assert trained.isdisjoint(expected_samples[step])

    learning_rate = record.steps[to_step].learning_rate
    undisturbed_rate = undisturbed.record().steps[to_step].learning_rate
    assert math.isclose(learning_rate, LEARNING_RATE_FACTOR * undisturbed_rate)
    assert any(job.checkpoints.glob("step-*-rollback-1"))


def _check_ranks_agree(job: Job) -> None:
    """Check that all ranks have the same, finite weights in the end."""
    hashes = job.weights_sha256()
    assert len(hashes) == job.ranks
    assert len(set(hashes)) == 1
    assert math.isfinite(job.record().evaluations[-1].loss)


@dataclass(frozen=True, slots=True)
class Loop:
    """A fault loop, which injects faults and checks what holds."""

    name: str
    run: Callable[..., dict[str, Any]]
    """Function of a workplace, ``points`` and a ``seed`` that returns figures."""
    in_full: int
    """Points of a whole soak."""
    injected: str = ""
    held: str = ""
    kind: str = "data"
    needs_mount: bool = False

    @property
    def description(self) -> dict[str, Any]:
        """Return what is injected and what holds, for the figures."""
        if not self.injected:
            return {}
        return {"injected": self.injected, "held": self.held}


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
        _interrupted(by.kill_all, ranks=1, settings=SAVING_OFTEN),
        10,
        _KILLED.format(""),
        SAME_END,
    ),
    *(
        _training(
            f"SIGKILL, {ranks} ranks",
            _interrupted(by.kill_all, ranks=ranks, settings=SAVING_OFTEN_WITH_LOADERS),
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
