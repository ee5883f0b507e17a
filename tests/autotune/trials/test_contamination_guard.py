"""Trials run on free GPUs only, and outcomes are discarded if something disturbed them.

The guard reads the memory of a GPU when it is made (the baseline), before each trial,
and after each, and again every ``MIN_INTERVAL_S`` while it waits. It takes two samples
before a trial, which do not count, and one after it.
"""

import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from autotune.errors import BadInput
from autotune.memory.throughput import CURVE_STEPS
from autotune.subjects.mlm.memory.probe import FIT_STEPS
from autotune.trials.contamination_guard import (
    WAIT_AFTER_S,
    WAIT_BEFORE_S,
    ContaminationGuard,
    other_users,
)
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    OutOfMemory,
    TimedOut,
)
from autotune.trials.values import Trial
from testbed.fakes import (
    GPU_FACTS,
    SAMPLE,
    FakeClock,
    FakeGpu,
    FakeGpuMonitor,
    FakeGpuSampler,
    FakeMachine,
)
from trainer.formats.gpus import GpuProcess, Unavailable
from trainer.formats.nvml import MIN_INTERVAL_S

GIB = 2**30
IDLE_BYTES = GIB // 2
OCCUPIED_BYTES = 4 * GIB
# Memory in use at each reading; the last value stays.
IDLE = (IDLE_BYTES,)
OCCUPIED_BEFORE_TRIAL = (IDLE_BYTES, OCCUPIED_BYTES)
OCCUPIED_AFTER_TRIAL = (IDLE_BYTES, IDLE_BYTES, OCCUPIED_BYTES)
UNKNOWN = Unavailable(reason="NVML: Insufficient Permissions")
NEIGHBOUR = (GpuProcess(pid=42, used_bytes=3 * GIB),)
TRIAL = Trial(job="step", measured={"micro_batch_size": 8}, timeout_s=60.0)
TRIAL_ON_TWO_GPUS = Trial(
    job="step", measured={"micro_batch_size": 8, "local_ranks": 2}, timeout_s=60.0
)
FIGURES = Measured(figures={"peak_bytes": GIB})
OUT_OF_MEMORY = OutOfMemory(detail="CUDA out of memory")
WINDOW = Measured(
    figures={"window_start_s": 1001.0, "window_end_s": 1003.0, "steps": 4}
)
FIGURES_OR_OUT_OF_MEMORY = pytest.mark.parametrize(
    "outcome", [FIGURES, OUT_OF_MEMORY], ids=["figures", "out of memory"]
)


def gpu(
    *,
    index=0,
    used_bytes=IDLE,
    throttle_reasons=None,
    processes=(),
    process_counts=(1,),
) -> FakeGpu:
    """Script a GPU.

    Args:
        index: Number of the GPU.
        used_bytes: Memory in use at each reading, the baseline first; the last value
            stays.
        throttle_reasons: Reasons for a lower clock in all samples.
        processes: Processes that the driver lists.
        process_counts: Number of processes in each sample; the last value stays.
    """
    samples = [
        replace(
            SAMPLE,
            utilisation=1.0,
            throttle_reasons=throttle_reasons,
            process_count=count,
        )
        for count in process_counts
    ]
    return FakeGpu(
        facts=replace(GPU_FACTS, uuid=f"GPU-{index}", index=index),
        used_bytes=used_bytes,
        samples=samples,
        processes=(processes,),
    )


class TwiceSampled(FakeGpuSampler):
    """Samples twice before each ``take``, as a single hot sample is tolerated.

    So the fourth and the fifth sample of a GPU are those of the first trial.
    """

    def take(self):
        self.tick()
        return super().take()


def about(waited_s):
    """Compare with a time of waiting."""
    # A wait may end one reading later, and rounding of the clock may add another.
    return pytest.approx(waited_s, abs=2 * MIN_INTERVAL_S)


class GuardedFake:
    """A guarded fake machine on scripted GPUs, whose trials last for ``lasts_s``."""

    def __init__(self, *gpus, outcome=FIGURES, lasts_s=0.0, sampler=FakeGpuSampler):
        self.clock = FakeClock()
        self.started_s = self.clock.monotonic_s()

        def simulate(trial):
            self.clock.sleep(lasts_s)
            return outcome

        self.machine = FakeMachine(simulate)
        monitor = FakeGpuMonitor(gpus, clock=self.clock)
        uuids = [gpu.facts.uuid for gpu in gpus]
        self.guard = ContaminationGuard(
            self.machine, monitor, uuids, sampler(monitor, uuids), self.clock
        )

    def run(self, trial=TRIAL):
        return self.guard.run(trial)

    @property
    def waited_s(self):
        return self.clock.monotonic_s() - self.started_s


@pytest.mark.parametrize(
    "outcome",
    [
        FIGURES,
        HostOutOfMemory(detail="d"),
        TimedOut(detail="d"),
        Crashed(detail="d"),
        OutOfMemory(detail="d"),
    ],
    ids=lambda outcome: outcome.kind,
)
def test_outcomes_on_a_quiet_gpu_pass_through(outcome):
    # A loaded GPU runs at its power cap.
    guarded = GuardedFake(gpu(throttle_reasons=("sw_power_cap",)), outcome=outcome)
    assert guarded.run() is outcome
    assert guarded.machine.trials == [TRIAL]
    assert guarded.waited_s == 0


def test_neighbour_that_stays_prevents_the_trial():
    guarded = GuardedFake(gpu(used_bytes=OCCUPIED_BEFORE_TRIAL, processes=NEIGHBOUR))
    outcome = guarded.run()
    assert guarded.machine.trials == []
    assert guarded.waited_s == about(WAIT_BEFORE_S)
    assert isinstance(outcome, Contaminated)
    assert outcome.detail.startswith(
        "trial skipped: GPU 0 still holds 4 GiB after a wait of 30"
    )
    assert outcome.detail.endswith(
        "up from 512 MiB before the first trial (pid 42: 3 GiB)"
    )


@pytest.mark.parametrize(
    ("used_bytes", "occupied_readings"),
    [
        pytest.param(
            (IDLE_BYTES, *[OCCUPIED_BYTES] * 3, IDLE_BYTES), 3, id="before a trial"
        ),
        pytest.param(
            (IDLE_BYTES, IDLE_BYTES, *[OCCUPIED_BYTES] * 2, IDLE_BYTES),
            2,
            id="after a trial",
        ),
    ],
)
def test_memory_may_be_freed_late(used_bytes, occupied_readings):
    guarded = GuardedFake(gpu(used_bytes=used_bytes))
    assert guarded.run() is FIGURES
    assert guarded.waited_s == pytest.approx(occupied_readings * MIN_INTERVAL_S)


@FIGURES_OR_OUT_OF_MEMORY
def test_neighbour_that_came_during_the_trial_discards_it(outcome):
    guarded = GuardedFake(
        gpu(used_bytes=OCCUPIED_AFTER_TRIAL, processes=NEIGHBOUR), outcome=outcome
    )
    contaminated = guarded.run()
    assert guarded.machine.trials == [TRIAL]
    assert guarded.waited_s == about(WAIT_AFTER_S)
    assert isinstance(contaminated, Contaminated)
    assert contaminated.detail.startswith("GPU 0 still holds 4 GiB after a wait of 10")
    assert "pid 42: 3 GiB" in contaminated.detail


def test_trials_run_again_once_a_neighbour_has_left():
    # One when the wait begins, one after each interval, and one more for rounding.
    occupied_readings = int(WAIT_BEFORE_S / MIN_INTERVAL_S) + 2
    used_bytes = (
        # The baseline, and before and after the first trial.
        *[IDLE_BYTES] * 3,
        # Throughout the wait before the second trial.
        *[OCCUPIED_BYTES] * occupied_readings,
        IDLE_BYTES,
    )
    guarded = GuardedFake(gpu(used_bytes=used_bytes))
    assert guarded.run() is FIGURES
    assert isinstance(guarded.run(), Contaminated)
    assert guarded.machine.trials == [TRIAL]
    assert guarded.run() is FIGURES


HOT_GPU = gpu(throttle_reasons=("sw_power_cap", "hw_thermal"))


def step_trial(steps):
    """Return ``TRIAL`` with these numbers of warm-up and timed steps."""
    return replace(
        TRIAL,
        measured={
            "micro_batch_size": 8,
            "warmup_steps": steps.warmup,
            "timed_steps": steps.timed,
        },
    )


@FIGURES_OR_OUT_OF_MEMORY
@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(TRIAL, id="unknown steps"),
        pytest.param(step_trial(CURVE_STEPS["cuda"]), id="steps of a curve"),
    ],
)
def test_heat_discards_a_timed_trial(trial, outcome):
    guarded = GuardedFake(HOT_GPU, outcome=outcome, sampler=TwiceSampled)
    contaminated = guarded.run(trial)
    assert isinstance(contaminated, Contaminated)
    assert contaminated.detail.startswith("GPU 0 was slowed down: hw_thermal in ")


@FIGURES_OR_OUT_OF_MEMORY
def test_heat_does_not_matter_for_memory(outcome):
    fit_trial = step_trial(FIT_STEPS)
    assert GuardedFake(HOT_GPU, outcome=outcome).run(fit_trial) is outcome


@FIGURES_OR_OUT_OF_MEMORY
def test_other_processes_discard_an_untimed_trial(outcome):
    shared_gpu = gpu(process_counts=(2,))
    contaminated = GuardedFake(shared_gpu, outcome=outcome).run(step_trial(FIT_STEPS))
    assert isinstance(contaminated, Contaminated)


def test_trace_uses_no_gpu():
    disturbed_gpu = gpu(
        used_bytes=OCCUPIED_BEFORE_TRIAL,
        throttle_reasons=("hw_thermal",),
        process_counts=(2,),
    )
    guarded = GuardedFake(disturbed_gpu)
    trace = Trial(job="trace", measured={"sizes": [1]}, timeout_s=60.0)
    assert guarded.run(trace) is FIGURES
    assert guarded.machine.trials == [trace]
    assert guarded.waited_s == 0


@pytest.mark.parametrize(
    "used_bytes",
    [
        pytest.param((UNKNOWN,), id="never read"),
        pytest.param((UNKNOWN, OCCUPIED_BYTES), id="no baseline"),
        pytest.param((IDLE_BYTES, UNKNOWN), id="not read before the trial"),
        pytest.param((IDLE_BYTES, IDLE_BYTES, UNKNOWN), id="not read after the trial"),
    ],
)
def test_missing_readings_contaminate_nothing(used_bytes):
    blind_gpu = FakeGpu(used_bytes=used_bytes, samples=(UNKNOWN,), processes=(UNKNOWN,))
    guarded = GuardedFake(blind_gpu)
    assert guarded.run() is FIGURES
    assert guarded.waited_s == 0


@pytest.mark.parametrize(
    ("gpus", "detail"),
    [
        pytest.param(
            [gpu(), gpu(index=1, used_bytes=OCCUPIED_AFTER_TRIAL)],
            "GPU 1 still holds 4 GiB [^;]*",
            id="memory of the second GPU",
        ),
        pytest.param(
            [gpu(used_bytes=OCCUPIED_AFTER_TRIAL, throttle_reasons=("sw_thermal",))],
            "GPU 0 was slowed down: sw_thermal in .*; GPU 0 still holds 4 GiB .*",
            id="heat before memory",
        ),
        pytest.param(
            [gpu(used_bytes=OCCUPIED_BEFORE_TRIAL, processes=UNKNOWN)],
            r".*\(processes cannot be listed: NVML: Insufficient Permissions\)",
            id="processes unknown",
        ),
        pytest.param(
            # The fifth sample is the second one of the trial.
            [gpu(), gpu(index=1, process_counts=(1, 1, 1, 1, 2))],
            "another process used GPU 1: 2 processes in 1 of 2 samples",
            id="another process on the second GPU",
        ),
    ],
)
def test_describes_disturbances_of_all_used_gpus(gpus, detail):
    guarded = GuardedFake(*gpus, sampler=TwiceSampled)
    outcome = guarded.run(TRIAL_ON_TWO_GPUS if len(gpus) > 1 else TRIAL)
    assert isinstance(outcome, Contaminated)
    assert re.fullmatch(detail, outcome.detail)


def test_unused_gpu_does_not_matter():
    disturbed_gpu = gpu(
        index=1,
        used_bytes=OCCUPIED_BEFORE_TRIAL,
        throttle_reasons=("hw_thermal",),
        process_counts=(2,),
    )
    outcome = GuardedFake(gpu(), disturbed_gpu, outcome=WINDOW).run(TRIAL)
    assert isinstance(outcome, Measured)
    assert len(outcome.figures["gpus"]) == 1


def test_processes_from_before_the_trial_do_not_matter():
    # The third sample is the trial's only one.
    guarded = GuardedFake(gpu(process_counts=(2, 2, 1)))
    assert guarded.run() is FIGURES


def test_window_gets_the_activity_of_every_gpu():
    # The clock begins at 1000 s, so the sample at the end lies in the window.
    guarded = GuardedFake(gpu(), gpu(index=1), outcome=WINDOW, lasts_s=2.5)
    figures = guarded.run(TRIAL_ON_TWO_GPUS).figures
    assert figures["steps"] == 4
    assert [gpu_figures["samples"] for gpu_figures in figures["gpus"]] == [1, 1]
    assert figures["gpus"][1]["utilisation_share"] == 1.0
    assert figures["gpus"][1]["series"]["time_s"] == [1002.5]


def test_window_without_samples_has_a_reason():
    # The trial ends at 1000 s, before its window.
    outcome = GuardedFake(gpu(), outcome=WINDOW, lasts_s=0.0).run(TRIAL)
    (gpu_figures,) = outcome.figures["gpus"]
    assert gpu_figures["samples"] == 0
    assert gpu_figures["utilisation_share"] is None
    assert gpu_figures["lacking"]


def test_error_of_the_machine_is_passed_on():
    monitor = FakeGpuMonitor([gpu()])
    error = BadInput("no such file", next_step="Name another.")
    machine = Mock(run=Mock(side_effect=error))
    sampler = Mock(wraps=FakeGpuSampler(monitor, ["GPU-0"]))
    guard = ContaminationGuard(machine, monitor, ["GPU-0"], sampler, FakeClock())
    for _ in range(2):
        with pytest.raises(BadInput):
            guard.run(TRIAL)
    sampler.stop.assert_not_called()


def test_closing_ends_machine_and_sampler_only():
    monitor = FakeGpuMonitor([gpu()])
    machine = Mock(run=Mock(return_value=FIGURES))
    sampler = Mock(wraps=FakeGpuSampler(monitor, ["GPU-0"]))
    guard = ContaminationGuard(machine, monitor, ["GPU-0"], sampler, FakeClock())
    guard.run(TRIAL)
    guard.close()
    machine.close.assert_called_once()
    sampler.stop.assert_called_once()
    assert monitor.used_bytes("GPU-0") == IDLE_BYTES


def test_other_users_are_described_for_each_gpu():
    monitor = FakeGpuMonitor(
        [
            gpu(),
            gpu(index=1, used_bytes=[OCCUPIED_BYTES]),
            gpu(index=2, processes=NEIGHBOUR),
            gpu(index=3, used_bytes=[OCCUPIED_BYTES]),
        ]
    )
    assert other_users(monitor, ["GPU-0", "GPU-1", "GPU-2"]) == (
        (
            "GPU 1 is already in use: 4 GiB allocated (no visible process, perhaps"
            " another user's)"
        ),
        "GPU 2 is already in use: 512 MiB allocated (pid 42: 3 GiB)",
    )


def test_gpu_that_cannot_be_described_has_no_users():
    assert other_users(FakeGpuMonitor(), ["GPU-9"]) == ()
