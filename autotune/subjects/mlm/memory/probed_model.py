"""Result of a probe of one model, for the answer of the command and for tuning."""

from dataclasses import dataclass
from pathlib import Path

from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.trials.values import FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """A probed model: its profile, and every trial."""

    path: Path
    """Path of the profile."""
    profile: Profile
    trials: tuple[FinishedTrial, ...]
    """Trials in their order, with those that an earlier probe recorded."""
    previous: Path | None
    """Path to which the previous profile was moved; None if there was none."""

    @property
    def evidence(self) -> ProbeEvidence:
        """Evidence that the probe put into the profile."""
        assert self.profile.evidence.probe is not None
        return self.profile.evidence.probe
