"""Reading and writing of profiles of your own training code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.base.files import write_atomically
from autotune.errors import BadInput, ProfileRejected
from autotune.evidence.profile import Provenance
from autotune.integrations.values import OwnConstraints, OwnEvidence, OwnProfile
from autotune.profiles.approval import (
    Content,
    ProfileWithApproval,
    read_content,
    read_with_approval,
)
from autotune.profiles.decide.fingerprint_check import compare_fingerprints
from autotune.profiles.decide.follow_up import command
from autotune.profiles.recorded_trials import trial_log_provenance
from autotune.profiles.toml_file import parse_profile, tables_to_toml
from autotune.subjects.bench import OwnBench
from autotune.trials.runner import TrialRunner
from trainer.config.resolve import read_profile_tables
from trainer.formats.errors import TrainerError
from trainer.formats.events import utc_now

SUBJECT_KEY = "subject"
"""Table that only profiles of your own training code have."""
_HEADER = (
    (
        "A profile of your own training code: use the values of [tuned] in it. If you"
        " edit this file, content_sha256 no"
    ),
    "longer matches, and reports show the profile as modified.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOwn(Content):
    """A profile of your own training code, its path and its approval."""

    path: Path
    profile: OwnProfile


def is_own(path: Path) -> bool:
    """Return whether a file is a profile of your own training code.

    A file that cannot be read is none.
    """
    try:
        read_profile_tables(path, SUBJECT_KEY)
    except TrainerError:
        return False
    return True


def read_own(path: Path, reports: Path = Path("reports")) -> StoredOwn:
    """Read and validate a profile, with its approval.

    Raises:
        BadInput: If it is invalid.
    """
    tables = read_profile_tables(path, SUBJECT_KEY)
    profile = parse_profile(OwnProfile, tables, where=str(path))
    return StoredOwn(
        path=path, profile=profile, **vars(read_content(path, tables, reports))
    )


def read_either(path: Path, reports: Path) -> StoredOwn | ProfileWithApproval:
    """Read a profile, of your own training code or not, with its approval.

    Raises:
        AutotuneError: If the profile cannot be used.
    """
    return (
        read_own(path, reports) if is_own(path) else read_with_approval(path, reports)
    )


def known_at(path: Path, bench: OwnBench) -> OwnProfile | None:
    """Return the profile at a path if it is of the same subject and site.

    Returns:
        The profile, or None.
    """
    try:
        found = read_own(path).profile
    except (TrainerError, BadInput):
        return None
    same = (
        found.subject.measured_sha256 == bench.subject.measured_sha256
        and found.fingerprint == bench.fingerprint
    )
    return found if same else None


def require_known(path: Path, bench: OwnBench, *, replayed: bool) -> OwnProfile | None:
    """Return the profile at a path.

    If steps are ``replayed``, its GPU need not be here.

    Returns:
        The profile, or None if there is no file.

    Raises:
        ProfileRejected: If it is of other code, arguments or source, or of another
            machine.
    """
    if not path.exists():
        return None
    found = read_own(path).profile
    differ = [
        one
        for one in compare_fingerprints(
            found.fingerprint, bench.fingerprint, replayed=replayed
        )
        if one.found == "error"
    ]
    if not differ:
        return found
    told = "; ".join(
        f"{one.field} is {one.here} here, {one.profile} in the profile"
        for one in differ
    )
    if any(one.field == "model_sha256" for one in differ):
        told = (
            "your code, its arguments or its source have changed since it was written"
        )
    step = found.subject.step_function or "MODULE:build_step"
    next_step = f"Probe again: {command('probe', step=step, out=path)}"
    raise ProfileRejected(f"{path} does not match: {told}", next_step=next_step)


def write_own(
    path: Path,
    bench: OwnBench,
    runner: TrialRunner,
    old: OwnProfile | None,
    *,
    name: str,
    tuned: dict[str, int],
    constraints: OwnConstraints | None = None,
    **evidence: Any,
) -> OwnProfile:
    """Write the result of a command into the profile ``old``, or a new one.

    Any other profile at the path is kept as ``.previous.toml``.
    """
    if old is None and path.is_file():
        write_atomically(
            path.with_suffix(".previous.toml"),
            path.read_text(encoding="utf-8", errors="replace"),
        )
    here, subject = bench.fingerprint if old is None else old.fingerprint, bench.subject
    if old is not None:
        loader = subject.model_dump(
            include={"loader_function", "loader_sha256"}, exclude_none=True
        )
        subject = old.subject.model_copy(update=loader)
    commands = (
        [] if old is None else [one for one in old.provenance.commands if one != name]
    )
    profile = OwnProfile(
        subject=subject,
        tuned={**({} if old is None else old.tuned), **tuned},
        fingerprint=here,
        constraints=constraints
        or (OwnConstraints() if old is None else old.constraints),
        provenance=Provenance(
            tool_version=__version__,
            created_utc=utc_now(),
            commands=[*commands, name],
            slurm_job_id=bench.site.slurm.job_id,
            **trial_log_provenance(runner, here, None),
        ),
        evidence=(OwnEvidence() if old is None else old.evidence).model_copy(
            update=evidence
        ),
    )
    write_atomically(
        path,
        tables_to_toml(profile.model_dump(mode="json", exclude_none=True), _HEADER),
    )
    return profile
