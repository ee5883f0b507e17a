"""The trainer under torchrun on pretended GPUs, with values.

It ends as on CPUs, whatever interrupts it.
"""

import json

import pytest

from testbed.nullgpu.machine import Faults
from tests.system.faults.interruptions import (
    damage,
    hang,
    kill_rank,
    signal_rank,
    signal_torchrun,
)
from tests.system.faults.jobs import NO_DROPOUT, STEPS, Workplace
from tests.system.faults.train import (
    MOVED,
    Stage,
    interrupt,
    leave_out,
    move,
    roll_back,
)
from trainer.formats.run_record import read_run

pytestmark = pytest.mark.cuda
SETTINGS = NO_DROPOUT | {"train.precision": "fp32"}
ON_GPUS = SETTINGS | {
    "train.device": "cuda",
    "train.compile": False,
    "train.log_interval_steps": 1,
}


@pytest.fixture(scope="module")
def place(null_gpus, tmp_path_factory) -> Workplace:
    return workplace(
        null_gpus(devices=2, values=True), tmp_path_factory.mktemp("trainings"), ON_GPUS
    )


def workplace(machine, folder, settings) -> Workplace:
    variables = machine.variables_of_commands()
    return Workplace(
        folder,
        python=machine.environment.python,
        variables=variables,
        settings=settings,
    )


@pytest.mark.soak
def test_training_on_gpus_matches_cpus(place, null_gpu, tmp_path):
    on_gpus = place.undisturbed(2, MOVED).record()
    on_cpus = workplace(null_gpu(), tmp_path, SETTINGS).undisturbed(2, MOVED).record()
    assert on_gpus.header.device == "NVIDIA H100 NVL"
    assert [row.loss for row in on_gpus.steps] == pytest.approx(
        [row.loss for row in on_cpus.steps], rel=1e-4
    )
    assert [row.grad_norm for row in on_gpus.steps] == pytest.approx(
        [row.grad_norm for row in on_cpus.steps], rel=1e-3
    )
    assert len(on_gpus.evaluations) == len(on_cpus.evaluations) == 1 + STEPS // 10
    assert [row.loss for row in on_gpus.evaluations] == pytest.approx(
        [row.loss for row in on_cpus.evaluations], rel=1e-4
    )


def test_run_resumes_under_every_strategy(place):
    """Checkpoints are saved asynchronously, every two steps."""
    stages = (
        Stage(strategy="zero1"),
        Stage(strategy="fsdp2", killed=True),
        Stage(strategy="ddp"),
    )
    move(place, stages, seed=9)


@pytest.mark.soak
def test_all_ranks_skip_steps_with_nan(place):
    leave_out(place, points=1, seed=4, told_late_steps=9)


FEW_STEPS = 12
MANY_STEPS = 32
MOST_WAITS = {"cudaEventSynchronize": 22, "pageable copy to the device": 24}
"""Waits of a rank in 20 steps that are logged twice, as measured in 2026-11; they may
not rise."""


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.soak, id="fp32"),
        pytest.param(
            1,
            {"train.precision": "bf16", "train.attention": "varlen"},
            id="bf16 varlen",
        ),
        pytest.param(2, {}, id="ddp"),
    ],
)
def test_steady_step_hardly_waits_for_the_gpu(
    null_gpu, place, tmp_path, ranks, changes
):
    profile = tmp_path / "two-layers.toml"
    text = place.profile.read_text()
    assert "num_hidden_layers = 4" in text
    profile.write_text(text.replace("num_hidden_layers = 4", "num_hidden_layers = 2"))

    def count(steps):
        settings = (
            ON_GPUS
            | changes
            | {
                "train.max_steps": steps,
                "train.checkpoint.enabled": False,
                "train.log_interval_steps": 10,
                "train.global_batch_size": 4,
            }
        )
        options = [
            f"--set={key}={json.dumps(value)}" for key, value in settings.items()
        ]
        paths = ("--data", place.data, "--out", tmp_path / f"{steps}")
        machine = null_gpu(devices=ranks, values=True)
        ended = machine.torchrun("-m", "trainer", profile, *paths, *options)
        assert ended.code == 0, ended
        return ended.counts

    # Only the steps between, as the start waits often.
    before = count(FEW_STEPS)
    waits = count(MANY_STEPS).since(before).of("wait")
    assert waits.keys() <= MOST_WAITS.keys(), waits
    for name, most in MOST_WAITS.items():
        assert waits.get(name, 0) <= ranks * most, waits


ROWS = 3
STEPS_PER_ROW = 4
ROW_S = 1.5
"""Time of a row's steps at least, in which the GPUs are read several times."""
SLOW_ROWS = {
    "train.max_steps": ROWS * STEPS_PER_ROW,
    "train.log_interval_steps": STEPS_PER_ROW,
    "train.checkpoint.enabled": False,
}


def test_rows_have_the_activity_of_all_gpus(place):
    """One rank reads both GPUs, which have no hardware counters."""
    job = place.job(2, SLOW_ROWS)
    job.end(job.start(pace_s=ROW_S / STEPS_PER_ROW))
    record = job.record()
    assert record.header.gpu_activity_missing == [
        "sm_active_share, tensor_active_share, dram_active_share: this GPU has no"
        " performance monitoring (GPM needs Hopper or later)"
    ]
    assert record.header.driver == "0.0 (nullgpu)"
    assert len(record.steps) == ROWS
    for row in record.steps:
        assert (row.gpu_busy_share, row.memory_busy_share) == (1.0, 0.5)
        assert (row.lowest_gpu_busy_share, row.lowest_gpu_busy_rank) == (1.0, 0)
        assert row.gpu_power_w == pytest.approx(250, rel=0.05)
        assert row.sm_clock_mhz == 1785
        assert (row.sm_active_share, row.dram_active_share) == (None, None)
    assert "gpu_unread" not in {event.kind for event in record.events}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param("4", "NVML: Insufficient Permissions", id="no permission"),
        pytest.param(
            "hang", "NVML does not respond", marks=pytest.mark.soak, id="hung"
        ),
    ],
)
def test_broken_nvml_does_not_stop_training(null_gpu, place, tmp_path, fault, reason):
    machine = null_gpu(
        values=True, faults=Faults(faults=f"nvmlDeviceGetUtilizationRates={fault}")
    )
    settings = ON_GPUS | SLOW_ROWS
    options = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    paths = ("--data", place.data, "--out", tmp_path / "run")
    ended = machine.torchrun("-m", "trainer", place.profile, *paths, *options)
    assert ended.code == 0, ended
    record = read_run(tmp_path / "run")
    assert record.header.gpu_activity_missing[0].startswith(
        "gpu_busy_share, memory_busy_share"
    )
    assert reason in record.header.gpu_activity_missing[0]
    assert {row.gpu_busy_share for row in record.steps} == {None}


@pytest.mark.soak
@pytest.mark.parametrize(
    "interruption", [signal_rank, kill_rank, signal_torchrun, hang, damage]
)
def test_interrupted_run_ends_bit_identical(place, interruption):
    interrupt(place, points=2, seed=1, interruptions=[interruption])


@pytest.mark.soak
def test_spike_is_rolled_back(place):
    roll_back(place, points=1, seed=7)
