"""Computed windows of training, and sweeps over them, for tests of the search."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.cluster.slurm_facts import SlurmFacts
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import MeasuredDevice
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import windows_of_trainer
from autotune.trials.outcomes import Crashed, Measured, Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_log import TrialLog
from autotune.trials.values import Trial
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.measure import WorkerSweep
from autotune.workers.windows import SubjectWindows
from autotune.workers.workers_evidence import workers_evidence
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock, FakeHost, FakeMachine
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig

CONFIG = TrainConfig(model=ModelSettings(name="m", config={"model_type": "bert"}))
CACHED_TOKENS_PER_S = 1000.0
"""Tokens/s on cached batches, the upper bound."""
DEAD_WORKER = Crashed(
    detail="RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error"
)
"""Outcome of a window whose workers found no shared memory."""
Rate = Callable[[DataSettings], float]
"""Function from loader settings to their share of the throughput on cached batches."""


def knee_at(needed: int) -> Rate:
    """Return a rate that grows with each worker until ``needed`` suffice.

    The main process alone loads less than one worker.
    """
    return lambda data: min(1.0, max(data.num_workers, 0.4) / max(needed, 0.4))


def loader_settings(trial: Trial) -> dict:
    """Return the loader settings of a window's trial."""
    names = ("num_workers", "prefetch_factor", "pin_memory")
    return {name: trial.loader_arguments[name] for name in names}


def figures_of(trial: Trial, rate: Rate, **changes) -> dict:
    """Return the figures of a window, with repeatable noise of 0.2 %."""
    data = DataSettings.model_validate(loader_settings(trial))
    cached = trial.measured["cached"]
    round_number = trial.measured["round"]
    share = 1.0 if cached else rate(data)
    noise = 1 + 0.0005 * (
        (7 * round_number + 3 * data.num_workers + 5 * cached) % 5 - 2
    )
    start_s = 1000.0 + 10 * round_number
    figures = WINDOW_FIGURES | {
        "padded_units_per_s": CACHED_TOKENS_PER_S * share * noise,
        "units_per_s": CACHED_TOKENS_PER_S * share / 2,
        "counts_padding": True,
        "data_wait_share": 1 - share,
        "window_start_s": start_s,
        "window_end_s": start_s + 1,
        "local_ranks": trial.measured["local_ranks"],
        "memory_bytes": 2**30,
        "worker_bytes": 2**27,
        "storage_bytes_per_s": 1e6,
    }
    figures |= changes
    if not data.num_workers:
        figures["worker_bytes"] = None
    return figures


def runner_on(
    machine: FakeMachine, trial_log: Path, clock: FakeClock, **changes: Any
) -> TrialRunner:
    """Return a runner on a machine; ``changes`` are other fields of it."""
    defaults = {
        "machine": machine,
        "trial_log": TrialLog(trial_log, "w"),
        "clock": clock,
        "site": "here",
    }
    return TrialRunner(**defaults | changes)


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
    """Machine whose windows take a second each and have the figures of a rate.

    Args:
        rate: Share of the throughput on cached batches, by loader settings.
        instead: Function that returns another outcome of a trial, or None.
        changes: Other figures of every window.
    """

    def __init__(
        self,
        rate: Rate,
        instead: Callable[[Trial], Outcome | None] = lambda trial: None,
        **changes,
    ) -> None:
        self.clock = FakeClock()

        def simulate(trial: Trial) -> Outcome:
            self.clock.sleep(1.0)
            outcome = instead(trial)
            if outcome is not None:
                return outcome
            return Measured(figures=figures_of(trial, rate, **changes))

        super().__init__(simulate)

    @property
    def counts(self) -> list[int | None]:
        """Workers of each trial, in order; None for cached batches."""
        return [
            None if trial.measured["cached"] else loader_settings(trial)["num_workers"]
            for trial in self.trials
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
) -> SubjectWindows[MlmSubject]:
    """Return a request for windows; ``changes`` are of ``SweepRequest``."""
    defaults = {
        "data": Path("data"),
        "reports": Path("r"),
        "budget_s": budget_s,
        "window_s": 1.0,
        "trial_timeout_s": 10.0,
    }
    request = SweepRequest(**defaults | changes)
    subject = MlmSubject(
        config=config,
        vocab_size=100,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        local_ranks=limits.local_ranks,
    )
    return windows_of_trainer(subject, request, limits, storage)


def sweep_on(machine: FakeMachine, directory: Path, **changes) -> WorkerSweep:
    """Return a sweep that has not begun; ``changes`` are of ``windows_of``."""
    clock = machine.clock if isinstance(machine, FeedMachine) else FakeClock()
    runner = runner_on(machine, directory / "trials", clock)
    return WorkerSweep(windows=windows_of(**changes), runner=runner)


def evidence_of(sweep: WorkerSweep, site: MeasuredDevice = ON_CPU) -> WorkersEvidence:
    """Run a sweep, and return its evidence."""
    return workers_evidence(sweep, sweep.run(), site)
