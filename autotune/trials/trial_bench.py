"""A machine at a known site, and the runners that it gives to phases.

A runner writes to a trial log, shows its trials as progress, and reuses those of the
same site.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from autotune import __version__
from autotune.base.clock import SystemClock
from autotune.base.files import check_writable
from autotune.machine.measured_device import MeasuredDevice
from autotune.profiles.values import Fingerprint
from autotune.trials import trial_log
from autotune.trials.outcomes import Outcome, describe
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_machine import Machine, StartedMachine
from autotune.trials.values import FinishedTrial
from trainer.config.canonical_json import canonical_sha256
from trainer.health.time_budget import slurm_left_s
from trainer.record.progress import Update, progress

_SITE_VARIABLES = (
    "AUTOTUNE_NUMA_BINDING",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "LD_PRELOAD",
    "NCCL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
"""Environment variables that trials inherit, and that change their memory or speed."""


class Display:
    """How a phase shows its progress: by default in one line."""

    def show(
        self, title: str, *, budget_s: float | None = None
    ) -> AbstractContextManager[Update]:
        """Show the progress of a phase; ``budget_s`` is its time budget, if any."""
        return progress(title, budget_s=budget_s, never_rises=True)

    def trial_finished(self, finished: FinishedTrial) -> None:
        """Receive each finished trial; the default does nothing."""


BenchT = TypeVar("BenchT", bound="Bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A machine that is ready to run trials at a known site."""

    site: MeasuredDevice
    server: StartedMachine
    machine: Machine
    """The server; on GPUs inside of a ``ContaminationGuard``."""
    display: Display = field(default_factory=Display)
    load_average_1min: float | None = None
    """Load average of the host before this program's trials; None if it is not
    known."""

    def extended(self, kind: type[BenchT], **more: Any) -> BenchT:
        """Return this bench as one of another kind, with further fields."""
        own_fields = {field.name: getattr(self, field.name) for field in fields(Bench)}
        return kind(**own_fields, **more)

    def used_before_bytes(self, ranks: int) -> list[int] | None:
        """Return the memory in use on the first GPUs before this program used them.

        Return None unless all of them report it.
        """
        used_bytes = self.site.used_bytes_by_gpu[:ranks]
        known_bytes = [
            size_bytes for size_bytes in used_bytes if size_bytes is not None
        ]
        if not known_bytes or len(known_bytes) < ranks:
            return None
        return known_bytes

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
            update: Shows the number of trials, their total and the present one.
            expected_trials: Number of trials; the total is hidden beyond it.

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
            site=_site_hash(site_fingerprint, self.server.environment),
            clock=SystemClock(),
            on_trial=_progress_of_trials(update, expected_trials),
            on_finished=self.display.trial_finished,
            job_ends_s=job_ends_s,
            made_on=trial_log.made_on(site_fingerprint, self.load_average_1min),
        )


def _warn_of_other_trials(directory: Path, site_fingerprint: Fingerprint) -> None:
    records, _ = trial_log.read_trial_records(directory)
    own_records = trial_log.own_records(records, site_fingerprint, None)
    others = len(records) - len(own_records)
    if others:
        sys.stderr.write(
            f"warning: {others} trials in {directory} are of another model,"
            " dataset, source or device, and are ignored; to separate them, give"
            " this profile another name or another --reports\n"
        )


def _progress_of_trials(
    update: Update, expected_trials: int
) -> Callable[[str, Outcome | None], None]:
    """Return a function that shows each trial before it starts and after its end."""
    finished = 0

    def on_trial(label: str, outcome: Outcome | None) -> None:
        nonlocal finished
        if outcome is None:
            begun = finished + 1
            message = label
        else:
            finished += 1
            begun = finished
            message = f"{label}: {describe(outcome)}"
        total = expected_trials if begun <= expected_trials else None
        update(finished, total, message)

    return on_trial


def _site_hash(site_fingerprint: Fingerprint, environment: Mapping[str, str]) -> str:
    """Return a hash of everything that results depend on.

    A result is reused only at a site of the same hash. ``environment`` is that of the
    trials.
    """
    # The size of the host's memory and the kind of disk change no result.
    site = site_fingerprint.model_copy(
        update={"data_filesystem": None, "ram_total_bytes": 1}
    ).model_dump(mode="json")
    site["tool_version"] = __version__
    site["environment"] = {name: environment.get(name) for name in _SITE_VARIABLES}
    return canonical_sha256(site)[:16]
