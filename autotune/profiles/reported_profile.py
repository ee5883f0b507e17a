"""A profile with everything that is known about it, for the report."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from autotune.evidence.advice import Advice, Bottleneck
from autotune.evidence.profile import Profile
from autotune.profiles.approval_record import Approval
from autotune.profiles.checks import TrialLogCheck
from autotune.trials.values import FinishedTrial
from trainer.formats.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProfile:
    """A profile with its trials, dataset, bottlenecks, advice and approval."""

    path: Path
    profile: Profile
    intact: bool
    """True if its content still has the hash it was written with."""
    content_sha256: str
    """Hash of the file as it is; runs name the profile by it."""
    trials: tuple[FinishedTrial, ...]
    """Trials of the profile, in the order in which they were measured."""
    corrupt_lines: int
    """Number of corrupt lines of its trial log, which were left out."""
    dataset: Manifest | None = None
    """Manifest of its dataset; None if there is none."""
    dataset_lacking: str = "no dataset was found"
    """Reason why there is no dataset; not used if there is one."""
    data: Path | None = None
    """Directory of the dataset; None if it was not found."""
    bottlenecks: tuple[Bottleneck, ...] = ()
    advice: tuple[Advice, ...] = ()
    """Advice in reading order."""
    approval: Approval | None = None
    """Current approval state; None if it was not looked up."""
    trial_log: TrialLogCheck | None = None
    """Result of the check against its trial log; None if it was not checked."""

    @property
    def title(self) -> str:
        """Title of the profile in the report."""
        return self.path.stem

    @property
    def name(self) -> str:
        """Name of the model, or your functions with their arguments."""
        return self.profile.subject.words

    @property
    def quoted(self) -> str:
        """Path of the profile, quoted for a shell."""
        return shlex.quote(str(self.path))

    @property
    def unit(self) -> str:
        """Unit that trials occupy, one for each rank."""
        return "GPU" if self.profile.fingerprint.device == "cuda" else "rank"
