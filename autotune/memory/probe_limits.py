"""Limits of a probe, which every subject has."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S
from autotune.machine.gpu_models import GpuModel
from autotune.machine.measured_device import MeasuredDevice, local_ranks, memory_budget

MAX_SIZE = 2**20
"""Largest size to try by default: a small model takes very large micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """Limits of a probe; a field that is None takes the default of the machine."""

    reports: Path
    """Directory of reports and trial logs."""
    memory_bytes: int | None = None
    """Memory budget of each rank."""
    as_gpu: GpuModel | None = None
    """Smaller GPU whose memory is imitated; None imitates no other GPU."""
    ranks: int | None = None
    """Ranks of this node that take the steps together."""
    headroom_share: float = HEADROOM_SHARE
    """Share of the largest size to leave free."""
    max_size: int = MAX_SIZE
    """Largest size to try."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    """Time limit of one trial, in seconds."""
    study_file: Path | None = None
    """File to which the probe writes its Optuna study; None for no file."""
    traced: bool = True
    """True if a trace predicts memory before any trial; otherwise trials alone guide
    the search."""

    def on(self, site: MeasuredDevice) -> tuple[int, int]:
        """Return the ranks, and the memory budget of each in bytes, on a machine.

        Raises:
            BadInput: If it has less memory, or fewer GPUs.
        """
        ranks = local_ranks(site, self.ranks)
        return ranks, memory_budget(site, self.memory_bytes, self.as_gpu, ranks=ranks)


def check_budgets(limits: Iterable[ProbeLimits], site: MeasuredDevice) -> None:
    """Check that the device has the memory and the GPUs that are requested.

    Raises:
        BadInput: If it has less memory, or fewer GPUs.
    """
    for each in limits:
        each.on(site)
