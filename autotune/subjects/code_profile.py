"""Profiles of your own training code."""

from autotune import __version__
from autotune.evidence.argument import Argument
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Profile,
    Provenance,
    SubjectTable,
)
from autotune.profiles.recorded_trials import trial_log_provenance
from autotune.subjects.bench import SubjectBench
from autotune.subjects.subject import Subject
from autotune.trials.runner import TrialRunner
from trainer.formats.events import utc_now


def new_profile(
    bench: SubjectBench,
    runner: TrialRunner,
    subject: Subject,
    *,
    command: str,
    settings: dict[str, Argument],
    constraints: Constraints,
    evidence: Evidence,
) -> Profile:
    """Return a profile with the result of one command, not written yet."""
    return Profile(
        subject=subject_table(subject, bench),
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


def subject_table(subject: Subject, bench: SubjectBench) -> SubjectTable:
    """Return your functions, with the source that was measured, for a profile."""
    size = subject.size
    return SubjectTable(
        kind=subject.kind,
        name=subject.name,
        words=subject.words,
        size=size.name,
        noun=size.noun,
        unit=size.unit,
        units_per_size=size.units_per_size,
        table=subject.table(),
        has_loader=subject.loader({}) is not None,
        sources=dict(bench.sources),
    )
