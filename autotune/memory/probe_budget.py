"""The memory budget of a probe in words, and what a traced step needs beside it."""

from autotune.base.log import LOG
from autotune.base.units import format_bytes
from autotune.machine.gpu_models import RESERVE_BYTES
from autotune.machine.measured_device import MeasuredDevice
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
)
from autotune.memory.probe_request import ProbeRequest


def tell_budget(
    site: MeasuredDevice, request: ProbeRequest, name: str, budget_bytes: int
) -> None:
    """Report the memory budget of a probe, and what a default budget leaves free."""
    left = ""
    if site.gpu is not None and request.memory_bytes is None:
        left = (
            f" ({format_bytes(RESERVE_BYTES)} of the GPU stay free; change the budget"
            " with --memory)"
        )
    LOG.info("%s: memory budget %s per rank%s", name, format_bytes(budget_bytes), left)


def overheads_range(site: MeasuredDevice, ranks: int) -> OverheadsRange:
    """Return the memory that a traced step needs in addition on a device."""
    if site.gpu is None:
        return overheads_on_cpu()
    return overheads_on_gpu(site.gpu.compute_capability, ranks, site.cuda_bytes)
