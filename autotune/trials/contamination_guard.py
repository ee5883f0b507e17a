"""A machine that watches its GPUs, so that nothing else distorts its figures."""

from collections.abc import Mapping, Sequence

from autotune.base.clock import Clock
from autotune.machine.gpu_sampler import GpuSampler
from autotune.machine.nvml import MIN_INTERVAL_S, GpuMonitor
from autotune.machine.values import GpuSeries
from autotune.trials.decide import contamination
from autotune.trials.outcomes import Contaminated, Outcome
from autotune.trials.trial_machine import Machine
from autotune.trials.values import Trial

WAIT_BEFORE_S = 30.0
"""Longest wait for the GPUs of a trial to be free."""
WAIT_AFTER_S = 10.0
"""Longest wait for the memory of a trial to be freed after it."""


class ContaminationGuard:
    """Machine that runs trials on another one, only on GPUs as free as at the start.

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
        self._machine = machine
        self._monitor = monitor
        self._sampler = sampler
        self._clock = clock
        self._baseline_bytes = {uuid: monitor.used_bytes(uuid) for uuid in uuids}

    def run(self, trial: Trial) -> Outcome:
        """Run a trial once its GPUs are free.

        Discard its figures unless they are free again afterwards.
        """
        if trial.job in ("trace", "own_trace"):
            return self._machine.run(trial)
        # Ranks take GPUs in the order in which this process sees them.
        uuids = list(self._baseline_bytes)[: trial.ranks]
        occupied = self._wait_for_baseline(uuids, WAIT_BEFORE_S)
        if occupied:
            return Contaminated(detail=f"trial skipped: {'; '.join(occupied)}")
        self._sampler.start()
        # Samples from before the trial are not its own.
        self._sampler.take()
        outcome = self._machine.run(trial)
        series_by_gpu = self._sampler.take()
        reasons = self._disturbances(trial, uuids, series_by_gpu)
        reasons += self._wait_for_baseline(uuids, WAIT_AFTER_S)
        outcome = contamination.with_gpu_activity(
            outcome, [series_by_gpu[uuid] for uuid in uuids]
        )
        return contamination.judge(outcome, reasons)

    def close(self) -> None:
        """Close the machine that runs the trials, and stop sampling."""
        self._sampler.stop()
        self._machine.close()

    def _disturbances(
        self,
        trial: Trial,
        uuids: Sequence[str],
        series_by_gpu: Mapping[str, GpuSeries],
    ) -> list[str]:
        """Describe what the samples show of faults and of other processes."""
        disturbances: list[str | None] = []
        for uuid in uuids:
            name = _gpu_name(self._monitor, uuid)
            samples = series_by_gpu[uuid].samples
            if trial.is_timed:
                disturbances.append(contamination.describe_slowdown(name, samples))
            disturbances.append(contamination.describe_other_processes(name, samples))
        return [reason for reason in disturbances if reason is not None]

    def _wait_for_baseline(self, uuids: Sequence[str], limit_s: float) -> list[str]:
        """Wait until these GPUs are at their baselines.

        Return a description of each that is not at the time limit.
        """
        started_s = self._clock.monotonic_s()
        while True:
            used_bytes = {uuid: self._monitor.used_bytes(uuid) for uuid in uuids}
            above_baseline = [
                uuid
                for uuid in uuids
                if contamination.is_above_baseline(
                    self._baseline_bytes[uuid], used_bytes[uuid]
                )
            ]
            waited_s = self._clock.monotonic_s() - started_s
            if not above_baseline or waited_s >= limit_s:
                break
            self._clock.sleep(MIN_INTERVAL_S)
        return [
            contamination.describe_growth(
                _gpu_name(self._monitor, uuid),
                used_bytes[uuid],
                self._monitor.compute_processes(uuid),
                self._baseline_bytes[uuid],
                waited_s,
            )
            for uuid in above_baseline
        ]


def other_users(monitor: GpuMonitor, uuids: Sequence[str]) -> tuple[str, ...]:
    """Return a clause for each GPU that another process uses.

    Call it before this program uses any.
    """
    clauses = []
    for uuid in uuids:
        clause = contamination.describe_other_users(
            _gpu_name(monitor, uuid),
            monitor.used_bytes(uuid),
            monitor.compute_processes(uuid),
        )
        if clause is not None:
            clauses.append(clause)
    return tuple(clauses)


def _gpu_name(monitor: GpuMonitor, uuid: str) -> str:
    """Return the name of a GPU in messages: its index in nvidia-smi.

    Return its UUID if the GPU could not be described.
    """
    for facts in monitor.devices():
        if facts.uuid == uuid:
            return f"GPU {facts.index}"
    return uuid
