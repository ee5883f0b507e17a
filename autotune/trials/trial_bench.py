"""A machine at a known site, and the runners of trials that it gives to phases.

A runner writes to a trial log, shows its trials as progress, and reuses those of the
same site (``site_hash``).
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from autotune.base.clock import SystemClock
from autotune.base.files import check_writable
from autotune.base.log import LOG
from autotune.evidence.profile import Fingerprint
from autotune.machine.measured_device import MeasuredDevice
from autotune.trials import trial_log
from autotune.trials.decide.own_records import own_records
from autotune.trials.outcomes import Outcome, describe
from autotune.trials.runner import TrialRunner
from autotune.trials.site_hash import site_hash
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_machine import Machine, StartedMachine
from autotune.trials.values import FinishedTrial, MadeOn
from trainer.formats.progress import Update, progress
from trainer.formats.slurm_time import slurm_left_s


class Display:
    """How a phase shows its progress: by default in one line."""

    def show(
        self, title: str, *, budget_s: float | None = None
    ) -> AbstractContextManager[Update]:
        """Show the progress of a phase; ``budget_s`` is its time budget, if any."""
        return progress(title, budget_s=budget_s, never_rises=True)

    def trial_finished(self, finished: FinishedTrial) -> None:
        """Receive each finished trial; the default does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A machine that is ready to run trials at a known site."""

    site: MeasuredDevice
    """The measured device, its host and its software."""
    server: StartedMachine
    """Machine whose processes run the trials."""
    machine: Machine
    """Machine to which runners give their trials: ``server`` itself, or a
    ``ContaminationGuard`` that watches its GPUs."""
    display: Display = field(default_factory=Display)
    """Shows the progress of phases."""
    load_average_1min: float | None = None
    """Load average of the host before this program's trials; None if it is not
    known."""

    def used_before_bytes(self, ranks: int) -> list[int] | None:
        """Return the memory in use on GPUs before this program used them.

        Args:
            ranks: Number of ranks, which take the first GPUs, one each.

        Returns:
            The bytes on each of these GPUs, or None unless all of them report it.
        """
        known_bytes = [
            used_bytes
            for used_bytes in self.site.used_bytes_by_gpu[:ranks]
            if used_bytes is not None
        ]
        return known_bytes if len(known_bytes) == ranks else None

    @contextlib.contextmanager
    def tuning(
        self,
        title: str,
        profile: Path,
        site_fingerprint: Fingerprint,
        request: SweepRequest,
        trials: int,
    ) -> Iterator[TrialRunner]:
        """Run a phase of tuning a profile.

        The runner shows its progress and writes to the profile's trial log.

        Args:
            title: Name of the phase and of what is tuned.
            profile: Path of the profile.
            site_fingerprint: As for ``runner``.
            request: Time budget of the phase and directory of the reports.
            trials: Expected number of trials, for the progress.
        """
        budget_s = request.budget_s
        if request.budget_ends_s is not None:
            budget_s = min(budget_s, request.budget_ends_s - time.time())
        with self.display.show(title, budget_s=budget_s) as update:
            directory = trial_log.report_directory(profile, request.reports)
            runner = self.runner(directory, site_fingerprint, update, trials)
            runner.budget_ends_s = request.budget_ends_s
            yield runner

    def runner(
        self,
        reports: Path,
        site_fingerprint: Fingerprint,
        update: Update,
        expected_trials: int,
    ) -> TrialRunner:
        """Return a runner of trials that shows progress and writes to a trial log.

        Args:
            reports: Directory of the profile among the reports.
            site_fingerprint: Machine, software, model and dataset of the trials.
            update: Shows the number of finished trials, the expected number, and a
                message on the present trial.
            expected_trials: Expected number of trials; hidden once there are more.

        Raises:
            BadInput: If the trial log's directory is not writable.
        """
        directory = reports / trial_log.TRIAL_LOG_DIRECTORY
        check_writable(directory)
        _warn_of_other_trials(directory, site_fingerprint)
        # No other process may append to the same file.
        writer = f"{socket.gethostname()}-{os.getpid()}"
        left_s = slurm_left_s(os.environ)
        job_ends_s = None if left_s is None else time.time() + left_s
        return TrialRunner(
            machine=self.machine,
            trial_log=trial_log.TrialLog(directory, writer),
            site=site_hash(site_fingerprint, self.server.environment),
            clock=SystemClock(),
            on_trial=_progress_of_trials(update, expected_trials),
            on_finished=self.display.trial_finished,
            job_ends_s=job_ends_s,
            made_on=site_facts(site_fingerprint, self.load_average_1min),
        )


def _warn_of_other_trials(directory: Path, site_fingerprint: Fingerprint) -> None:
    """Warn of trials in the trial log that another profile of the same name wrote."""
    records, _ = trial_log.read_trial_records(directory)
    own = own_records(records, site_fingerprint, seq_length_tokens=None)
    others = len(records) - len(own)
    if others:
        LOG.warning(
            "%d trials in %s are of another model, dataset, source or device, and are"
            " ignored; to separate them, give this profile another name or another"
            " --reports",
            others,
            directory,
        )


def site_facts(
    site_fingerprint: Fingerprint, load_average_1min: float | None = None
) -> MadeOn:
    """Return the facts of a site that its trials record.

    Args:
        site_fingerprint: Machine, software, model and dataset.
        load_average_1min: Load average of the host before the trials; None if it is not
            known.
    """
    return MadeOn(
        gpu_name=site_fingerprint.gpu_name,
        driver=site_fingerprint.driver,
        gpu_count=site_fingerprint.gpu_count,
        cpu_model=site_fingerprint.cpu_model,
        allotted_cpus=site_fingerprint.allotted_cpus,
        torch=site_fingerprint.torch,
        model_sha256=site_fingerprint.model_sha256,
        dataset_hash=site_fingerprint.dataset_hash,
        load_average_1min=load_average_1min,
    )


def _progress_of_trials(
    update: Update, expected_trials: int
) -> Callable[[str, Outcome | None], None]:
    """Return a function that shows each trial before it starts and after its end."""
    finished = 0

    def on_trial(label: str, outcome: Outcome | None) -> None:
        nonlocal finished
        if outcome is None:
            trial_number = finished + 1
            message = label
        else:
            finished += 1
            trial_number = finished
            message = f"{label}: {describe(outcome)}"
        total = expected_trials if trial_number <= expected_trials else None
        update(finished, total, message)

    return on_trial
