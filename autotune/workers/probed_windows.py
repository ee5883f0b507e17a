"""The windows of a sweep of any subject's loader, at the size of its profile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.base.log import LOG
from autotune.base.units import format_seconds
from autotune.errors import BadInput
from autotune.evidence.profile import Profile
from autotune.profiles.decide.follow_up import command
from autotune.profiles.store import StoredProfile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.subject import Argument, Subject
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.windows import SubjectWindows, windows_of_subject


def windows_of_profile(
    bench: SubjectBench, stored: StoredProfile | None, request: SweepRequest, path: Path
) -> SubjectWindows[Any]:
    """Return the windows of a sweep, with the size and the settings of a profile.

    Args:
        bench: Machine on which trials of the subject run.
        stored: Profile with the size; None if there is none yet.
        request: Windows to measure, with their time budget.
        path: Path of the profile.

    Raises:
        BadInput: If it is not known with which size to measure.
    """
    subject = bench.subject
    choice: dict[str, Argument] = {}
    if stored is not None:
        ranks = request.local_ranks or stored.profile.local_ranks
        request = replace(request, local_ranks=ranks)
        choice, request = _at_probed_size(subject, request, stored.profile)
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
    return windows_of_subject(subject, choice, request, bench)


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
