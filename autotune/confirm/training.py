"""The interface of a training whose settings are confirmed."""

from collections.abc import Sequence
from typing import Any, Protocol

from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.evidence.kernels import StepKernels
from autotune.evidence.profile import Profile
from autotune.profiles.store import StoredProfile
from autotune.subjects.bench import SubjectBench
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial
from autotune.workers.windows import SubjectWindows


class ConfirmedTraining(Protocol):
    """Training from a profile on this machine: its windows, and a short training."""

    @property
    def bench(self) -> SubjectBench:
        """Machine on which trials of the subject run."""

    @property
    def windows(self) -> SubjectWindows[Any]:
        """Windows of the profile's training."""

    @property
    def stored(self) -> StoredProfile:
        """The profile, which was probed here."""

    @property
    def sizes(self) -> Sequence[int]:
        """Sizes of a micro-batch to measure, the chosen one first."""

    @property
    def size_name(self) -> str:
        """Name of the size, for labels."""

    @property
    def num_workers(self) -> int:
        """DataLoader workers of each rank."""

    @property
    def not_verified(self) -> str | None:
        """Tuned settings with which nothing is trained, and why; None if all are."""

    def window(self, size: int, number: int, names: Sequence[str]) -> Trial:
        """Return the trial of a window.

        Args:
            size: Size of a micro-batch.
            number: Number of its round, from 0.
            names: Names of all windows of the round.
        """

    def rate(self, size: int, figures: WindowFigures) -> float:
        """Return the units/s of training that a window shows."""

    def accumulation_steps(self, size: int) -> int | None:
        """Return the micro-batches of each rank in a step of training.

        Returns:
            The number; None if windows have as many.
        """

    def kernels(self, runner: TrialRunner, split: SplitRates) -> StepKernels | str:
        """Return the kernels of a step, or the reason why they were not profiled."""

    def confirmed(
        self, profile: Profile, evidence: ConfirmEvidence, runner: TrialRunner
    ) -> Profile:
        """Return a profile with the evidence, and the size that it chose."""

    def train(
        self, profile: Profile, runner: TrialRunner, seconds: float
    ) -> tuple[Outcome, str]:
        """Train with the settings of a profile, which has been written.

        Args:
            profile: The profile, with the evidence of its windows.
            runner: Runner of the trial.
            seconds: Time of the training, its start included.

        Returns:
            The outcome, with ``ShortTrainingFigures``; and what to say if they have no
            rate.

        Raises:
            OutOfTime: If no time is left.
        """
