"""A probed step of any subject, whose settings are searched."""

from dataclasses import dataclass, replace

from autotune.evidence.argument import Argument
from autotune.evidence.profile import Profile
from autotune.memory.probe_request import ProbeRequest
from autotune.memory.stage import profile_of_probe
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.store import StoredProfile
from autotune.search.configuration import Configuration
from autotune.search.request import ExploreRequest, subject_request
from autotune.subjects.bench import SubjectBench
from autotune.subjects.parts import part_of
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.windows import windows_of_subject

STUDY_OF_PROBE = "probe of the explored settings"
"""Name of the Optuna study in which settings to adopt are probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedStep:
    """A probed step whose settings are searched."""

    bench: SubjectBench
    """Machine on which trials of the step run."""
    stored: StoredProfile
    """The profile, which was probed here."""
    probe: ProbeRequest
    """The probe, whose limits hold for other settings, too. Settings that you fixed in
    it are not searched."""
    sweep: SweepRequest
    """Length of the windows, and their time budget."""

    def request(self) -> ExploreRequest:
        """Return the configurations to search, and their windows."""
        request_of = part_of(
            self.bench.subject.kind, "searched settings", explore_request
        )
        return request_of(self.bench, self.stored, self.probe, self.sweep)

    def probed(self, candidate: Configuration, ends_s: float | None) -> Profile:
        """Return the profile of a probe with the settings of a candidate.

        Args:
            candidate: The settings.
            ends_s: Time after which no trial begins, in seconds since 1970.

        Raises:
            ExceedsMemory: If not even size 1 fits.
            OutOfTime: If the time budget is used up.
        """
        request = self.probe.with_settings(candidate, self.stored.profile)
        profile, _ = profile_of_probe(
            self.bench,
            request.prepare(self.bench),
            self.stored.path,
            ends_s=ends_s,
            study=STUDY_OF_PROBE,
        )
        return profile


def explore_request(
    bench: SubjectBench,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    request: SweepRequest,
) -> ExploreRequest:
    """Return the search of the settings that a subject declares, with its windows.

    Batches are those of the probe, so that each size counts as what it is.

    Args:
        bench: Machine on which trials of the subject run.
        stored: Profile that was probed here.
        probe_request: The probe.
        request: Length of the windows, and their time budget.
    """
    profile = stored.profile
    evidence = require_local_probe(stored)
    most = with_headroom(evidence.feasible_max, profile.constraints.headroom_share)
    size_name, size = bench.subject.size.name, profile.size
    present = present_settings(profile, bench)
    return subject_request(
        windows_of_subject(
            bench.subject,
            present,
            replace(request, local_ranks=evidence.local_ranks),
            bench,
            fed_by="step",
        ),
        {**present, size_name: size if isinstance(size, int) else most},
        largest_size=most,
        study_name=f"{stored.path.stem}: explore",
        study_file=request.study_file,
    )


def present_settings(profile: Profile, bench: SubjectBench) -> dict[str, Argument]:
    """Return the present value of each setting that may be searched.

    It is the profile's, else what the step reported in the probe, else the first of the
    declared values. Settings that you fixed as arguments are left out.
    """
    probe = profile.evidence.probe
    reported = {} if probe is None else probe.settings
    present: dict[str, Argument] = {}
    for setting in bench.subject.settings():
        if setting.name not in profile.subject.arguments:
            first = reported.get(setting.name, setting.values[0])
            present[setting.name] = profile.settings.get(setting.name, first)
    return present
