"""A simulated machine, and probes of a model on it."""

from collections.abc import Callable
from typing import Any

from autotune.evidence.probe import ProbeEvidence
from autotune.memory.measure import probe_subject
from autotune.memory.values import Allocation
from autotune.subjects.mlm.memory.probe import MlmProbe, MlmProbeRequest
from autotune.trials.outcomes import Measured, Outcome, OutOfMemory
from autotune.trials.values import Trial
from testbed.datasets import write_dataset
from testbed.examples.feeds import runner_on
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import HOST, FakeClock, FakeMachine
from tests.autotune.memory.simulated_traces import figures_of, trace_of
from trainer.formats.manifest import read_manifest
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

FIXED_BYTES = 300_000_000
SEQUENCE_BYTES = 20_000_000
BUDGET_BYTES = 1_000_000_000
VERIFIED = (35, 36)
"""Largest size that fits, as 300 MB and 35 times 20 MB are 1 GB, and the next size."""
WITH_HEADROOM = 33
"""Largest size that leaves 3 % of the 35 sequences free."""
SEQ_LENGTH_TOKENS = 64
ON_GPU = {"device": "cuda", "precision": "bf16"}
"""Settings of a step on a GPU."""


def size_of(trial: Trial) -> int:
    """Return the micro-batch size of a trial."""
    return trial.config["micro_batch_size"]


def is_throughput_trial(trial: Trial) -> bool:
    """Return whether a trial measures throughput, not only whether a size fits."""
    return trial.job == "step" and trial.is_timed


def count_trials(machine: FakeMachine, size: int) -> int:
    """Return the number of trials of a micro-batch size."""
    return [size_of(trial) for trial in machine.trials].count(size)


def trace_figures(trial: Trial, sequence_bytes: int = SEQUENCE_BYTES) -> dict[str, Any]:
    """Return the figures of a trace of the simulated model.

    Like every trace, it does not include the memory of libraries.
    """
    return figures_of(
        trace_of(
            size,
            allocations=[
                Allocation(size_bytes=FIXED_BYTES, term="parameters"),
                Allocation(
                    size_bytes=sequence_bytes * size, term="activations: Linear"
                ),
            ],
            events=[0, 1, -2],
        )
        for size in trial.measured["sizes"]
    )


def simulate(trial: Trial) -> Outcome:
    """Simulate a machine on which a model takes 300 MB and each sequence 20 MB.

    A step takes 10 ms for each sequence and 20 ms besides, so that the throughput grows
    with the micro-batch size.
    """
    if trial.job == "trace":
        return Measured(figures=trace_figures(trial))
    size = size_of(trial)
    budget_bytes = trial.measured["memory_budget_bytes"]
    peak_bytes = FIXED_BYTES + SEQUENCE_BYTES * size
    if budget_bytes is not None and peak_bytes > budget_bytes:
        return OutOfMemory(detail="no memory")
    step_s = (size + 2) / 100
    return Measured(
        figures=STEP_FIGURES
        | {
            "step_s": [step_s] * trial.measured["timed_steps"],
            "units_per_step": size * trial.measured["units_per_size"],
            "peak_bytes": peak_bytes,
        }
    )


def machine_with(outcome: Outcome, has_outcome: Callable[[Trial], bool]) -> FakeMachine:
    """Return the simulated machine, on which selected trials have another outcome."""
    return FakeMachine(lambda trial: outcome if has_outcome(trial) else simulate(trial))


class Prober:
    """Probes a model on simulated machines."""

    def __init__(self, directory) -> None:
        self._directory = directory
        self._manifest = read_manifest(write_dataset(directory / "data", [[5, 6]]))
        self._clock = FakeClock()
        self.chosen_size: int | None = None
        """Micro-batch size that the last probe chose."""

    def __call__(
        self,
        machine: FakeMachine,
        *,
        settings=None,
        memory_budget_bytes=BUDGET_BYTES,
        local_ranks=1,
        overheads=None,
        accumulate=False,
        max_micro_batch_size=1000,
        trial_timeout_s=10,
        site="here",
        made_on=None,
        study_file=None,
    ) -> ProbeEvidence:
        """Probe the model, and return the evidence.

        Args:
            machine: Simulated machine.
            settings: Changes of the step's settings.
            memory_budget_bytes: Memory that a step may use.
            local_ranks: Number of ranks.
            overheads: Overheads that a trace adds; None to probe without a trace.
            accumulate: True for steps of several micro-batches.
            max_micro_batch_size: Largest size to try.
            trial_timeout_s: Time limit of a trial.
            site: Name of the site. Probes of one site share their trials.
            made_on: Machine that the trial log records.
            study_file: File of the Optuna study; None keeps it in memory.
        """
        config = TrainConfig(
            model=model_settings("bert-mini"),
            seq_length_tokens=SEQ_LENGTH_TOKENS,
            layout="packed",
        ).model_copy(update=settings or {})
        request = MlmProbeRequest(
            config=config,
            data=self._directory,
            reports=self._directory,
            accumulate=accumulate,
            max_size=max_micro_batch_size,
            trial_timeout_s=trial_timeout_s,
            study_file=study_file,
        )
        probe = MlmProbe(
            request=request,
            config=config,
            manifest=self._manifest,
            memory_budget_bytes=memory_budget_bytes,
            local_ranks=local_ranks,
            overheads=overheads,
        )
        trial_log = self._directory / "trials"
        runner = runner_on(machine, trial_log, self._clock, site=site, made_on=made_on)
        self.chosen_size, evidence = probe_subject(
            probe.size_probe(), runner, HOST.ram_available_bytes
        )
        return evidence


def verified_sizes(evidence: ProbeEvidence) -> tuple[int, int | None]:
    """Return the largest size that fits, and the smallest one out of memory."""
    return evidence.feasible_max, evidence.infeasible_min


def sizes_of_curve(evidence: ProbeEvidence) -> list[int]:
    """Return the micro-batch sizes of the throughput curve."""
    return [point.size for point in evidence.curve]
