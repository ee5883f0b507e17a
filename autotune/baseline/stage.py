"""The baseline phase: tuned settings beside untuned ones, or beside other profiles."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.base.defaults import BASELINE_ROUNDS
from autotune.base.files import write_atomically
from autotune.baseline.contender import Contender
from autotune.baseline.measure import BaselineRunner
from autotune.baseline.sides import Side, open_side
from autotune.errors import BadInput
from autotune.evidence.baseline import BaselineEvidence
from autotune.machine.measured_device import DeviceChoice
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import open_own
from autotune.subjects.registry import subject_class
from autotune.subjects.subject import Argument, Subject
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner
from autotune.trials.session import open_session
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench


def compare_recipes(
    bench: Bench,
    stored: StoredProfile,
    request: SweepRequest,
    *,
    rounds: int = BASELINE_ROUNDS,
    untuned: Mapping[str, Argument] | None = None,
) -> BaselineEvidence:
    """Measure the speedup over untuned settings, and write it into the profile.

    Args:
        bench: Machine that runs the trials. For a profile of your own code it is a
            ``CodeBench`` of that code.
        stored: Profile of any subject, which was measured here.
        request: Windows to measure, with their time budget.
        rounds: Maximum number of rounds.
        untuned: Settings of your own code before tuning; those that are missing are the
            defaults of your functions or of their library.

    Raises:
        ProfileRejected: If the profile is of another machine, subject or dataset.
        NotCheckable: If the size before tuning is not known.
        OutOfTime: If the deadline leaves no time for three rounds.
        Undecided: If a window of the tuned settings failed.
    """
    side = open_side(bench, stored, request)
    with _runner(bench, side, request, rounds) as trial_runner:
        contenders = side.contenders(trial_runner, untuned or {})
        comparison = _compare(contenders, side, request, rounds, trial_runner)
    profile = add_evidence(stored.profile, "baseline", comparison, trial_runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return comparison


def compare_profiles(
    bench: Bench,
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
        with _imported(bench, other, request) as imported:
            other_request = request
            if other.profile.has_train:
                other_request = replace(request, data=other.data_dir(data))
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
) -> Iterator[Bench]:
    """Open the machine on which a profile's subject is measured.

    Args:
        stored: The profile.
        request: Windows to measure.
        beside_others: True if trials of other code run as well.
    """
    device: DeviceChoice = stored.profile.fingerprint.device
    if stored.profile.has_train:
        with open_session(device, request.data) as session:
            yield session
        return
    with open_own(
        device,
        subject_of(stored),
        request.trial_timeout_s,
        imports_in_trials=beside_others,
    ) as code_bench:
        yield code_bench


def subject_of(stored: StoredProfile) -> Subject:
    """Return the subject of a profile of your own code."""
    table = stored.profile.subject
    return subject_class(table.kind).from_table(table.table)


@contextlib.contextmanager
def _imported(
    bench: Bench, other: StoredProfile, request: SweepRequest
) -> Iterator[Bench]:
    """Yield a bench that has imported another profile's code, if it has any.

    Its trials run on the first bench. This one shows that the code can be imported, and
    has its hash.
    """
    if other.profile.has_train:
        yield bench
        return
    with open_own(
        bench.site.device, subject_of(other), request.trial_timeout_s, shared=True
    ) as code_bench:
        yield code_bench


@contextlib.contextmanager
def _runner(
    bench: Bench, side: Side, request: SweepRequest, rounds: int
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
