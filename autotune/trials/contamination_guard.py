"""A machine that watches its GPUs, and discards figures that others distorted."""

from collections.abc import Mapping, Sequence

from autotune.base.clock import Clock
from autotune.machine.gpu_sampler import GpuSampler
from autotune.trials.decide import contamination
from autotune.trials.decide.gpu_activity import with_gpu_activity
from autotune.trials.outcomes import Contaminated, Outcome
from autotune.trials.trial_machine import Machine
from autotune.trials.values import Trial
from trainer.formats.gpus import GpuSeries
from trainer.formats.nvml import MIN_INTERVAL_S, GpuMonitor

WAIT_BEFORE_S = 30.0
"""Longest wait for the GPUs of a trial to be free."""
WAIT_AFTER_S = 10.0
"""Longest wait for the memory of a trial to be freed after it."""


class ContaminationGuard:
    """Machine that gives trials to another machine, and watches the GPUs meanwhile.

    The memory in use at construction is the baseline, so this program must not use the
    GPUs before. A trial is not run while one of its GPUs holds more than the baseline.
    The trial's figures, or its out of memory, are discarded

    - if the memory is not freed after it,
    - if a second process used a GPU, or
    - if the trial was timed, and heat or the hardware slowed a GPU down.

    A process that the driver hides, and that runs only during one trial, goes
    undetected. Figures of a timed window get the activity of the GPUs in it. A trace
    uses no GPU, and is not watched.

    ``close`` closes the other machine and the sampler, but not the monitor.
    """

    def __init__(
        self,
        machine: Machine,
        monitor: GpuMonitor,
        uuids: Sequence[str],
        sampler: GpuSampler,
        clock: Clock,
    ) -> None:
        """Read the baseline of the GPUs.

        Args:
            machine: Machine that runs the trials.
            monitor: Reads the memory and the processes of the GPUs.
            uuids: UUIDs of the GPUs, in the order in which this process sees them.
            sampler: Samples the activity of these GPUs during trials.
            clock: Clock for waiting.
        """
        self._machine = machine
        self._monitor = monitor
        self._sampler = sampler
        self._clock = clock
        self._baseline_bytes = {uuid: monitor.used_bytes(uuid) for uuid in uuids}

    def run(self, trial: Trial) -> Outcome:
        """Run a trial once its GPUs are free; discard its figures if it was disturbed.

        Returns:
            The trial's outcome, or ``Contaminated``.
        """
        if trial.job in ("trace", "own_trace"):
            return self._machine.run(trial)
        # Ranks take GPUs in the order in which this process sees them.
        uuids = list(self._baseline_bytes)[: trial.ranks]
        occupied = self._wait_for_baseline(uuids, WAIT_BEFORE_S)
        if occupied:
            return Contaminated(detail=f"trial skipped: {'; '.join(occupied)}")
        self._sampler.start()
        # Drop samples from before the trial.
        self._sampler.take()
        outcome = self._machine.run(trial)
        series_by_gpu = self._sampler.take()
        reasons = self._disturbances(trial, uuids, series_by_gpu)
        reasons += self._wait_for_baseline(uuids, WAIT_AFTER_S)
        outcome = with_gpu_activity(outcome, [series_by_gpu[uuid] for uuid in uuids])
        return contamination.discard_if_disturbed(outcome, reasons)

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
        """Describe the faults and the other processes that the samples show."""
        disturbances: list[str] = []
        for uuid in uuids:
            name = _gpu_name(self._monitor, uuid)
            samples = series_by_gpu[uuid].samples
            slowdown = contamination.describe_slowdown(name, samples)
            # Only a timed trial depends on the speed of the GPU.
            if trial.is_timed and slowdown is not None:
                disturbances.append(slowdown)
            others = contamination.describe_other_processes(name, samples)
            if others is not None:
                disturbances.append(others)
        return disturbances

    def _wait_for_baseline(self, uuids: Sequence[str], limit_s: float) -> list[str]:
        """Wait until these GPUs are at their baselines, or ``limit_s`` has passed.

        Returns:
            A description of each GPU that is above its baseline at the end of the wait.
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
    """Return a description of each GPU that another process uses.

    Call this before this program uses a GPU.
    """
    descriptions = []
    for uuid in uuids:
        description = contamination.describe_other_users(
            _gpu_name(monitor, uuid),
            monitor.used_bytes(uuid),
            monitor.compute_processes(uuid),
        )
        if description is not None:
            descriptions.append(description)
    return tuple(descriptions)


def _gpu_name(monitor: GpuMonitor, uuid: str) -> str:
    """Return the name of a GPU for messages.

    Returns:
        Its index in nvidia-smi, or its UUID if the monitor does not list the GPU.
    """
    for facts in monitor.devices():
        if facts.uuid == uuid:
            return f"GPU {facts.index}"
    return uuid
