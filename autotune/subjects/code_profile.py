"""Profiles of your own training code."""

from autotune import __version__
from autotune.evidence.profile import (
    Argument,
    Constraints,
    Evidence,
    Profile,
    Provenance,
    SubjectTable,
)
from autotune.profiles.recorded_trials import trial_log_provenance
from autotune.subjects.bench import OwnBench
from autotune.subjects.own.subject import OwnCode
from autotune.trials.runner import TrialRunner
from trainer.formats.events import utc_now


def new_profile(
    bench: OwnBench,
    runner: TrialRunner,
    code: OwnCode,
    *,
    command: str,
    settings: dict[str, Argument],
    constraints: Constraints,
    evidence: Evidence,
) -> Profile:
    """Return a profile with the result of one command, not written yet."""
    return Profile(
        subject=subject_table(code, bench),
        settings=settings,
        constraints=constraints,
        fingerprint=bench.fingerprint,
        provenance=Provenance(
            tool_version=__version__,
            created_utc=utc_now(),
            commands=[command],
            slurm_job_id=bench.site.slurm.job_id,
            **trial_log_provenance(runner, bench.fingerprint, None),
        ),
        evidence=evidence,
    )


def subject_table(code: OwnCode, bench: OwnBench) -> SubjectTable:
    """Return your functions, with the source that was measured, for a profile."""
    sources = {
        "step": bench.subject.step_sha256,
        "loader": bench.subject.loader_sha256,
    }
    return SubjectTable(
        kind=code.kind,
        name=code.name,
        words=code.words,
        size=code.size.name,
        noun=code.size.noun,
        unit=code.size.unit,
        units_per_size=code.size.units_per_size,
        table=code.table(),
        sources={role: sha256 for role, sha256 in sources.items() if sha256},
    )
