"""The request to probe a subject, and the probe on a known machine."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S
from autotune.evidence.argument import Argument
from autotune.evidence.profile import Profile
from autotune.machine.gpu_models import GpuModel
from autotune.machine.measured_device import MeasuredDevice, local_ranks, memory_budget
from autotune.memory.size_probe import SizeProbe
from autotune.subjects.bench import SubjectBench
from autotune.subjects.subject import Subject

MAX_SIZE = 2**20
"""Largest size to try by default: a small model takes very large micro-batches."""


class PreparedProbe(Protocol):
    """A probe on a known machine, with the subject's defaults for it."""

    @property
    def request(self) -> "ProbeRequest":
        """The probe as it was requested."""

    @property
    def subject(self) -> Subject:
        """The subject, with its settings."""

    @property
    def memory_budget_bytes(self) -> int:
        """Memory that each rank may use."""

    @property
    def local_ranks(self) -> int:
        """Ranks of this node, which take the steps together."""

    def size_probe(self) -> SizeProbe:
        """Return the search for the largest size, with the trace of a step."""

    def settings_at(self, size: int, path: Path) -> Mapping[str, Any]:
        """Return the tables of a profile that have the settings at a size.

        They are ``train`` for the bundled trainer, else ``settings``.

        Args:
            size: The chosen size.
            path: Path of the profile.
        """

    @property
    def global_batch_tokens(self) -> int | None:
        """Non-padding tokens of an optimizer step on all ranks.

        None if the step decides it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest(ABC):
    """A request to find the largest size of a subject, with the limits of the search.

    A field that is None takes the default of the machine.
    """

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

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name of the subject, for files."""

    @property
    @abstractmethod
    def data_dir(self) -> Path | None:
        """Directory of the dataset; None if the subject has its own data."""

    @abstractmethod
    def requested_subject(self) -> Subject:
        """Return the subject as it was requested, without the defaults of a machine.

        Raises:
            BadConfig: If it needs a dataset, and there is none.
        """

    @abstractmethod
    def prepare(self, bench: SubjectBench) -> PreparedProbe:
        """Return the probe on a machine.

        Args:
            bench: The machine, open for this subject or for another of the same code.

        Raises:
            BadInput: If the machine cannot meet the request.
        """

    @abstractmethod
    def with_settings(self, settings: Mapping[str, Argument], profile: Profile) -> Self:
        """Return the request for a step with other settings.

        Args:
            settings: The settings by name, the size among them.
            profile: Profile of the probed step, whose other settings are kept.
        """

    def on(self, site: MeasuredDevice) -> tuple[int, int]:
        """Return the ranks, and the memory budget of each in bytes, on a machine.

        Raises:
            BadInput: If it has less memory, or fewer GPUs.
        """
        ranks = local_ranks(site, self.ranks)
        return ranks, memory_budget(site, self.memory_bytes, self.as_gpu, ranks=ranks)


def check_budgets(requests: Iterable[ProbeRequest], site: MeasuredDevice) -> None:
    """Check that the device has the memory and the GPUs that are requested.

    Raises:
        BadInput: If it has less memory, or fewer GPUs.
    """
    for request in requests:
        request.on(site)
