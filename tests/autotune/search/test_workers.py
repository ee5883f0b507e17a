import pytest

from autotune.core.hardware import GpuSample
from autotune.core.outcome import Crashed, Measured
from autotune.errors import Undecided
from autotune.measure.clock import FakeClock
from autotune.measure.machine import FakeMachine
from autotune.search.trials import TrialRunner
from autotune.search.workers import GpuSeries, SweepRequest, ladder, sweep_workers
from autotune.store import Ledger
from trainer.config import ModelSettings, TrainConfig

CPU = GpuSeries(source="n/a (CPU run)")


def machine(needed: int) -> FakeMachine:
    """A loader process gives 100 tokens/s a piece (the main process 40), the step takes at most ``needed`` hundreds."""

    def simulate(trial):
        workers, cached = trial.measured["config"]["data"]["loader_workers"], trial.measured["cached"]
        ceiling = 100.0 * needed
        speed = ceiling if cached else min(ceiling, 100.0 * workers or 40.0)
        noise = 1 + 0.001 * ((trial.measured["repeat"] * 7 + workers * 3) % 5)
        start_s = 1000.0 + 10 * workers
        return Measured(
            figures={
                "optimizer_steps": 9, "discarded_steps": 2, "slot_tokens_per_s": speed * noise,
                "real_tokens_per_s": speed * 0.5, "data_wait_share": 1 - speed / ceiling, "step_s": [0.1] * 7,
                "window_start_s": start_s, "window_end_s": start_s + 1,
            }
        )  # fmt: skip

    return FakeMachine(simulate)


def sweep(machine, tmp_path, gpu=CPU, max_workers=8, repeats=3):
    request = SweepRequest(
        config=TrainConfig(model=ModelSettings(name="m", config={"model_type": "bert"})), data_dir="data",
        max_workers=max_workers, repeats=repeats, window_s=1.0, trial_timeout_s=10,
    )  # fmt: skip
    runner = TrialRunner(machine=machine, ledger=Ledger(tmp_path / "ledger", "w"), site="here", clock=FakeClock())
    return sweep_workers(request, runner, gpu)


@pytest.mark.parametrize(("limit", "rungs"), [(0, [0]), (1, [0, 1]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_the_ladder_doubles_up_to_its_limit(limit, rungs):
    assert ladder(limit) == rungs


@pytest.mark.parametrize("needed", [1, 2, 4])
def test_the_smallest_count_that_feeds_the_step_is_chosen(tmp_path, needed):
    found = sweep(machine(needed), tmp_path)
    assert found.chosen == needed
    assert found.undecided_between == []


def test_the_ladder_is_not_climbed_beyond_the_ceiling(tmp_path):
    assert [row.loader_workers for row in sweep(machine(2), tmp_path).rows] == [0, 1, 2]


def test_a_step_that_needs_no_loader_process_gets_none(tmp_path):
    def always_fed(trial):
        figures = machine(1)._simulate(trial).figures
        return Measured(figures=figures | {"slot_tokens_per_s": 100.0, "data_wait_share": 0.0})

    assert sweep(FakeMachine(always_fed), tmp_path).chosen == 0


def test_repeats_are_interleaved_with_the_ceiling(tmp_path):
    used = machine(1)
    sweep(used, tmp_path)
    order = [
        None if trial.measured["cached"] else trial.measured["config"]["data"]["loader_workers"]
        for trial in used.trials
    ]
    assert order == [None, 0, 1] * 3


def test_a_sweep_is_repeated_from_its_ledger_without_a_window(tmp_path):
    first = sweep(machine(2), tmp_path)
    again = machine(2)
    assert sweep(again, tmp_path) == first
    assert again.trials == []


def test_utilisation_is_the_mean_of_the_samples_inside_the_windows(tmp_path):
    def sample(time_s, utilisation):
        return GpuSample(
            time_s=time_s, utilisation=utilisation, used_bytes=None, power_w=None, sm_clock_mhz=None,
            throttle_reasons=None, temperature_c=None,
        )  # fmt: skip

    series = [sample(1000.5, 0.2), sample(1005.0, 0.9), sample(1010.2, 0.6), sample(1010.8, 0.8)]
    found = sweep(machine(1), tmp_path, gpu=GpuSeries(source="NVML", samples=lambda: series))
    assert [row.gpu_utilisation for row in found.rows] == [pytest.approx(0.2), pytest.approx(0.7)]


def test_without_a_gpu_utilisation_is_missing_and_says_why(tmp_path):
    found = sweep(machine(1), tmp_path)
    assert {row.gpu_utilisation for row in found.rows} == {None}
    assert found.gpu_utilisation_source == "n/a (CPU run)"


def test_a_window_that_failed_is_no_score(tmp_path):
    with pytest.raises(Undecided, match="boom"):
        sweep(FakeMachine(lambda trial: Crashed(detail="boom")), tmp_path)
