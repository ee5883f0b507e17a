"""The contenders of a profile of the bundled trainer on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.baseline.contender import Contender
from autotune.baseline.side import fit_inputs
from autotune.errors import NotCheckable
from autotune.evidence.argument import Argument
from autotune.evidence.baseline import TUNED
from autotune.evidence.profile import Fingerprint
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.store import StoredProfile
from autotune.subjects.baseline import Baseline
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.baselines.comparison import trainer_baselines, tuned_trainer
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import training_windows
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.windows import SubjectWindows


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmSide:
    """A profile of the bundled trainer on this machine."""

    stored: StoredProfile
    windows: SubjectWindows[MlmSubject]
    """Windows of the tuned settings."""
    fingerprint: Fingerprint
    """Fingerprint of this machine, with the model and the dataset."""
    fit_local: Mapping[str, Any]
    """Inputs of checks that a size fits."""

    def tuned(self, name: str = TUNED) -> Contender:
        """Return the tuned settings."""
        subject = self.windows.subject
        return self._contender(tuned_trainer(name, subject, self.windows.request.data))

    def contenders(
        self, runner: TrialRunner, untuned: Mapping[str, Argument]
    ) -> list[Contender]:
        """Return the tuned settings, and after them the baselines.

        Args:
            runner: Runner of trials; none is needed.
            untuned: Settings before tuning, as you gave them.

        Raises:
            NotCheckable: If you gave any: the trainer has its own.
        """
        if untuned:
            raise NotCheckable(
                "--untuned cannot be used with a profile of the bundled trainer, whose"
                " untuned settings are those of torch and transformers",
                next_step="Remove --untuned.",
            )
        probe = require_local_probe(self.stored)
        most, limit = self.windows.limits.max_workers()
        baselines = trainer_baselines(
            self.windows.subject,
            self.windows.request.data,
            most,
            limit,
            micro_batches=probe.gradient_accumulation_steps,
        )
        return [self._contender(baseline) for baseline in baselines]

    def _contender(self, baseline: Baseline) -> Contender:
        return Contender(
            baseline=baseline,
            windows=self.windows,
            units_per_batch_of_size=baseline.subject.size.units_per_size,
            fit_local=dict(self.fit_local),
        )


def side_of(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> MlmSide:
    """Return a profile on this machine, beside untuned settings and other trainers.

    It is the part of ``autotune.baseline.side`` that knows other trainers.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
    """
    require_local_probe(stored, bench.fingerprint)
    ranks = request.local_ranks or stored.profile.local_ranks
    return MlmSide(
        stored=stored,
        windows=training_windows(bench, stored.profile.train, request, ranks),
        fingerprint=bench.fingerprint,
        fit_local=fit_inputs(bench, ranks),
    )
