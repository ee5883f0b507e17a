"""What a report is built from: profiles with their trials, and training runs."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.advice.values import Advice, Bottleneck
from autotune.base.document import Block, Section
from autotune.profiles.values import Approval, Profile, TrialLogCheck
from autotune.trials.values import FinishedTrial
from trainer.data.dataset import Manifest
from trainer.record.run_record import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProfile:
    """A profile with what lies around it."""

    path: Path
    profile: Profile
    intact: bool
    """Whether its content still has the hash it was written with."""
    content_sha256: str
    """Of the file as it is; runs name the profile by it."""
    trials: tuple[FinishedTrial, ...]
    damaged_lines: int
    """Of its trial log, which were left out."""
    dataset: Manifest | None = None
    dataset_lacking: str = "no dataset was found"
    """Why there is none."""
    bottlenecks: tuple[Bottleneck, ...] = ()
    advice: tuple[Advice, ...] = ()
    """In the order in which it is to be read."""
    approval: Approval | None = None
    """The last verdict on it; None if nobody looked for one."""
    trial_log: TrialLogCheck | None = None
    """What its trial log says of it; None where nobody looked."""

    @property
    def title(self) -> str:
        """As the report calls it."""
        return self.path.stem

    @property
    def name(self) -> str:
        """Of the model."""
        return self.profile.train.model.name

    @property
    def quoted(self) -> str:
        """Its path, as a shell takes it."""
        return shlex.quote(str(self.path))

    @property
    def unit(self) -> str:
        """What trials keep busy, one for each rank."""
        return "GPU" if self.profile.fingerprint.device == "cuda" else "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A training run and the profile it was started from, if that is one of the report's."""

    run: Run
    profile_path: Path | None
    matched_by: Literal["the profile's hash", "dataset and model"] | None = None
    """How the profile was found: a run with settings of its own has another hash."""
    otherwise: tuple[str, ...] = ()
    """What it computed otherwise than the profile says, so that what was expected of that is not expected of it."""
    bottlenecks: tuple[Bottleneck, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def name(self) -> str:
        """As the report calls it."""
        return self.run.directory.name or str(self.run.directory)


def part_of_each(
    profiles: Sequence[ReportedProfile], key: str, make: Callable[[ReportedProfile], tuple[Block, ...]]
) -> tuple[Block, ...]:
    """What is to be said of each profile, under its own title if there are several."""
    if len(profiles) == 1:
        return make(profiles[0])
    return tuple(
        Section(title=one.title, key=f"{key}-{number}", blocks=make(one))
        for number, one in enumerate(profiles, start=1)
    )
