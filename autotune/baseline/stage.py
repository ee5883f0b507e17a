"""The baseline phase: tuned settings beside untuned ones, or beside other profiles."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.base.defaults import BASELINE_ROUNDS
from autotune.base.files import write_atomically
from autotune.baseline.contender import Contender
from autotune.baseline.measure import BaselineRunner
from autotune.baseline.side import Side, open_side
from autotune.errors import BadInput
from autotune.evidence.baseline import BaselineEvidence
from autotune.machine.measured_device import DeviceChoice
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench, open_subject, with_subject
from autotune.subjects.registry import profile_subject
from autotune.subjects.subject import Argument
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest


def compare_recipes(
    bench: SubjectBench,
    stored: StoredProfile,
    request: SweepRequest,
    *,
    rounds: int = BASELINE_ROUNDS,
    untuned: Mapping[str, Argument] | None = None,
    left_out: Collection[str] = (),
) -> BaselineEvidence:
    """Measure the speedup over untuned settings, and write it into the profile.

    Args:
        bench: Machine that runs the trials, of the profile's subject.
        stored: Profile of any subject, which was measured here.
        request: Windows to measure, with their time budget.
        rounds: Maximum number of rounds.
        untuned: Settings of your own code before tuning; those that are missing are the
            defaults of your functions or of their library.
        left_out: Names of baselines that are not measured.

    Raises:
        ProfileRejected: If the profile is of another machine, subject or dataset.
        NotCheckable: If the size before tuning is not known.
        OutOfTime: If the deadline leaves no time for three rounds.
        Undecided: If a window of the tuned settings failed.
    """
    side = open_side(bench, stored, request)
    with _runner(bench, side, request, rounds) as trial_runner:
        contenders = [
            contender
            for contender in side.contenders(trial_runner, untuned or {})
            if contender.baseline.name not in left_out
        ]
        comparison = _compare(contenders, side, request, rounds, trial_runner)
    profile = add_evidence(stored.profile, "baseline", comparison, trial_runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return comparison


def compare_profiles(
    bench: SubjectBench,
    stored: StoredProfile,
    others: Sequence[StoredProfile],
    request: SweepRequest,
    *,
    data: Path | None = None,
    rounds: int = BASELINE_ROUNDS,
) -> BaselineEvidence:
    """Measure a profile's speedup over other profiles, of any subjects.

    The result is not written, as it depends on the other profiles.

    Args:
        bench: Machine that runs the trials, from ``open_bench_of``.
        stored: Profile whose speedup is measured.
        others: Profiles to compare it with.
        request: Windows to measure, with their time budget.
        data: Directory of the dataset of the others; None for that of each profile.
        rounds: Maximum number of rounds.

    Raises:
        BadInput: If two profiles have one name, or subjects count in different units.
        ProfileRejected: If a profile is of another machine, subject or dataset.
        OutOfTime: If the deadline leaves no time for three rounds.
        Undecided: If a window of the profile's settings failed.
    """
    side = open_side(bench, stored, request)
    contenders = [side.tuned()]
    for other in others:
        other_request = replace(request, data=other.data_dir(data))
        with _imported(bench, other, other_request) as imported:
            other_side = open_side(imported, other, other_request)
        contenders.append(other_side.tuned(other.path.stem))
    names = [contender.baseline.name for contender in contenders]
    if len(set(names)) < len(names):
        raise BadInput(
            f"two of the profiles have the same name: {', '.join(names)}",
            next_step="Rename one of the files.",
        )
    with _runner(bench, side, request, rounds) as trial_runner:
        return _compare(contenders, side, request, rounds, trial_runner)


@contextlib.contextmanager
def open_bench_of(
    stored: StoredProfile, request: SweepRequest, *, beside_others: bool
) -> Iterator[SubjectBench]:
    """Open the machine on which a profile's subject is measured.

    Args:
        stored: The profile.
        request: Windows to measure.
        beside_others: True if trials of other code run as well.
    """
    device: DeviceChoice = stored.profile.fingerprint.device
    with open_subject(
        device,
        profile_subject(stored.profile, request.data),
        request.data,
        import_timeout_s=request.trial_timeout_s,
        imports_in_trials=beside_others,
    ) as bench:
        yield bench


@contextlib.contextmanager
def _imported(
    bench: SubjectBench, other: StoredProfile, request: SweepRequest
) -> Iterator[SubjectBench]:
    """Yield a bench that has imported another profile's code, if it has any.

    Its trials run on the first bench. This one shows that the code can be imported, and
    has its hash.
    """
    subject = profile_subject(other.profile, request.data)
    if not subject.code():
        yield with_subject(bench, subject)
        return
    with open_subject(
        bench.site.device,
        subject,
        import_timeout_s=request.trial_timeout_s,
        shared=True,
    ) as code_bench:
        yield code_bench


@contextlib.contextmanager
def _runner(
    bench: SubjectBench, side: Side, request: SweepRequest, rounds: int
) -> Iterator[TrialRunner]:
    """Run the comparison's trials in the trial log of a profile."""
    stored = side.stored
    title = f"baseline {stored.profile.subject.name}"
    with bench.tuning(
        title, stored.path, side.fingerprint, request, trials=2 * rounds
    ) as runner:
        yield runner


def _compare(
    contenders: Sequence[Contender],
    side: Side,
    request: SweepRequest,
    rounds: int,
    runner: TrialRunner,
) -> BaselineEvidence:
    """Return the evidence of a comparison, the tuned settings first."""
    return BaselineRunner(
        contenders={contender.baseline.name: contender for contender in contenders},
        request=request,
        local_ranks=side.windows.limits.local_ranks,
        max_rounds=rounds,
        memory_budget_bytes=side.stored.profile.constraints.memory_budget_bytes,
        windows=Rounds(runner=runner),
    ).run()
