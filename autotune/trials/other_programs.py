"""Checks that other programs do not keep the CPU cores or the GPUs busy."""

import time
from collections.abc import Sequence

from autotune.base.log import LOG
from autotune.errors import MachineLacks
from autotune.machine.decide import busy_host, is_busy
from autotune.machine.values import HostFacts
from autotune.trials.contamination_guard import other_users
from trainer.formats.nvml import GpuMonitor
from trainer.formats.process_status import process_started_s

_LOAD_AVERAGE_S = 60.0
"""Time that ``load_average_1min`` covers, in seconds."""


def load_of_others(host: HostFacts) -> float | None:
    """Return the load average that other programs cause.

    Returns:
        The average over the last minute, or None if this process has run for longer:
        then its own trials are part of the load.
    """
    age_s = time.time() - process_started_s()
    return host.load_average_1min if age_s < _LOAD_AVERAGE_S else None


def warn_if_busy(host: HostFacts, load_average_1min: float | None) -> None:
    """Warn if other programs keep the CPU cores busy.

    Args:
        host: Facts of the host.
        load_average_1min: ``load_of_others``; None gives no warning.
    """
    cpus = host.allotted_cpus
    if load_average_1min is None or not is_busy(load_average_1min, cpus):
        return
    problem = busy_host(load_average_1min, cpus)
    LOG.warning("%s\n  next: %s", problem.claim, problem.next_step)


def require_idle_gpus(monitor: GpuMonitor, uuids: Sequence[str]) -> None:
    """Check that no other process uses these GPUs.

    Raises:
        MachineLacks: If one does; its next step names a GPU that is free.
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
