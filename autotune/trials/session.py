"""Shared parts of all phases: the site, the dataset, the machine, the trial log, and trials shown as progress."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from autotune import __version__
from autotune.base.clock import SystemClock
from autotune.base.files import check_writable
from autotune.errors import MachineLacks
from autotune.machine.gpu_sampler import GpuSampler
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import (
    DeviceChoice,
    MeasuredDevice,
    fingerprint,
    open_device,
)
from autotune.machine.nvml import GpuMonitor, NvmlMonitor
from autotune.profiles.values import Fingerprint
from autotune.trials import trial_log
from autotune.trials.contamination_guard import ContaminationGuard, other_users
from autotune.trials.fork_server import ForkServerMachine, Machine, StartedMachine
from autotune.trials.runner import TrialRunner
from autotune.trials.values import FinishedTrial, Outcome, describe
from autotune.workers.values import SweepRequest
from trainer.config.tables import canonical_sha256
from trainer.config.train_config import ModelSettings
from trainer.data.dataset import Manifest, read_manifest
from trainer.health.watchdog import slurm_left_s
from trainer.record.progress import Update, progress

_SETTINGS = (
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
    """Progress of a phase: by default one line."""

    def show(
        self, title: str, *, most_s: float | None = None
    ) -> AbstractContextManager[Update]:
        """Show the progress of a phase; ``most_s`` is its time budget, if any."""
        return progress(title, most_s=most_s)

    def saw(self, finished: FinishedTrial) -> None:
        """Receive each finished trial."""


BenchT = TypeVar("BenchT", bound="Bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A machine that is ready to run trials at a known site."""

    site: MeasuredDevice
    server: StartedMachine
    machine: Machine
    """The server; on GPUs inside of a ``ContaminationGuard``."""
    display: Display = field(default_factory=Display)

    def extended(self, kind: type[BenchT], **more: Any) -> BenchT:
        """Return this bench as one of another kind, with further fields."""
        return kind(
            **{one.name: getattr(self, one.name) for one in fields(Bench)}, **more
        )

    def used_before(self, ranks: int) -> list[int] | None:
        """Return the memory in use on the first GPUs before this program used them.

        None unless all report it.
        """
        known = [one for one in self.site.used_bytes_by_gpu[:ranks] if one is not None]
        return known if known and len(known) == ranks else None

    def runner(
        self, reports: Path, here: Fingerprint, update: Update, expected_trials: int
    ) -> TrialRunner:
        """Return a runner of trials that shows progress, and logs in the profile's directory among the reports.

        The total is hidden after ``expected_trials``. Raise ``BadInput`` if the trial
        log's directory is not writable.
        """
        directory = reports / trial_log.TRIAL_LOG_DIRECTORY
        check_writable(directory)
        records, _ = trial_log.read_trial_records(directory)
        if others := len(records) - len(trial_log.own_records(records, here, None)):
            sys.stderr.write(
                f"warning: {others} trials in {directory} are of another model,"
                " dataset, source or device, and are ignored; to separate them, give"
                " this profile another name or another --reports\n"
            )
        done = 0

        def on_trial(label: str, outcome: Outcome | None) -> None:
            nonlocal done
            done += outcome is not None
            told = label if outcome is None else f"{label}: {describe(outcome)}"
            update(
                done,
                (
                    expected_trials
                    if done + (outcome is None) <= expected_trials
                    else None
                ),
                told,
            )

        left_s = slurm_left_s(os.environ)
        # Results are reused only if everything that they depend on is the same.
        site = here.model_copy(
            update={"data_filesystem": None, "ram_total_bytes": 1}
        ).model_dump(mode="json")
        site |= {
            "tool_version": __version__,
            "environment": {name: os.environ.get(name) for name in _SETTINGS},
        }
        return TrialRunner(
            machine=self.machine,
            trial_log=trial_log.TrialLog(
                directory, f"{socket.gethostname()}-{os.getpid()}"
            ),
            site=canonical_sha256(site)[:16],
            clock=SystemClock(),
            on_trial=on_trial,
            on_finished=self.display.saw,
            ends_s=None if left_s is None else time.time() + left_s,
            made_on=trial_log.made_on(here),
        )


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
    def stage(
        self,
        name: str,
        profile: Path,
        model: ModelSettings,
        request: SweepRequest,
        trials: int,
    ) -> Iterator[TrialRunner]:
        """Run a phase of tuning a profile, which shows its progress and writes to the profile's trial log."""
        with self.display.show(
            f"{name} {model.name}", most_s=request.budget_s
        ) as update:
            directory = trial_log.report_directory(profile, request.reports)
            runner = self.runner(directory, self.fingerprint(model), update, trials)
            runner.budget_ends_s = request.ends_s
            yield runner


@contextlib.contextmanager
def device_here(
    choice: DeviceChoice,
    data_dir: Path,
    libraries: Sequence[str],
    *,
    without_gpu: str | None = None,
) -> Iterator[tuple[MeasuredDevice, NvmlMonitor]]:
    """Choose a device whose site has these libraries and the disk of a dataset.

    Arguments as for ``open_session``.

    Raise ``MachineLacks`` if the device or a library is missing.
    """
    with contextlib.closing(NvmlMonitor()) as monitor:
        site = open_device(
            choice, data_dir, SystemHost(), monitor, without_gpu=without_gpu
        )
        if lacking := next(
            (library for library in libraries if library not in site.versions), None
        ):
            raise MachineLacks(
                f"{lacking} is not installed",
                next_step=f"Install it: pip install {lacking}",
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

    ``without_gpu`` is the next step to suggest if a GPU is required and there is none;
    None for the usual advice. ``check`` rejects requests that this device cannot meet,
    before torch is loaded. Raise ``TrainerError`` if there is no dataset,
    ``MachineLacks`` if the required device, torch, or torch's support for the device is
    missing.
    """
    manifest = read_manifest(data_dir)
    with open_bench(
        choice, data_dir, ForkServerMachine(), without_gpu=without_gpu, check=check
    ) as bench:
        yield bench.extended(Session, manifest=manifest)


@contextlib.contextmanager
def open_bench(
    choice: DeviceChoice,
    place: Path,
    server: StartedMachine,
    *,
    without_gpu: str | None = None,
    check: Callable[[MeasuredDevice], None] = lambda site: None,
    shared: bool = False,
    loading: str = "torch",
) -> Iterator[Bench]:
    """Choose a device and start a trial server, as ``open_session``, without a dataset.

    ``place`` is a directory on the disk that is read. ``shared`` accepts memory that
    this process itself holds on a GPU. ``loading`` names what the server loads.
    """
    with contextlib.ExitStack() as stack:
        here = device_here(
            choice, place, ("torch", "transformers"), without_gpu=without_gpu
        )
        site, monitor = stack.enter_context(here)
        check(site)
        stack.enter_context(server)
        machine: Machine = server
        if site.device == "cuda":
            uuids = [gpu.uuid for gpu in site.gpus]
            if not shared:
                require_idle_gpus(monitor, uuids)
            machine = ContaminationGuard(
                server, monitor, uuids, GpuSampler(uuids), SystemClock()
            )
            stack.callback(machine.close)
        sys.stderr.write(f"measuring on {site.words}; loading {loading}\n")
        server.start()
        if site.device == "cuda" and server.versions.get("cuda") is None:
            what = (
                f"a GPU was found, but torch {server.versions.get('torch')} is built"
                " without CUDA"
            )
            next_step = "Install a CUDA build of torch, or use --device cpu."
            raise MachineLacks(what, next_step=next_step, docs="torch-without-cuda")
        yield Bench(site=site, server=server, machine=machine)


def require_idle_gpus(monitor: GpuMonitor, uuids: Sequence[str]) -> None:
    """Raise ``MachineLacks`` if another process uses these GPUs."""
    if users := other_users(monitor, uuids):
        free = [
            gpu.index
            for gpu in monitor.devices()
            if not other_users(monitor, [gpu.uuid])
        ]
        another = (
            f", or select another GPU: CUDA_VISIBLE_DEVICES={free[0]}" if free else ""
        )
        raise MachineLacks(
            "; ".join(users), next_step=f"Wait until the GPU is free{another}."
        )
