"""Opening of a machine for trials, with which every phase of tuning begins.

``open_bench`` chooses a device, checks that it is free and starts a trial server. Its
``Bench`` gives each phase a ``TrialRunner`` that writes to the profile's trial log and
shows its trials as progress.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.log import LOG
from autotune.errors import MachineLacks
from autotune.machine.gpu_sampler import GpuSampler
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import DeviceChoice, MeasuredDevice, open_device
from autotune.trials.contamination_guard import ContaminationGuard
from autotune.trials.other_programs import (
    load_of_others,
    require_idle_gpus,
    warn_if_busy,
)
from autotune.trials.trial_bench import Bench
from autotune.trials.trial_machine import Machine, StartedMachine
from trainer.formats.nvml import NvmlMonitor


@contextlib.contextmanager
def open_measured_device(
    choice: DeviceChoice,
    data_dir: Path,
    libraries: Sequence[str],
    *,
    without_gpu: str | None = None,
) -> Iterator[tuple[MeasuredDevice, NvmlMonitor]]:
    """Choose a device on a machine that has the required libraries.

    Args:
        choice: Device as you chose it.
        data_dir: Directory on the disk from which data is read.
        libraries: Names of the required libraries on PyPI.
        without_gpu: Next step to suggest if a GPU is required and there is none; None
            for the usual advice.

    Yields:
        The device with its site, and the monitor of its GPUs.

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
    """Choose a device and start a trial server, which takes some seconds.

    Args:
        choice: Device as you chose it.
        data_dir: Directory on the disk from which data is read.
        make_server: Makes the machine to start, for the chosen device.
        without_gpu: As for ``open_measured_device``.
        check: Called with the chosen device before torch is loaded; raises for requests
            that the device cannot meet.
        shared: True if the caller's own process may hold memory on the GPUs.
        loading: Modules that the server loads, for the message.

    Raises:
        MachineLacks: If the required device, torch, or torch's support for the device
            is missing, or if a GPU is in use.
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
            # Made before the server starts, so that the server does not count as
            # another program.
            machine = _guarded(server, site, monitor, shared=shared)
            stack.callback(machine.close)
        # The warning suggests an option of the command line, which a caller's own
        # process (shared) does not have.
        if choice == "auto" and site.device == "cpu" and not shared:
            _warn_without_gpu(site)
        load_average_1min = load_of_others(site.host)
        warn_if_busy(site.host, load_average_1min)
        LOG.info("measuring on %s; loading %s", site.words, loading)
        server.start()
        _require_support(site, server.versions)
        yield Bench(
            site=site,
            server=server,
            machine=machine,
            load_average_1min=load_average_1min,
        )


def _guarded(
    server: StartedMachine,
    site: MeasuredDevice,
    monitor: NvmlMonitor,
    *,
    shared: bool,
) -> ContaminationGuard:
    """Return a guard that runs trials on the server and watches its GPUs.

    Args:
        server: Machine that runs the trials.
        site: Machine with the GPUs.
        monitor: Reads the GPUs.
        shared: Accept memory in use on the GPUs, as their baseline; otherwise they must
            be idle.

    Raises:
        MachineLacks: If the GPUs must be idle and one is in use.
    """
    uuids = [gpu.uuid for gpu in site.gpus]
    if not shared:
        require_idle_gpus(monitor, uuids)
    return ContaminationGuard(server, monitor, uuids, GpuSampler(uuids), SystemClock())


def _require_support(site: MeasuredDevice, versions: Mapping[str, Any]) -> None:
    """Check that the server's torch supports the device.

    Args:
        site: The chosen device.
        versions: ``StartedMachine.versions`` of the server.

    Raises:
        MachineLacks: If torch is built without CUDA, and the device is a GPU.
    """
    if site.device == "cuda" and versions.get("cuda") is None:
        raise MachineLacks(
            f"a GPU was found, but torch {versions.get('torch')} is built without CUDA",
            next_step="Install a CUDA build of torch, or use --device cpu.",
            docs="torch-without-cuda",
        )


def _warn_without_gpu(site: MeasuredDevice) -> None:
    """Warn that the CPU was chosen because there is no GPU."""
    LOG.warning(
        "no GPU found (%s): this measures the CPU\n"
        "  next: to measure it on purpose, add --device cpu and a --memory for it;"
        " for a GPU, run autotune doctor",
        site.gpu_absent,
    )
