"""Simulated runs whose limit is known.

The judgement of what limits a training is compared with them. A machine is drawn
(``testbed.simulators.machines``), and its steps are played event by event
(``testbed.simulators.timeline``). The record is then read from the marks as the
trainer's meter takes them: rank 0's, in means over the steps since the last logged one,
and of all ranks what an interval before showed. What limits the run is known from the
machine alone: it is the one remedy that saves most of the time of the steps, with the
same draws, and computing if none saves ``MATTERS_SHARE``. But for that threshold,
neither uses a line of what judges it. The remedy for memory leaves the update as it is,
which has its own.

Left out, and drawn again: machines on which no remedy, or more than one, is clearly it
(``MARGIN``), and ones whose limit nothing shows (launches and memory, if a device has
no counters).
"""

from dataclasses import dataclass

import numpy as np

from autotune.advice.decide.bottleneck import MATTERS_SHARE
from autotune.evidence.advice import Cause
from autotune.evidence.profile import Profile
from testbed.simulators.kernels import Floats
from testbed.simulators.machines import CAUSES, Machine, draw_machine
from testbed.simulators.records import run_of_rows, step_row
from testbed.simulators.timeline import (
    LAUNCHES,
    NOTHING,
    Conditions,
    Marks,
    Remedy,
    Timeline,
    draw_events,
)
from testbed.simulators.tuning import profile_of_machine
from trainer.formats.run_record import Run

MARGIN = 0.03
"""Of the step. A remedy that saves so nearly what matters, or what another one saves,
is not clearly it."""
REMEDIES: tuple[Remedy, ...] = (
    NOTHING,
    *(cause for cause in CAUSES if cause != "compute"),
    LAUNCHES,
)
MOST_DRAWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A record, what tuning measured on the same machine, and what is true of it."""

    cause: Cause
    saved: dict[Remedy, float]
    """Of the time of its steps, by each remedy alone."""
    run: Run
    profile: Profile
    machine: Machine

    @property
    def in_profile(self) -> bool:
        """Whether tuning measured what limits the run.

        Nothing else may matter that tuning does not measure. Tuning takes steps of one
        node's ranks, and synchronises the gradients of all; it measures neither
        updates, nor slow ranks, nor what happens between steps, nor the padding of
        sequences that are as wide as what they hold.
        """
        untold = [
            self.saved["straggler"],
            self.saved["optimizer step"],
            self.saved["launch-bound"] - self.saved[LAUNCHES],
        ]
        slow = self.machine.supply.slow_rank
        is_elsewhere = (
            self.cause == "data loading"
            and slow is not None
            and slow >= self.machine.local_ranks
        )
        is_bucketed = (
            self.machine.train.layout == "bucketed"
            and self.saved["padding"] >= MATTERS_SHARE
        )
        return max(untold) < MATTERS_SHARE and not is_elsewhere and not is_bucketed


def simulated_run(seed: int) -> SimulatedRun:
    """Return one run.

    Causes alternate, and machines are drawn again until one is clearly limited by the
    cause.
    """
    cause = CAUSES[seed % len(CAUSES)]
    for number in range(MOST_DRAWS):
        draw = np.random.default_rng((seed, number))
        machine = draw_machine(cause, draw)
        conditions = Conditions(
            steps=machine.steps,
            world_size=machine.world_size,
            micro_batches=machine.micro_batches,
            log_interval=machine.train.logged_steps,
        )
        draws = draw_events(machine, conditions, draw)
        marks = Timeline(machine, conditions, draws, REMEDIES).run()
        saved = _saved(marks, machine)
        if clear_cause(saved, machine) == cause:
            return SimulatedRun(
                cause=cause,
                saved=saved,
                run=_record(machine, marks, draws.fill_NW, draws.places_NW),
                profile=profile_of_machine(machine, draw),
                machine=machine,
            )
    raise AssertionError(f"no machine of {MOST_DRAWS} is limited by {cause}")


def clear_cause(saved: dict[Remedy, float], machine: Machine) -> Cause | None:
    """Return what limits a machine; None if it is not clear, or not visible."""
    causes = [cause for cause in CAUSES if cause != "compute"]
    first, second = sorted(causes, key=lambda cause: -saved[cause])[:2]
    if saved[first] < MATTERS_SHARE - MARGIN:
        return "compute"
    is_clear = (
        saved[first] > MATTERS_SHARE + MARGIN and saved[first] > saved[second] + MARGIN
    )
    return (
        first
        if is_clear and (machine.device.has_counters or not _is_inside(first, saved))
        else None
    )


def _is_inside(cause: Cause, saved: dict[Remedy, float]) -> bool:
    """Return whether a cause is inside of compute, where only counters look."""
    return cause == "memory" or (
        cause == "launch-bound" and saved[LAUNCHES] > saved["launch-bound"] / 2
    )


def _saved(marks: Marks, machine: Machine) -> dict[Remedy, float]:
    """Of rank 0's time from the end of the first logged step to that of the last."""
    first, last = _logged(machine)[0], _logged(machine)[-1]
    seconds = marks.closed[last, :, 0] - marks.restarted[first, :, 0]
    return {
        remedy: float(1 - remedy_s / seconds[0])
        for remedy, remedy_s in zip(REMEDIES, seconds, strict=True)
    }


def _logged(machine: Machine) -> list[int]:
    """Numbers of logged steps, from 0."""
    interval = machine.train.logged_steps
    return sorted({*range(interval - 1, machine.steps, interval), machine.steps - 1})


def _record(machine: Machine, marks: Marks, fill_NW: Floats, places_NW: Floats) -> Run:
    ends = _logged(machine)
    begins = [0, *(end + 1 for end in ends[:-1])]
    parts = [
        _Interval(marks, begin, end) for begin, end in zip(begins, ends, strict=True)
    ]
    # Rows are read a row later on a GPU, and their figures of all ranks travel with the
    # row after that.
    late = 2 if machine.device.on_gpu else 1
    slots = machine.train.global_batch_size * machine.train.seq_length_tokens
    peak = machine.device.peak_flops_per_s if machine.device.on_gpu else None
    rows = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        rank_figures = (
            _told(parts[number - late])
            if number >= late and machine.world_size > 1
            else {}
        )
        places, full = (
            float(share_NW[begin : end + 1].mean())
            for share_NW in (places_NW, fill_NW * places_NW)
        )
        interval = parts[number]
        rows.append(
            step_row(
                end + 1,
                (slots * full, slots * places),
                step_s=interval.step_s,
                ranks=machine.world_size,
                parameters=machine.shape.parameters,
                peak=peak,
                data_wait_s=interval.data_wait_s[0],
                compute_s=interval.compute_s[0],
                optimizer_s=interval.optimizer_s[0],
                communication_s=(
                    interval.communication_s[0] if machine.world_size > 1 else 0.0
                ),
                **rank_figures,
            )
        )
    return run_of_rows(
        machine.train,
        rows,
        ranks=machine.world_size,
        gradient_accumulation_steps=machine.micro_batches,
        parameters=machine.shape.parameters,
        device=machine.device.name,
        peak=peak,
    )


class _Interval:
    """Counts of every rank's meter at the end of an interval.

    They are means over its steps, by rank.
    """

    def __init__(self, marks: Marks, begin: int, end: int) -> None:
        def mean(moments: Floats) -> Floats:
            return np.asarray(moments[begin : end + 1, 0].mean(axis=0))

        started = marks.restarted[begin - 1, 0, 0] if begin else 0.0
        self.step_s = float(marks.closed[end, 0, 0] - started) / (end + 1 - begin)
        self.data_wait_s = mean(marks.waited_s)
        told_s = mean(marks.counted - marks.asked)
        self.compute_s = mean(marks.departed - marks.began) - told_s
        self.communication_s = mean(marks.reduced - marks.departed) + told_s
        self.optimizer_s = mean(marks.updated - marks.reduced)


def _told(before: _Interval) -> dict[str, float | int]:
    """Return the figures of all ranks in a logged step, from an interval before."""
    compute_s, waits_s = before.compute_s, before.data_wait_s
    median_low = float(np.sort(compute_s)[(len(compute_s) - 1) // 2])
    return {
        "slowest_rank": int(compute_s.argmax()),
        "slowest_rank_ratio": float(compute_s.max()) / median_low,
        "longest_data_wait_s": float(waits_s.max()),
        "longest_data_wait_rank": int(waits_s.argmax()),
    }
