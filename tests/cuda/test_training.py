"""The trainer under torchrun on pretended GPUs, with values: it comes to what it comes
to on CPUs, whatever happens."""

import json

import pytest

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
    for found, expected in zip(on_gpus.evaluations, on_cpus.evaluations, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)


def test_run_resumes_under_every_strategy(place):
    """Asynchronous saves every two steps; the losses are those of an undisturbed
    run."""
    move(
        place,
        (Stage(strategy="zero1"), Stage(strategy="fsdp2", killed=True), Stage()),
        9,
    )


@pytest.mark.soak
def test_all_ranks_skip_steps_with_nan(place):
    leave_out(place, 1, 4, told_late_steps=9)


FEW, MANY = 12, 32
WAITS = {"cudaEventSynchronize": 22, "pageable copy to the device": 24}
"""Of a rank in 20 steps that are logged twice, as measured in 2026-11; they may not
rise."""


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
    counts = {}
    for steps in (FEW, MANY):
        settings = ON_GPUS | changes
        settings |= {
            "train.max_steps": steps,
            "train.checkpoint.enabled": False,
            "train.log_interval_steps": 10,
        }
        settings |= {
            "train.global_batch_size": 4,
            "train.model.config.num_hidden_layers": 2,
        }
        sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        words = (
            place.profile,
            "--data",
            place.data,
            "--out",
            tmp_path / f"{steps}",
            *sets,
        )
        ended = null_gpu(devices=ranks, values=True).torchrun("-m", "trainer", *words)
        assert ended.code == 0, ended
        counts[steps] = ended.counts
    waits = counts[MANY].since(counts[FEW]).of("wait")
    assert waits.keys() <= WAITS.keys(), waits
    for name, most in WAITS.items():
        assert waits.get(name, 0) <= ranks * most, waits


@pytest.mark.soak
@pytest.mark.parametrize(
    "interruption", [signal_rank, kill_rank, signal_torchrun, hang, damage]
)
def test_interrupted_run_ends_bit_identical(place, interruption):
    interrupt(place, 2, 1, [interruption])


@pytest.mark.soak
def test_spike_is_rolled_back(place):
    roll_back(place, 1, 7)
