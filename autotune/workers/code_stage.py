"""Sweep of a loader of yours, from request to written profile."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.base.log import LOG
from autotune.base.units import format_seconds
from autotune.errors import BadInput, UsageError
from autotune.evidence.profile import (
    Argument,
    Constraints,
    Evidence,
    Profile,
    update_profile,
)
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import (
    DeviceChoice,
)
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
from autotune.subjects.bench import OwnBench, open_own
from autotune.subjects.code_profile import new_profile, subject_table
from autotune.subjects.own.subject import SIZE, OwnCode
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_log import report_directory
from autotune.workers.stage import EXPECTED_TRIALS, sweep_workers
from autotune.workers.windows import windows_of_code
from trainer.formats.events import utc_now


def loader_to_sweep(
    codes: Sequence[OwnCode], profile: Path, request: SweepRequest
) -> OwnCode:
    """Return the functions whose loader is swept.

    A profile of your own code gives its step and its arguments.

    Raises:
        UsageError: If there is no loader, nothing that consumes its batches, or more
            than one combination of arguments.
        AutotuneError: If the profile cannot be read.
    """
    code, *others = codes
    if others:
        raise UsageError(
            "a sweep takes one value of each argument",
            next_step="Run it once for each value of --set.",
        )
    if profile.is_file():
        subject = read_profile(profile).profile.subject
        arguments = {**subject.arguments, **code.arguments}
        update = {
            "step_function": code.step_function or subject.function("step"),
            "loader_function": code.loader_function or subject.function("loader"),
        }
        code = code.model_copy(
            update=update | {"along": subject.size, "arguments": arguments}
        )
    if code.loader({}) is None:
        raise UsageError(
            "--step needs a loader to feed it",
            next_step="Add --loader my_module:build_loader",
        )
    if request.replayed_step_s is None and code.step_function is None:
        raise UsageError(
            "nothing consumes the batches of --loader",
            next_step=(
                "Add --step my_module:build_step; or --step-time 120ms, the duration of"
                " a step"
            ),
        )
    return code


def sweep_own(
    choice: DeviceChoice, code: OwnCode, request: SweepRequest, out: Path | None
) -> WrittenProfile:
    """Find the fewest workers of a loader of yours, and write them into a profile.

    Raises:
        ProfileRejected: If ``out`` exists and is of other code, or of another machine.
    """
    replayed = request.replayed_step_s is not None
    with open_own(
        "cpu" if replayed else choice, code, request.trial_timeout_s
    ) as bench:
        (path,) = profile_paths(out, [code.name], bench.site.name)
        old = _earlier_profile(path, bench, given=out is not None, replayed=replayed)
        swept = code
        if old is not None:
            swept, request = _at_probed_size(code, request, old)
        if (
            swept.step_function is not None
            and request.replayed_step_s is None
            and swept.along not in swept.arguments
        ):
            raise BadInput(
                f"{path} does not say with which {swept.along} to measure"
                f" {swept.step_function}",
                next_step=(
                    f"Probe it first: autotune probe --step {swept.step_function}; or"
                    f" add --set {SIZE}=N"
                ),
            )
        evidence, runner = sweep_on(bench, swept, request, path)
        profile = _with_sweep(old, bench, runner, code, evidence)
        write_profile(path, profile)
        return WrittenProfile(path=path, profile=profile, trials=tuple(runner.finished))


def _earlier_profile(
    path: Path, bench: OwnBench, *, given: bool, replayed: bool
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
    bench: OwnBench,
    runner: TrialRunner,
    code: OwnCode,
    evidence: WorkersEvidence,
) -> Profile:
    """Return the profile with the result of a sweep, and with its loader."""
    settings: dict[str, Argument] = {**evidence.loader_settings}
    if old is None:
        return new_profile(
            bench,
            runner,
            code,
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
    loader = subject_table(code, bench)
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
    code: OwnCode, request: SweepRequest, profile: Profile
) -> tuple[OwnCode, SweepRequest]:
    """Return the functions with the size that a profile chose, and the request.

    A training function is replayed, as it has its own data.
    """
    probe = profile.evidence.probe
    size = profile.settings.get(code.along)
    if not isinstance(size, int) or code.along in code.arguments:
        return code, request
    code = code.model_copy(update={"arguments": {**code.arguments, code.along: size}})
    if probe is None or not probe.trains or request.replayed_step_s is not None:
        return code, request
    largest_steps_s = [
        row.step_s
        for row in probe.sizes
        if row.size == probe.feasible_max and row.step_s
    ]
    if not largest_steps_s:
        raise BadInput(
            f"{code.step_function} is a training loop, and its step was not timed",
            next_step="Add --step-time T, the duration of its step.",
        )
    replayed_step_s = largest_steps_s[0] * size / probe.feasible_max
    LOG.info(
        "%s is a training loop with its data; a step of %s is replayed",
        code.step_function,
        format_seconds(replayed_step_s),
    )
    return code, replace(request, replayed_step_s=replayed_step_s)


def sweep_on(
    bench: OwnBench, code: OwnCode, request: SweepRequest, path: Path
) -> tuple[WorkersEvidence, TrialRunner]:
    """Find the fewest workers on an open bench.

    The trials are in the trial log of the profile at ``path``.
    """
    loader = code.code().get("loader", code.words)
    with bench.display.show(f"workers {loader}", budget_s=request.budget_s) as update:
        runner = bench.runner(
            report_directory(path, request.reports),
            bench.fingerprint,
            update,
            EXPECTED_TRIALS,
        )
        runner.budget_ends_s = request.budget_ends_s
        windows = windows_of_code(code, request, bench)
        return sweep_workers(windows, runner, bench.site), runner
