"""The contenders of a profile on this machine.

They are its tuned settings, and the baselines of its subject.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from autotune.baseline.contender import Contender
from autotune.baseline.values import UntunedRequest
from autotune.errors import NotCheckable
from autotune.evidence.baseline import TUNED, UNTUNED, SettingDifference
from autotune.evidence.profile import Fingerprint
from autotune.machine.measured_device import local_ranks
from autotune.profiles.local_probe import require_local
from autotune.profiles.store import StoredProfile
from autotune.subjects.baseline import LOADER_SETTINGS, Baseline
from autotune.subjects.bench import SubjectBench
from autotune.subjects.parts import part_of
from autotune.subjects.subject import Argument
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.values import CallTable
from autotune.workers.windows import SubjectWindows, windows_of_subject


class Side(Protocol):
    """A profile on this machine: its tuned settings, and their baselines."""

    @property
    def stored(self) -> StoredProfile:
        """The profile."""

    @property
    def windows(self) -> SubjectWindows[Any]:
        """Windows of the tuned settings."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of this machine, with the subject."""

    def tuned(self, name: str = TUNED) -> Contender:
        """Return the tuned settings, under a name."""

    def contenders(
        self, runner: TrialRunner, untuned: Mapping[str, Argument]
    ) -> list[Contender]:
        """Return the tuned settings, and after them the baselines.

        Args:
            runner: Runner of the trials that they need.
            untuned: Settings before tuning, as you gave them.

        Raises:
            NotCheckable: If the settings before tuning are not known, or cannot be
                given.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSide:
    """A profile on this machine, beside the settings before tuning."""

    stored: StoredProfile
    bench: SubjectBench
    """Machine, and what was learned of the code when it was imported."""
    windows: SubjectWindows[Any]
    """Windows of the tuned settings."""
    fingerprint: Fingerprint
    """Fingerprint of this machine, with the subject."""
    fit_local: Mapping[str, Any]
    """Inputs of checks that a size fits."""

    def tuned(self, name: str = TUNED) -> Contender:
        """Return the tuned settings."""
        settings = self.stored.profile.settings
        loader_settings = {
            setting: settings[setting]
            for setting in LOADER_SETTINGS
            if setting in settings
        }
        choice = {
            setting: value
            for setting, value in settings.items()
            if setting not in LOADER_SETTINGS
        }
        return self._contender(
            Baseline(
                name=name,
                subject=self.bench.subject,
                choice=choice,
                loader_settings=loader_settings if self._has_loader else {},
                fed_by=self._fed_by,
            )
        )

    def contenders(
        self, runner: TrialRunner, untuned: Mapping[str, Argument]
    ) -> list[Contender]:
        """Return the tuned settings, and after them the untuned ones.

        Args:
            runner: Runner of the trial that asks your code for its defaults.
            untuned: Settings before tuning, as you gave them.

        Raises:
            NotCheckable: If the size before tuning is not known.
        """
        tuned = self.tuned()
        told = {**self._defaults(runner), **untuned}
        before = self._untuned(tuned.baseline, told)
        baseline = tuned.baseline
        if self._has_loader and not baseline.loader_settings:
            # The loader was not tuned.
            baseline = replace(baseline, loader_settings=before.loader_settings)
        before = replace(before, differences=_differences(before, baseline))
        return [replace(tuned, baseline=baseline), self._contender(before)]

    @property
    def _fed_by(self) -> Literal["loader", "step", "training"]:
        """Source of the batches in a window."""
        probe = self.stored.profile.evidence.probe
        if probe is not None and probe.trains:
            return "training"
        return "loader" if self._has_loader else "step"

    @property
    def _has_loader(self) -> bool:
        return self.bench.subject.loader({}) is not None

    def _untuned(self, tuned: Baseline, told: Mapping[str, Any]) -> Baseline:
        """Return the untuned settings.

        Args:
            tuned: The tuned settings.
            told: Values before tuning by name; None if one is not known.

        Raises:
            NotCheckable: If the size before tuning is not known.
        """
        size = tuned.subject.size.name
        choice = {
            name: value
            for name, value in told.items()
            if name not in LOADER_SETTINGS and value is not None
        }
        if tuned.size is not None and size not in choice:
            raise NotCheckable(
                f"{tuned.subject.words} has no default for {size}, so the size before"
                " tuning is not known",
                next_step=(
                    f"Name it: autotune baseline {self.stored.path} --untuned {size}=N;"
                    f" or give {size} a default in your function"
                ),
            )
        if tuned.size is None:
            choice.pop(size, None)
        loader_settings = {
            name: told[name]
            for name in LOADER_SETTINGS
            if told.get(name) is not None and self._has_loader
        }
        return Baseline(
            name=UNTUNED,
            subject=tuned.subject,
            choice=choice,
            loader_settings=loader_settings,
            fed_by=self._fed_by,
            fit_choice={},
        )

    def _defaults(self, runner: TrialRunner) -> Mapping[str, Any]:
        """Return what your functions or their library take by default.

        Raises:
            BadInput: If your code cannot tell.
            Undecided: If the trial fails.
        """
        call = self.bench.subject.untuned()
        if call is None:
            return {}
        request = UntunedRequest(
            call=CallTable.of_call(call), source_sha256=self.windows.source_sha256
        )
        timeout_s = self.windows.request.trial_timeout_s
        trial = request.trial(timeout_s=timeout_s, **self.windows.local)
        outcome = runner.run(trial, "settings before tuning")
        measured = runner.require_measured("the settings before tuning", outcome)
        settings: Mapping[str, Any] = measured.figures["settings"]
        return settings

    def _contender(self, baseline: Baseline) -> Contender:
        size = baseline.subject.size
        counts_by_size = (
            not self._has_loader or size.name in self.bench.loader_parameters
        )
        return Contender(
            baseline=baseline,
            windows=self.windows,
            units_per_batch_of_size=size.units_per_size if counts_by_size else None,
            fit_local=dict(self.fit_local),
        )


def open_side(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> Side:
    """Return a profile on this machine, which must be the one that it was made on.

    Args:
        bench: Machine that runs the trials, of the profile's subject.
        stored: The profile.
        request: Windows to measure.

    Raises:
        ProfileRejected: If the profile is of another machine, subject or dataset.
    """
    ranks = local_ranks(bench.site, request.local_ranks or stored.profile.local_ranks)
    request = replace(request, local_ranks=ranks)
    return part_of(bench.subject.kind, "side", _side_of)(bench, stored, request)


def fit_inputs(bench: SubjectBench, ranks: int) -> dict[str, Any]:
    """Return the inputs of checks that a size fits, which depend on this machine."""
    return {
        "device_used_before_bytes": bench.used_before_bytes(ranks),
        "directory": bench.import_directory,
    }


def _side_of(bench: SubjectBench, stored: StoredProfile, request: SweepRequest) -> Side:
    """Return a profile of any subject beside the settings before tuning."""
    require_local(stored, bench.fingerprint)
    return SubjectSide(
        stored=stored,
        bench=bench,
        windows=windows_of_subject(bench.subject, {}, request, bench),
        fingerprint=bench.fingerprint,
        fit_local=fit_inputs(bench, request.local_ranks or 1),
    )


def _differences(untuned: Baseline, tuned: Baseline) -> Sequence[SettingDifference]:
    """Return the settings in which untuned and tuned ones differ."""
    theirs = {**untuned.choice, **untuned.loader_settings}
    of_tuned = {**tuned.choice, **tuned.loader_settings}
    return [
        SettingDifference(key=name, theirs=theirs.get(name), tuned=of_tuned.get(name))
        for name in dict.fromkeys((*of_tuned, *theirs))
        if theirs.get(name) != of_tuned.get(name)
    ]
