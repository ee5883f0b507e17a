"""Feed trials that are computed, and sweeps over them, for tests of the search."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.machine.measured_device import MeasuredDevice
from autotune.machine.values import SlurmFacts
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import TrialLog
from autotune.trials.values import Measured, Outcome, Trial
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.measure import Sweep, TrainingWindows
from autotune.workers.values import SweepRequest
from testbed.examples.trials import FEED
from testbed.fakes import FakeClock, FakeHost, FakeMachine
from trainer.config.train_config import DataSettings, ModelSettings, TrainConfig

CONFIG = TrainConfig(model=ModelSettings(name="m", config={"model_type": "bert"}))
CEILING = 1000.0
Rate = Callable[[DataSettings], float]


def knee_at(needed: int) -> Rate:
    """Every worker gives its part of the ceiling, and the main process less than
    one."""
    return lambda data: min(1.0, max(data.num_workers, 0.4) / max(needed, 0.4))


def loader_of(trial: Trial) -> dict:
    return trial.measured["config"]["data"]


def figures_of(trial: Trial, rate: Rate, **changes) -> dict:
    """What a window reads, by the share of the ceiling that its loader settings reach;
    repeatable noise of 0.2 %."""
    data = DataSettings.model_validate(loader_of(trial))
    share = 1.0 if trial.measured["cached"] else rate(data)
    number = trial.measured["round"]
    noise = 1 + 0.0005 * (
        (7 * number + 3 * data.num_workers + 5 * trial.measured["cached"]) % 5 - 2
    )
    start_s = 1000.0 + 10 * number
    figures = FEED | {
        "padded_tokens_per_s": CEILING * share * noise,
        "tokens_per_s": CEILING * share / 2,
        "data_wait_share": 1 - share,
        "window_start_s": start_s,
        "window_end_s": start_s + 1,
        "local_ranks": trial.measured["local_ranks"],
        "memory_bytes": 2**30,
        "worker_bytes": 2**27,
        "storage_bytes_per_s": 1e6,
    }
    return figures | changes | ({} if data.num_workers else {"worker_bytes": None})


def runner_on(
    machine: FakeMachine, trial_log: Path, clock: FakeClock, **changes: Any
) -> TrialRunner:
    usual = {
        "machine": machine,
        "trial_log": TrialLog(trial_log, "w"),
        "clock": clock,
        "site": "here",
    }
    return TrialRunner(**usual | changes)


NO_JOB = SlurmFacts(
    job_id=None,
    end_time_s=None,
    nodes=None,
    tasks=None,
    gpus_per_node=None,
    commands=(),
)
ON_CPU = MeasuredDevice(
    device="cpu",
    gpus=(),
    host=FakeHost().facts([Path()]),
    slurm=NO_JOB,
    versions={"torch": "2.13.0", "transformers": "5.0"},
    gpu_absent="no driver",
)


class FeedMachine(FakeMachine):
    """A machine whose windows take a second each and read what a rate says, unless
    another outcome is given."""

    def __init__(
        self,
        rate: Rate,
        instead: Callable[[Trial], Outcome | None] = lambda trial: None,
        **changes,
    ) -> None:
        self.clock = FakeClock()

        def simulate(trial: Trial) -> Outcome:
            self.clock.sleep(1.0)
            return instead(trial) or Measured(
                figures=figures_of(trial, rate, **changes)
            )

        super().__init__(simulate)

    @property
    def counts(self) -> list[int | None]:
        """What was tried, in order; None for batches from memory."""
        return [
            None if one.measured["cached"] else loader_of(one)["num_workers"]
            for one in self.trials
        ]


LIMITS = LoaderLimits(
    host=FakeHost().facts([]), local_ranks=1, batch_bytes=2**20, prefetch_factor=2
)


def windows_of(
    config: TrainConfig = CONFIG,
    *,
    limits: LoaderLimits = LIMITS,
    budget_s: float = 600.0,
    storage="",
    **changes,
) -> TrainingWindows:
    usual = {
        "data": Path("data"),
        "reports": Path("r"),
        "minutes": budget_s / 60,
        "window_s": 1.0,
    }
    request = SweepRequest(**usual | {"trial_timeout_s": 10.0} | changes)
    return TrainingWindows(
        request=request, config=config, limits=limits, storage=storage
    )


def sweep_on(machine: FakeMachine, directory: Path, **changes) -> Sweep:
    """A sweep that has not begun; changes are of ``windows_of``."""
    clock = machine.clock if isinstance(machine, FeedMachine) else FakeClock()
    training, runner = (
        windows_of(**changes),
        runner_on(machine, directory / "trials", clock),
    )
    return Sweep(training=training, runner=runner, budget_s=training.request.budget_s)
