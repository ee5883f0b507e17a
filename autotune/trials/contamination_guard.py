"""A machine whose GPUs are monitored, so that other users and faults do not distort figures."""

from collections.abc import Sequence

from autotune.base.clock import Clock
from autotune.machine.gpu_sampler import GpuSampler
from autotune.machine.nvml import MIN_INTERVAL_S, GpuMonitor
from autotune.trials.decide import contamination
from autotune.trials.fork_server import Machine
from autotune.trials.values import Contaminated, Outcome, Trial

WAIT_BEFORE_S, WAIT_AFTER_S = 30.0, 10.0
"""Longest waits for GPUs to be free: before a trial, and for its own memory after
it."""


class ContaminationGuard:
    """Machine that runs trials on another one, each only on GPUs that are as free as they were at first.

    A trial is not run while a GPU holds more than its baseline. Its figures, and an out
    of memory, are discarded if the memory is not freed after it, if a second process
    used the GPU, or, for a timed trial, if heat or the hardware slowed a GPU down. A
    process that the driver hides, and that only runs during one trial, goes undetected.
    Figures of a timed window get the activity of the GPUs in it. A trace uses no GPU,
    and is not monitored.

    The memory in use at construction is the baseline, so this program must not use the
    GPUs before. The machine and the sampler are closed with this one, the monitor is
    not.
    """

    def __init__(
        self,
        machine: Machine,
        monitor: GpuMonitor,
        uuids: Sequence[str],
        sampler: GpuSampler,
        clock: Clock,
    ) -> None:
        self._machine, self._monitor, self._sampler, self._clock = (
            machine,
            monitor,
            sampler,
            clock,
        )
        self._baseline_bytes = {uuid: monitor.used_bytes(uuid) for uuid in uuids}

    def run(self, trial: Trial) -> Outcome:
        """Run a trial once its GPUs are free.

        Discard its figures unless they are free again afterwards.
        """
        if trial.job in ("trace", "own_trace"):
            return self._machine.run(trial)
        # Ranks take GPUs in the order in which this process sees them.
        used = list(self._baseline_bytes)[: trial.ranks]
        occupied = self._wait_for_baseline(used, WAIT_BEFORE_S)
        if occupied:
            return Contaminated(detail=f"trial skipped: {'; '.join(occupied)}")
        self._sampler.start()
        self._sampler.take()
        outcome = self._machine.run(trial)
        taken = self._sampler.take()
        reasons: list[str | None] = []
        for uuid in used:
            name, samples = _name(self._monitor, uuid), taken[uuid].samples
            reasons += (
                [contamination.describe_slowdown(name, samples)]
                if trial.is_timed
                else []
            )
            reasons.append(contamination.describe_other_processes(name, samples))
        reasons += self._wait_for_baseline(used, WAIT_AFTER_S)
        with_activity = contamination.with_gpus(outcome, [taken[uuid] for uuid in used])
        return contamination.judge(
            with_activity, [one for one in reasons if one is not None]
        )

    def close(self) -> None:
        """Close the machine that runs the trials, and stop sampling."""
        self._sampler.stop()
        self._machine.close()

    def _wait_for_baseline(self, uuids: Sequence[str], limit_s: float) -> list[str]:
        """Wait until these GPUs are at their baselines.

        Return a description of each that is not at the time limit.
        """
        started_s = self._clock.monotonic_s()
        while True:
            used = {uuid: self._monitor.used_bytes(uuid) for uuid in uuids}
            above = [
                one
                for one in uuids
                if contamination.is_above_baseline(self._baseline_bytes[one], used[one])
            ]
            waited_s = self._clock.monotonic_s() - started_s
            if not above or waited_s >= limit_s:
                break
            self._clock.sleep(MIN_INTERVAL_S)
        before, ask = self._baseline_bytes, self._monitor
        return [
            contamination.describe_growth(
                _name(ask, one),
                used[one],
                ask.compute_processes(one),
                before[one],
                waited_s,
            )
            for one in above
        ]


def other_users(monitor: GpuMonitor, uuids: Sequence[str]) -> tuple[str, ...]:
    """Return a clause for each GPU that another process uses.

    Call it before this program uses any.
    """
    uses = (
        (
            _name(monitor, uuid),
            monitor.used_bytes(uuid),
            monitor.compute_processes(uuid),
        )
        for uuid in uuids
    )
    return tuple(
        clause
        for use in uses
        if (clause := contamination.describe_other_users(*use)) is not None
    )


def _name(monitor: GpuMonitor, uuid: str) -> str:
    """Return the name of a GPU in messages: its index by nvidia-smi, or its UUID if it could not be described."""
    return next(
        (f"GPU {facts.index}" for facts in monitor.devices() if facts.uuid == uuid),
        uuid,
    )
