"""Sweep of a loader of yours, from request to written profile."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.base.log import LOG
from autotune.base.units import format_seconds
from autotune.errors import BadInput, UsageError
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Profile,
    update_profile,
)
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import (
    DeviceChoice,
)
from autotune.profiles.decide.follow_up import command
from autotune.profiles.local_probe import require_local
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.recorded_trials import trial_log_provenance
from autotune.profiles.store import (
    WrittenProfile,
    known_profile,
    read_profile,
    with_functions,
    write_profile,
)
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.new_profile import new_profile, subject_table
from autotune.subjects.registry import merged_subject
from autotune.subjects.subject import Argument, Subject
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.stage import sweep_on
from autotune.workers.windows import windows_of_code
from trainer.formats.events import utc_now


def loader_to_sweep(
    subjects: Sequence[Subject], profile: Path, request: SweepRequest
) -> Subject:
    """Return the subject whose loader is swept.

    A profile of your own code gives its step and its arguments.

    Raises:
        UsageError: If there is no loader, nothing that consumes its batches, or more
            than one combination of arguments.
        AutotuneError: If the profile cannot be read.
    """
    subject, *others = subjects
    if others:
        raise UsageError(
            "a sweep takes one value of each argument",
            next_step="Run it once for each value of --set.",
        )
    if profile.is_file():
        subject = merged_subject(read_profile(profile).profile.subject, subject)
    if subject.loader({}) is None:
        raise UsageError(
            "--step needs a loader to feed it",
            next_step="Add --loader my_module:build_loader",
        )
    if request.replayed_step_s is None and subject.step({}) is None:
        raise UsageError(
            "nothing consumes the batches of --loader",
            next_step=(
                "Add --step my_module:build_step; or --step-time 120ms, the duration of"
                " a step"
            ),
        )
    return subject


def known_step_s(
    subject: Subject, profile: Path, request: SweepRequest
) -> float | None:
    """Return the seconds of a step that a sweep of your loader will time.

    Returns:
        The seconds of a replayed step, or those that the profile's probe measured at
        its size; None if neither is known.
    """
    if request.replayed_step_s is not None or not profile.is_file():
        return request.replayed_step_s
    stored = read_profile(profile).profile
    size = stored.settings.get(subject.size.name)
    probe = stored.evidence.probe
    if probe is None or not isinstance(size, int):
        return None
    return probe.step_s_at(size)


def sweep_own(
    device: DeviceChoice, subject: Subject, request: SweepRequest, out: Path | None
) -> WrittenProfile:
    """Find the fewest workers of a loader of yours, and write them into a profile.

    Raises:
        ProfileRejected: If ``out`` exists and is of other code, or of another machine.
        BadInput: If it is not known with which size to measure.
    """
    replayed = request.replayed_step_s is not None
    with open_subject(
        "cpu" if replayed else device,
        subject,
        import_timeout_s=request.trial_timeout_s,
    ) as bench:
        (path,) = profile_paths(out, [subject.name], bench.site.name)
        old = _earlier_profile(path, bench, given=out is not None, replayed=replayed)
        written = sweep_into(bench, request, path, old)
        write_profile(path, written.profile)
        return written


def sweep_into(
    bench: SubjectBench, request: SweepRequest, path: Path, old: Profile | None
) -> WrittenProfile:
    """Find the fewest workers of a loader on an open bench.

    The profile is not written yet.

    Args:
        bench: Machine on which trials of your code run.
        request: Windows to measure, with their time budget.
        path: Path of the profile.
        old: Profile to add to; None writes a new one.

    Raises:
        BadInput: If it is not known with which size to measure.
    """
    subject = bench.subject
    choice: dict[str, Argument] = {}
    if old is not None:
        choice, request = _at_probed_size(subject, request, old)
    step = subject.step(choice)
    size = subject.size.name
    if (
        step is not None
        and request.replayed_step_s is None
        and size not in step.arguments
    ):
        function = subject.code().get("step", subject.words)
        probe = command("probe", step=function, subject=subject.kind)
        raise BadInput(
            f"{path} does not say with which {size} to measure {function}",
            next_step=f"Probe it first: {probe}; or add --set {size}=N",
        )
    windows = windows_of_code(subject, choice, request, bench)
    evidence, runner = sweep_on(bench, windows, path)
    profile = _with_sweep(old, bench, runner, subject, evidence)
    return WrittenProfile(path=path, profile=profile, trials=tuple(runner.finished))


def _earlier_profile(
    path: Path, bench: SubjectBench, *, given: bool, replayed: bool
) -> Profile | None:
    """Return the profile that a sweep adds to; None to write a new one.

    Args:
        path: Path of the profile.
        bench: This machine, with your code.
        given: True if you named the profile, which then must match.
        replayed: True if a step is replayed, so that its GPU need not be here.

    Raises:
        ProfileRejected: If a given profile is of other code, or of another machine.
    """
    if not given:
        return known_profile(path, bench.fingerprint)
    if not path.exists():
        return None
    stored = read_profile(path)
    require_local(stored, bench.fingerprint, replayed=replayed)
    return stored.profile


def _with_sweep(
    old: Profile | None,
    bench: SubjectBench,
    runner: TrialRunner,
    subject: Subject,
    evidence: WorkersEvidence,
) -> Profile:
    """Return the profile with the result of a sweep, and with its loader."""
    settings: dict[str, Argument] = {**evidence.loader_settings}
    if old is None:
        return new_profile(
            bench,
            runner,
            command="workers",
            settings=settings,
            constraints=Constraints(),
            evidence=Evidence(workers=evidence),
        )
    swept = update_profile(
        old,
        command="workers",
        evidence={"workers": evidence},
        settings=settings,
        provenance={
            "created_utc": utc_now(),
            **trial_log_provenance(runner, old.fingerprint, None),
        },
    )
    loader = subject_table(bench)
    # The fixed arguments stay those of the probe.
    loader = loader.model_copy(
        update={
            "table": {
                name: value
                for name, value in loader.table.items()
                if name == "loader_function"
            },
            "sources": {
                role: sha256
                for role, sha256 in loader.sources.items()
                if role == "loader"
            },
        }
    )
    return swept.model_copy(update={"subject": with_functions(old.subject, loader)})


def _at_probed_size(
    subject: Subject, request: SweepRequest, profile: Profile
) -> tuple[dict[str, Argument], SweepRequest]:
    """Return the choice of size and settings of a profile, and the request.

    Settings of the loader are left out, as the sweep varies them. A training function
    is replayed, as it has its own data.
    """
    probe, name = profile.evidence.probe, subject.size.name
    size = profile.settings.get(name)
    step = subject.step({})
    is_fixed = step is not None and name in step.arguments
    choice: dict[str, Argument] = {
        setting.name: profile.settings[setting.name]
        for setting in subject.settings()
        if setting.name in profile.settings
    }
    if not isinstance(size, int) or is_fixed:
        return choice, request
    choice[name] = size
    if probe is None or not probe.trains or request.replayed_step_s is not None:
        return choice, request
    largest_steps_s = [
        row.step_s
        for row in probe.sizes
        if row.size == probe.feasible_max and row.step_s
    ]
    if not largest_steps_s:
        raise BadInput(
            f"{subject.words} is a training loop, and its step was not timed",
            next_step="Add --step-time T, the duration of its step.",
        )
    replayed_step_s = largest_steps_s[0] * size / probe.feasible_max
    LOG.info(
        "%s is a training loop with its data; a step of %s is replayed",
        subject.words,
        format_seconds(replayed_step_s),
    )
    return choice, replace(request, replayed_step_s=replayed_step_s)
