"""Your own code as a step whose settings are searched."""

from dataclasses import dataclass, replace

from autotune.evidence.argument import Argument
from autotune.evidence.profile import Profile
from autotune.memory.code_probe import CodeProbeRequest, prepare_code
from autotune.memory.stage import profile_of_probe
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.store import StoredProfile
from autotune.search.configuration import Configuration
from autotune.search.request import ExploreRequest, subject_request
from autotune.search.stage import STUDY_OF_PROBE
from autotune.subjects.bench import SubjectBench
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.windows import windows_of_code


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeStep:
    """A probed step of yours whose settings are searched."""

    bench: SubjectBench
    stored: StoredProfile
    probe: CodeProbeRequest
    """The probe, whose limits hold for other settings, too."""
    sweep: SweepRequest
    """Length of the windows, and their time budget."""

    def request(self) -> ExploreRequest:
        """Return the configurations to search, and their windows.

        Their batches are those of the probe, so that each size counts as what it is.
        """
        profile = self.stored.profile
        evidence = require_local_probe(self.stored)
        most = with_headroom(evidence.feasible_max, profile.constraints.headroom_share)
        size_name = self.bench.subject.size.name
        size = profile.size
        present = present_settings(profile, self.bench)
        return subject_request(
            windows_of_code(
                self.bench.subject,
                present,
                replace(self.sweep, local_ranks=evidence.local_ranks),
                self.bench,
                fed_by="step",
            ),
            {**present, size_name: size if isinstance(size, int) else most},
            largest_size=most,
            study_name=f"{self.stored.path.stem}: explore",
            study_file=self.sweep.study_file,
        )

    def probed(self, candidate: Configuration, ends_s: float | None) -> Profile:
        """Return the profile of a probe of a candidate, as for ``ExploredStep``."""
        size_name = self.bench.subject.size.name
        choice = {name: value for name, value in candidate.items() if name != size_name}
        profile, _ = profile_of_probe(
            self.bench,
            prepare_code(self.bench, replace(self.probe, choice=choice)),
            self.stored.path,
            ends_s=ends_s,
            study=STUDY_OF_PROBE,
        )
        return profile
