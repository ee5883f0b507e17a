import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from autotune.errors import BadInput
from autotune.machine.values import GpuProcess, Unavailable
from autotune.memory.measure import CURVE_STEPS, FIT_STEPS
from autotune.trials.contamination_guard import (
    WAIT_AFTER_S,
    WAIT_BEFORE_S,
    ContaminationGuard,
    other_users,
)
from autotune.trials.values import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    OutOfMemory,
    TimedOut,
    Trial,
)
from testbed.fakes import (
    CARD,
    SAMPLE,
    FakeClock,
    FakeGpu,
    FakeGpuMonitor,
    FakeGpuSampler,
    FakeMachine,
)

GIB = 2**30
IDLE = GIB // 2
TAKEN = 4 * GIB
UNKNOWN = Unavailable(reason="NVML: Insufficient Permissions")
NEIGHBOUR = (GpuProcess(pid=42, used_bytes=3 * GIB),)
TRIAL = Trial(job="step", measured={"rows": 8}, timeout_s=60.0)
ON_TWO = Trial(job="step", measured={"rows": 8, "local_ranks": 2}, timeout_s=60.0)
RAN = Measured(figures={"peak_bytes": GIB})
REFUSED = OutOfMemory(detail="CUDA out of memory")
WINDOW = Measured(
    figures={"window_start_s": 1001.0, "window_end_s": 1003.0, "steps": 4}
)


def gpu(*used, index=0, reasons=None, processes=(), counts=(1,)):
    samples = [
        replace(SAMPLE, utilisation=1.0, throttle_reasons=reasons, process_count=count)
        for count in counts
    ]
    facts = replace(CARD, uuid=f"GPU-{index}", index=index)
    return FakeGpu(
        facts=facts, used_bytes=used or (IDLE,), samples=samples, processes=(processes,)
    )


class TwiceSampled(FakeGpuSampler):
    """Reads one time more in a trial, as a single hot sample is tolerated."""

    def take(self):
        self.tick()
        return super().take()


class Watchdog:
    """A watched fake machine, and all that surrounds it. The first reading of each GPU
    is its baseline."""

    def __init__(self, *gpus, outcome=RAN, lasts_s=0.0, sampler=FakeGpuSampler):
        self.clock = FakeClock()
        self.started_s = self.clock.monotonic_s()

        def simulate(trial):
            self.clock.sleep(lasts_s)
            return outcome

        self.fake = FakeMachine(simulate)
        monitor, uuids = (
            FakeGpuMonitor(gpus, clock=self.clock),
            [gpu.facts.uuid for gpu in gpus],
        )
        self.machine = ContaminationGuard(
            self.fake, monitor, uuids, sampler(monitor, uuids), self.clock
        )

    @property
    def waited_s(self):
        return self.clock.monotonic_s() - self.started_s


@pytest.mark.parametrize(
    "kind", [Measured, HostOutOfMemory, TimedOut, Crashed, OutOfMemory]
)
def test_outcomes_on_a_quiet_gpu_pass_through(kind):
    outcome = RAN if kind is Measured else kind(detail="d")
    # Which is how a loaded card works.
    watch = Watchdog(gpu(reasons=("sw_power_cap",)), outcome=outcome)
    assert watch.machine.run(TRIAL) is outcome
    assert watch.fake.trials == [TRIAL]
    assert watch.waited_s == 0


def test_neighbour_that_was_there_before_and_stays_keeps_the_trial_from_running():
    watch = Watchdog(gpu(IDLE, TAKEN, processes=NEIGHBOUR))
    outcome = watch.machine.run(TRIAL)
    assert watch.fake.trials == []
    assert watch.waited_s == pytest.approx(WAIT_BEFORE_S, abs=0.2)
    assert isinstance(outcome, Contaminated)
    assert outcome.detail.startswith(
        "trial skipped: GPU 0 still holds 4 GiB after a wait of 30"
    )
    assert outcome.detail.endswith(
        "up from 512 MiB before the first trial (pid 42: 3 GiB)"
    )


@pytest.mark.parametrize(
    ("used", "waited_s"),
    [((TAKEN, TAKEN, TAKEN, IDLE), 0.3), ((IDLE, TAKEN, TAKEN, IDLE), 0.2)],
)
def test_memory_may_come_back_late_before_and_after_a_trial(used, waited_s):
    watch = Watchdog(gpu(IDLE, *used))
    assert watch.machine.run(TRIAL) is RAN
    assert watch.waited_s == pytest.approx(waited_s)


@pytest.mark.parametrize("outcome", [RAN, REFUSED], ids=["figures", "a refusal"])
def test_neighbour_that_came_during_the_trial_makes_it_void(outcome):
    watch = Watchdog(gpu(IDLE, IDLE, TAKEN, processes=NEIGHBOUR), outcome=outcome)
    found = watch.machine.run(TRIAL)
    assert watch.fake.trials == [TRIAL]
    assert watch.waited_s == pytest.approx(WAIT_AFTER_S, abs=0.2)
    assert isinstance(found, Contaminated)
    assert found.detail.startswith("GPU 0 still holds 4 GiB after a wait of 10")
    assert "pid 42: 3 GiB" in found.detail


def test_a_neighbour_after_a_trial_spoils_only_those_until_it_has_left():
    watch = Watchdog(
        gpu(IDLE, IDLE, IDLE, *[TAKEN] * (int(WAIT_BEFORE_S / 0.1) + 2), IDLE)
    )
    assert watch.machine.run(TRIAL) is RAN
    assert isinstance(watch.machine.run(TRIAL), Contaminated)
    assert watch.fake.trials == [TRIAL]
    assert watch.machine.run(TRIAL) is RAN


@pytest.mark.parametrize("outcome", [RAN, REFUSED], ids=["figures", "a refusal"])
def test_heat_voids_a_timed_trial_and_says_nothing_about_memory(outcome):
    hot = gpu(reasons=("sw_power_cap", "hw_thermal"))
    both = (FIT_STEPS, CURVE_STEPS["cuda"])
    fits, timed = (
        replace(
            TRIAL,
            measured={
                "rows": 8,
                "warmup_steps": steps.warmup,
                "timed_steps": steps.timed,
            },
        )
        for steps in both
    )
    assert Watchdog(hot, outcome=outcome).machine.run(fits) is outcome
    assert isinstance(
        Watchdog(gpu(counts=(2, 2, 2)), outcome=outcome).machine.run(fits), Contaminated
    )
    for trial in (TRIAL, timed):
        found = Watchdog(hot, outcome=outcome, sampler=TwiceSampled).machine.run(trial)
        assert isinstance(found, Contaminated)
        assert found.detail.startswith("GPU 0 was slowed down: hw_thermal in ")


def test_a_trace_uses_no_gpu_and_is_void_for_nothing_that_happens_on_one():
    watch = Watchdog(gpu(IDLE, TAKEN, reasons=("hw_thermal",), counts=(2, 2, 2)))
    trace = Trial(job="trace", measured={"sizes": [1]}, timeout_s=60.0)
    assert watch.machine.run(trace) is RAN
    assert watch.fake.trials == [trace]
    assert watch.waited_s == 0


@pytest.mark.parametrize(
    "readings",
    [
        (UNKNOWN,),
        (UNKNOWN, TAKEN),
        (IDLE, UNKNOWN),
        (IDLE, IDLE, UNKNOWN),
    ],
    ids=["never read", "no baseline", "not before", "not after"],
)
def test_readings_that_are_missing_contaminate_nothing(readings):
    watch = Watchdog(
        FakeGpu(used_bytes=readings, samples=(UNKNOWN,), processes=(UNKNOWN,))
    )
    assert watch.machine.run(TRIAL) is RAN
    assert watch.waited_s == 0


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([gpu(), gpu(IDLE, IDLE, TAKEN, index=1)], "GPU 1 still holds 4 GiB [^;]*"),
        (
            [gpu(IDLE, IDLE, TAKEN, reasons=("sw_thermal",))],
            "GPU 0 was slowed down: sw_thermal in .*; GPU 0 still holds 4 GiB .*",
        ),
        (
            [gpu(IDLE, TAKEN, processes=UNKNOWN)],
            r".*\(processes cannot be listed: NVML: Insufficient Permissions\)",
        ),
        (
            [gpu(), gpu(index=1, counts=(1, 1, 1, 1, 2))],
            "another process used GPU 1: 2 processes in 1 of 2 samples",
        ),
    ],
)
def test_what_happened_on_any_gpu_in_use_is_said_and_no_more(gpus, said):
    found = Watchdog(*gpus, sampler=TwiceSampled).machine.run(
        ON_TWO if len(gpus) > 1 else TRIAL
    )
    assert isinstance(found, Contaminated)
    assert re.fullmatch(said, found.detail)


def test_what_happens_on_a_gpu_that_no_rank_uses_does_not_matter():
    busy = gpu(IDLE, TAKEN, index=1, reasons=("hw_thermal",), counts=(2, 2, 2))
    found = Watchdog(gpu(), busy, outcome=WINDOW).machine.run(TRIAL)
    assert isinstance(found, Measured)
    assert len(found.figures["gpus"]) == 1
    # Company from before the trial.
    assert Watchdog(gpu(counts=(2, 2, 1))).machine.run(TRIAL) is RAN


def test_figures_of_a_window_get_what_every_gpu_did_in_it():
    figures = (
        Watchdog(gpu(), gpu(index=1), outcome=WINDOW, lasts_s=2.5)
        .machine.run(ON_TWO)
        .figures
    )
    assert figures["steps"] == 4
    assert [one["samples"] for one in figures["gpus"]] == [1, 1]
    assert figures["gpus"][1]["utilisation_share"] == 1.0
    assert figures["gpus"][1]["series"]["time_s"] == [1002.5]
    (figures,) = Watchdog(gpu(), outcome=WINDOW).machine.run(TRIAL).figures["gpus"]
    assert (figures["samples"], figures["utilisation_share"]) == (0, None)
    assert figures["lacking"]


def test_a_machine_that_raises_leaves_the_sampler_running_and_closing_ends_both_and_not_the_monitor():
    monitor = FakeGpuMonitor([gpu()])
    machine = Mock(
        run=Mock(side_effect=BadInput("no such file", next_step="Name another."))
    )
    sampler = Mock(wraps=FakeGpuSampler(monitor, ["GPU-0"]))
    watched = ContaminationGuard(machine, monitor, ["GPU-0"], sampler, FakeClock())
    for _ in range(2):
        with pytest.raises(BadInput):
            watched.run(TRIAL)
    watched.close()
    machine.close.assert_called_once()
    sampler.stop.assert_called_once()
    assert monitor.used_bytes("GPU-0") == IDLE


def test_other_users_are_told_for_each_gpu_that_is_to_be_used():
    monitor = FakeGpuMonitor(
        [
            gpu(),
            gpu(TAKEN, index=1),
            gpu(index=2, processes=NEIGHBOUR),
            gpu(TAKEN, index=3),
        ]
    )
    assert other_users(monitor, ["GPU-0", "GPU-1", "GPU-2"]) == (
        (
            "GPU 1 is already in use: 4 GiB allocated (no visible process, perhaps"
            " another user's)"
        ),
        "GPU 2 is already in use: 512 MiB allocated (pid 42: 3 GiB)",
    )
    assert other_users(FakeGpuMonitor(), ["GPU-9"]) == ()  # it cannot be described
