"""Shared parts of all phases of tuning.

``open_session`` chooses a device, checks that it is free and starts the trial server;
the ``Session`` gives each phase a ``TrialRunner`` that writes to the profile's trial
log and shows its trials as progress.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from autotune import __version__
from autotune.base.clock import SystemClock
from autotune.base.files import check_writable
from autotune.errors import MachineLacks
from autotune.machine.decide import busy_host, is_busy
from autotune.machine.gpu_sampler import GpuSampler
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import (
    DeviceChoice,
    MeasuredDevice,
    fingerprint,
    open_device,
)
from autotune.machine.nvml import GpuMonitor, NvmlMonitor
from autotune.machine.values import HostFacts
from autotune.profiles.values import Fingerprint
from autotune.trials import trial_log
from autotune.trials.contamination_guard import ContaminationGuard, other_users
from autotune.trials.fork_server import ForkServerMachine, Machine, StartedMachine
from autotune.trials.runner import TrialRunner
from autotune.trials.values import FinishedTrial, Outcome, describe
from autotune.workers.values import SweepRequest
from trainer.config.tables import canonical_sha256
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import Manifest, read_manifest
from trainer.health.time_budget import slurm_left_s
from trainer.record.progress import Update, progress
from trainer.record.run_record import process_started_s

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


LOAD_AVERAGE_S = 60.0
"""Time that the load average covers, in seconds."""


class Display:
    """Progress of a phase: by default one line."""

    def show(
        self, title: str, *, budget_s: float | None = None
    ) -> AbstractContextManager[Update]:
        """Show the progress of a phase; ``budget_s`` is its time budget, if any."""
        return progress(title, budget_s=budget_s)

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
        left_s = slurm_left_s(os.environ)
        # No other process may append to the same file.
        writer = f"{socket.gethostname()}-{os.getpid()}"
        return TrialRunner(
            machine=self.machine,
            trial_log=trial_log.TrialLog(directory, writer),
            site=_site_hash(site_fingerprint, self.server.environment),
            clock=SystemClock(),
            on_trial=_progress_of_trials(update, expected_trials),
            on_finished=self.display.trial_finished,
            ends_s=None if left_s is None else time.time() + left_s,
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
    """Return a hash of everything that results depend on; only then are they reused.

    ``environment`` is that of the trials.
    """
    # The size of the host's memory and the kind of disk are not part of it.
    site = site_fingerprint.model_copy(
        update={"data_filesystem": None, "ram_total_bytes": 1}
    ).model_dump(mode="json")
    site["tool_version"] = __version__
    site["environment"] = {name: environment.get(name) for name in _SITE_VARIABLES}
    return canonical_sha256(site)[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Bench):
    """A machine that is ready to run trials on a dataset."""

    manifest: Manifest

    def fingerprint(self, settings: ModelSettings) -> Fingerprint:
        """Return the fingerprint of this site with the dataset and a model."""
        return fingerprint(
            self.site, settings, self.manifest, self.server.versions.get("cuda")
        )

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        profile: Path,
        model: ModelSettings,
        request: SweepRequest,
        trials: int,
    ) -> Iterator[TrialRunner]:
        """Run a phase of tuning a profile.

        The runner shows its progress and writes to the profile's trial log.

        Args:
            name: Name of the phase, for its title.
            profile: Path of the profile.
            model: Model that is tuned.
            request: Time budget of the phase and directory of the reports.
            trials: Expected number of trials.
        """
        title = f"{name} {model.name}"
        budget_s = request.budget_s
        if request.ends_s is not None:
            budget_s = min(budget_s, request.ends_s - time.time())
        with self.display.show(title, budget_s=budget_s) as update:
            directory = trial_log.report_directory(profile, request.reports)
            runner = self.runner(directory, self.fingerprint(model), update, trials)
            runner.budget_ends_s = request.ends_s
            yield runner


@contextlib.contextmanager
def open_measured_device(
    choice: DeviceChoice,
    data_dir: Path,
    libraries: Sequence[str],
    *,
    without_gpu: str | None = None,
) -> Iterator[tuple[MeasuredDevice, NvmlMonitor]]:
    """Choose a device whose site has these libraries and the disk of a dataset.

    Other arguments are as for ``open_session``.

    Raises:
        MachineLacks: If the device or a library is missing.
    """
    with contextlib.closing(NvmlMonitor()) as monitor:
        site = open_device(
            choice, data_dir, SystemHost(), monitor, without_gpu=without_gpu
        )
        for library in libraries:
            if library not in site.versions:
                raise MachineLacks(
                    f"{library} is not installed",
                    next_step=f"Install it: pip install {library}",
                )
        yield site, monitor


@contextlib.contextmanager
def open_session(
    choice: DeviceChoice,
    data_dir: Path,
    *,
    without_gpu: str | None = None,
    check: Callable[[MeasuredDevice], None] = lambda site: None,
) -> Iterator[Session]:
    """Choose a device and start the trial server, which takes some seconds.

    Args:
        choice: Device as you chose it.
        data_dir: Directory of the dataset.
        without_gpu: Next step to suggest if a GPU is required and there is none; None
            for the usual advice.
        check: Rejects requests that this device cannot meet, before torch is loaded.

    Raises:
        TrainerError: If there is no dataset.
        MachineLacks: If the required device, torch, or torch's support for the device
            is missing.
    """
    manifest = read_manifest(data_dir)
    with open_bench(
        choice,
        data_dir,
        lambda site: ForkServerMachine(device=site.device),
        without_gpu=without_gpu,
        check=check,
    ) as bench:
        yield bench.extended(Session, manifest=manifest)


@contextlib.contextmanager
def open_bench(
    choice: DeviceChoice,
    data_dir: Path,
    make_server: Callable[[MeasuredDevice], StartedMachine],
    *,
    without_gpu: str | None = None,
    check: Callable[[MeasuredDevice], None] = lambda site: None,
    shared: bool = False,
    loading: str = "torch",
) -> Iterator[Bench]:
    """Choose a device and start a trial server, as ``open_session``, without a dataset.

    Args:
        choice: Device as you chose it.
        data_dir: Directory on the disk that is read.
        make_server: Makes the machine to start, for the chosen device.
        without_gpu: As for ``open_session``.
        check: As for ``open_session``.
        shared: Accept memory that this process itself holds on a GPU.
        loading: Names what the server loads, for the message.
    """
    with contextlib.ExitStack() as stack:
        site, monitor = stack.enter_context(
            open_measured_device(
                choice, data_dir, ("torch", "transformers"), without_gpu=without_gpu
            )
        )
        check(site)
        server = stack.enter_context(make_server(site))
        machine: Machine = server
        if site.device == "cuda":
            uuids = [gpu.uuid for gpu in site.gpus]
            if not shared:
                require_idle_gpus(monitor, uuids)
            machine = ContaminationGuard(
                server, monitor, uuids, GpuSampler(uuids), SystemClock()
            )
            stack.callback(machine.close)
        # A caller's own process (shared) chooses by an argument, not by an option.
        if choice == "auto" and site.device == "cpu" and not shared:
            _warn_without_gpu(site)
        load_average_1min = load_of_others(site.host)
        warn_if_busy(site.host, load_average_1min)
        sys.stderr.write(f"measuring on {site.words}; loading {loading}\n")
        server.start()
        if site.device == "cuda" and server.versions.get("cuda") is None:
            raise MachineLacks(
                f"a GPU was found, but torch {server.versions.get('torch')} is built"
                " without CUDA",
                next_step="Install a CUDA build of torch, or use --device cpu.",
                docs="torch-without-cuda",
            )
        yield Bench(
            site=site,
            server=server,
            machine=machine,
            load_average_1min=load_average_1min,
        )


def _warn_without_gpu(site: MeasuredDevice) -> None:
    sys.stderr.write(
        f"warning: no GPU found ({site.gpu_absent}): this measures the CPU\n"
        "  next: to measure it on purpose, add --device cpu and a --memory for it;"
        " for a GPU, run autotune doctor\n"
    )


def load_of_others(host: HostFacts) -> float | None:
    """Return the load average that other programs cause.

    None if this process has run for longer than the average covers: it is then the
    load of the trials.
    """
    age_s = time.time() - process_started_s()
    return host.load_average_1min if age_s < LOAD_AVERAGE_S else None


def warn_if_busy(host: HostFacts, load_average_1min: float | None) -> None:
    """Warn if other programs keep the CPU cores busy."""
    cpus = host.allotted_cpus
    if load_average_1min is None or not is_busy(load_average_1min, cpus):
        return
    problem = busy_host(load_average_1min, cpus)
    sys.stderr.write(f"warning: {problem.claim}\n  next: {problem.next_step}\n")


def require_idle_gpus(monitor: GpuMonitor, uuids: Sequence[str]) -> None:
    """Check that no other process uses these GPUs.

    Raises:
        MachineLacks: If one does.
    """
    users = other_users(monitor, uuids)
    if not users:
        return
    next_step = "Wait until the GPU is free"
    idle_gpus = [
        gpu.index for gpu in monitor.devices() if not other_users(monitor, [gpu.uuid])
    ]
    if idle_gpus:
        next_step += f", or select another GPU: CUDA_VISIBLE_DEVICES={idle_gpus[0]}"
    raise MachineLacks("; ".join(users), next_step=f"{next_step}.")
