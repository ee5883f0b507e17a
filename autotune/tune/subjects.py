"""The interface between a tuning and what it tunes: any subject, on one machine."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.machine.measured_device import DeviceChoice
from autotune.profiles.store import StoredProfile
from autotune.trials.decide.least_time import StageName
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench, Display


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of the probe phase."""

    summary: str
    """The result in words."""
    trial_s: tuple[float, ...]
    """Seconds of each trial that was measured now."""


class TunedSubject(Protocol):
    """A subject on a machine: what each phase does with it.

    Phases after the probe read the profile that it wrote, and write their evidence into
    it. Each returns its result in words.
    """

    @property
    def name(self) -> str:
        """Short name."""

    @property
    def path(self) -> Path:
        """Path of its profile."""

    def missing(self, phase: StageName, nodes: int) -> str:
        """Return the reason why the subject cannot have a phase; empty if it can.

        Args:
            phase: The phase.
            nodes: Nodes of this job.
        """

    def estimate(self) -> str:
        """Predict the largest size from a trace."""

    def probe(self, ends_s: float) -> ProbeResult:
        """Find the largest size, and write the profile.

        Args:
            ends_s: Time after which no trial begins, in seconds since 1970.
        """

    def sweep_request(self, budget_s: float, ends_s: float) -> SweepRequest:
        """Return the request for windows of a phase.

        Args:
            budget_s: Time budget of the phase.
            ends_s: Time after which no window is likely to end, in seconds since 1970.
        """

    def explore(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Search the settings of the step jointly."""

    def workers(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Find the fewest DataLoader workers."""

    def network(
        self, stored: StoredProfile, request: SweepRequest, nodes: int
    ) -> tuple[str, float]:
        """Find the fastest gradient synchronisation on this job's nodes.

        Returns:
            The result in words, and the seconds that its ranks were waited for.
        """

    def confirm(
        self, stored: StoredProfile, request: SweepRequest, training_s: float
    ) -> str:
        """Measure the tuned settings as training will run, and train for a moment."""

    def baseline(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Compare the tuned settings with untuned ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSubjects:
    """Subjects on an open machine."""

    bench: Bench
    """The machine, whose server runs the trials of all of them."""
    subjects: tuple[TunedSubject, ...]


class SubjectsToTune(Protocol):
    """Subjects that are tuned together, before a machine is opened."""

    @property
    def names(self) -> list[str]:
        """Short name of each."""

    @property
    def reports(self) -> Path:
        """Directory of the reports, which has the trial logs."""

    @property
    def data(self) -> Path | None:
        """Directory of their dataset; None if they have their own data."""

    @property
    def window_s(self) -> float:
        """Duration of a timed window."""

    def open(
        self, device: DeviceChoice, out: Path | None, display: Display, *, probed: bool
    ) -> AbstractContextManager[OpenedSubjects]:
        """Open a machine, on which all trials run.

        Args:
            device: Device as you chose it.
            out: Directory of the profiles, or a file for one subject.
            display: Shows the progress of phases.
            probed: True if no probe writes the profiles, which must exist.

        Raises:
            AutotuneError: If the device cannot meet the request, or a profile is
                missing.
        """

    def next_steps(self, profiles: Sequence[Path], nodes: int) -> tuple[str, ...]:
        """Return the commands to run next with tuned profiles, in order."""
