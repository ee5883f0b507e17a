"""A trial: its request, its key, its origin and its record in the trial log.

A ``TrialRequest`` of a job makes a ``Trial``; trials with equal keys measure the same.
A machine runs the trial to an ``Outcome`` (``outcomes``), whose figures the
``JobFigures`` of the job read (``job_figures``). A ``TrialRecord`` holds the trial and
its outcome in the trial log.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from autotune.machine.values import MeasuredGpu
from autotune.trials.job_figures import check_figures
from autotune.trials.outcomes import Measured, Outcome, outcome_from_json
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig
from trainer.formats.tables import StrictTable, parse_table

FEWEST_TIMED_STEPS = 3
"""Fewest timed steps of a ``step`` job that measures throughput; a job with fewer tests
only if a size fits."""
JobName = Literal[
    "step",
    "kernels",
    "window",
    "untuned",
    "short_training",
    "trace",
    "links",
    "gradient_sync",
    "rates",
    "model_trace",
]
"""Name of a job in requests and in the trial log."""
JOB_MODULES: Mapping[str, str] = {
    "step": "autotune.memory.jobs.step",
    "kernels": "autotune.memory.jobs.profile_step",
    "window": "autotune.workers.jobs.window",
    "untuned": "autotune.baseline.jobs.untuned",
    "trace": "autotune.subjects.mlm.jobs.trace",
    "links": "autotune.network.jobs.links",
    "gradient_sync": "autotune.subjects.mlm.jobs.gradient_sync",
    "rates": "autotune.subjects.mlm.jobs.measure_rates",
    "model_trace": "autotune.memory.jobs.model_trace",
    "short_training": "autotune.confirm.jobs.train",
}
"""Module of each job; only a trial's child process imports it, to call its ``run``.
That of ``short_training`` is for code of yours; the bundled trainer trains by its own
command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A measurement by child processes, one per rank."""

    job: JobName
    """Job that measures it."""
    measured: dict[str, Any]
    """Everything that defines the measurement, as JSON; the key is its hash."""
    timeout_s: float
    """Time limit of the trial, at which it is killed."""
    local: dict[str, Any] = field(default_factory=dict)
    """Inputs that depend on this machine, such as paths; they do not change the key."""

    @property
    def key(self) -> str:
        """SHA-256 of the job and ``measured``."""
        return canonical_sha256({"job": self.job, "measured": self.measured})

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the trainer; empty if the trial has none.

        Those from a trial log may be of another version of the project.
        """
        return config_of(self.measured)

    @property
    def loader_arguments(self) -> dict[str, Any]:
        """Arguments of the loader of a window, such as ``num_workers``; else empty."""
        return _arguments(self.measured.get("loader"))

    @property
    def step_arguments(self) -> dict[str, Any]:
        """Arguments of the step of a window; empty if it is replayed."""
        return _arguments(self.measured.get("step"))

    @property
    def ranks(self) -> int:
        """Number of ranks that the trial keeps busy; 1 if its inputs name none.

        A trial on one node has ``local_ranks``, one on several nodes has the other two.
        """
        factors = [
            self.measured.get(name)
            for name in ("local_ranks", "nodes", "ranks_per_node")
        ]
        return math.prod(
            factor for factor in factors if isinstance(factor, int) and factor > 0
        )

    @property
    def is_timed(self) -> bool:
        """True if the result depends on the speed of the device."""
        timed_steps = self.measured.get("timed_steps")
        if self.job == "step" and isinstance(timed_steps, int):
            return timed_steps >= FEWEST_TIMED_STEPS
        return True


def config_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the trainer in ``Trial.measured``, or an empty table.

    A step has them among its arguments, a window among those of its loader.
    """
    for table in (measured, _arguments(measured), _arguments(measured.get("loader"))):
        config = table.get("config")
        if isinstance(config, dict):
            return config
    return {}


def _arguments(call: object) -> dict[str, Any]:
    """Return the arguments of a ``Call`` in ``Trial.measured``; it may be missing."""
    if not isinstance(call, dict):
        return {}
    arguments = call.get("arguments")
    return arguments if isinstance(arguments, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial with its outcome, measured now or taken from the trial log."""

    trial: Trial
    outcome: Outcome
    seconds: float
    """Seconds that the trial took when it was measured."""
    label: str
    """Name of the trial for people."""
    from_trial_log: bool
    """True if the outcome was reused, False if this program measured it."""
    made_on: "MadeOn | None" = None
    """Origin of the outcome; None if it is not known."""


class MadeOn(StrictTable):
    """Origin of a trial: machine, software, model and dataset.

    All fields but the load average are those of ``Fingerprint``.
    """

    gpu_name: str | None = None
    """Name of the GPU, as its driver reports it; None on a CPU."""
    driver: str | None = None
    """Version of the GPU driver; None on a CPU."""
    gpu_count: Annotated[int, Field(ge=0)] = 0
    """Number of visible GPUs; 0 on a CPU."""
    cpu_model: str | None = None
    """Name of the processor; None if it is not known."""
    allotted_cpus: Annotated[int, Field(gt=0)]
    """CPUs that the process could use."""
    torch: str
    """Version of torch."""
    model_sha256: str
    """SHA-256 of the model's config, without its name."""
    dataset_hash: str
    """SHA-256 of the dataset's manifest."""
    load_average_1min: Annotated[float, Field(ge=0)] | None = None
    """Load average when the command began, before its own trials; None if it is not
    known."""

    @property
    def gpu(self) -> MeasuredGpu:
        """The GPU by name and driver."""
        return MeasuredGpu(name=self.gpu_name, driver=self.driver)

    @property
    def machine(self) -> str:
        """The device for people: the GPUs, or the processor."""
        if self.gpu_name:
            return f"{self.gpu_count} x {self.gpu_name}"
        return self.cpu_model or "cpu"

    @property
    def processors(self) -> str:
        """CPUs and name of the processor, for people."""
        return f"{self.allotted_cpus} of {self.cpu_model or 'n/a'}"


class TrialRecord(StrictTable):
    """A trial as the trial log keeps it."""

    time_utc: str
    """Time of the end of the trial, in ISO 8601."""
    site: str
    """Hash of the machine, software, model and dataset of the measurement."""
    key: str
    """``Trial.key``: trials of the same key measure the same."""
    job: JobName
    """``Trial.job``."""
    measured: dict[str, Any]
    """``Trial.measured``: everything that defines the measurement."""
    label: str
    """Name of the trial for people."""
    outcome: dict[str, Any]
    """``dataclasses.asdict`` of the outcome."""
    seconds: Annotated[float, Field(ge=0)]
    """Seconds that the trial took."""
    made_on: MadeOn | None = None
    """Origin of the trial; None in older trial logs, whose ``site`` distinguishes
    machines without naming them."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "TrialRecord | None":
        """Read a record of a trial log.

        Returns:
            The record, or None if it is not a trial as this version of the project
            writes it.
        """
        try:
            trial_record = parse_table(cls, record, where="trial_log")
            outcome = outcome_from_json(trial_record.outcome)
            if isinstance(outcome, Measured):
                check_figures(trial_record.job, outcome)
        # Each of these checks raises for a record of another version.
        except (BadConfig, ValueError, KeyError, TypeError):
            return None
        return trial_record

    @property
    def trial(self) -> Trial:
        """The trial that was measured; its time limit and local inputs are not kept."""
        return Trial(job=self.job, measured=self.measured, timeout_s=0.0)

    def finished(self) -> FinishedTrial:
        """Return the trial with its outcome."""
        return FinishedTrial(
            trial=self.trial,
            outcome=outcome_from_json(self.outcome),
            seconds=self.seconds,
            label=self.label,
            from_trial_log=True,
            made_on=self.made_on,
        )


class TrialRequest(StrictTable):
    """Everything that defines a measurement.

    Each job has a subclass, whose fields are the job's inputs.
    """

    job: ClassVar[JobName]
    """Job that measures it."""

    def trial(self, *, timeout_s: float, **local: Any) -> Trial:
        """Return the trial of this request.

        Args:
            timeout_s: Time limit of the trial.
            local: Inputs that depend on this machine, for ``Trial.local``.
        """
        # Fields with a default were added later. They are left out at their defaults,
        # so that trials in older trial logs keep their keys.
        unchanged = {
            name
            for name, info in type(self).model_fields.items()
            if not info.is_required() and getattr(self, name) == info.default
        }
        measured = self.model_dump(mode="json", exclude=unchanged)
        return Trial(job=self.job, measured=measured, timeout_s=timeout_s, local=local)

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Self:
        """Read the request that made a trial, from ``Trial.measured``.

        Raises:
            BadConfig: If a field is invalid, or settings contradict each other.
        """
        return parse_table(cls, measured, where="trial")
