"""New profiles of any subject."""

from autotune import __version__
from autotune.evidence.argument import Argument
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Profile,
    Provenance,
    SubjectTable,
    trainer_subject,
)
from autotune.profiles.recorded_trials import trial_log_provenance
from autotune.subjects.bench import SubjectBench
from autotune.trials.runner import TrialRunner
from trainer.formats.events import utc_now
from trainer.formats.train_config import TrainConfig


def new_profile(
    bench: SubjectBench,
    runner: TrialRunner,
    *,
    command: str,
    constraints: Constraints,
    evidence: Evidence,
    settings: dict[str, Argument] | None = None,
    train: TrainConfig | None = None,
) -> Profile:
    """Return a profile with the result of one command, not written yet.

    Args:
        bench: Machine and subject.
        runner: Runner of the trials.
        command: The command.
        constraints: Limits that were requested.
        evidence: The result.
        settings: Values to use in your code.
        train: Settings of the bundled trainer, in place of ``settings``.
    """
    fingerprint = bench.fingerprint
    return Profile(
        subject=subject_table(bench) if train is None else trainer_subject(train),
        train=train,
        settings=settings or {},
        constraints=constraints,
        fingerprint=fingerprint,
        provenance=Provenance(
            tool_version=__version__,
            created_utc=utc_now(),
            commands=[command],
            slurm_job_id=bench.site.slurm.job_id,
            **trial_log_provenance(
                runner, fingerprint, None if train is None else train.seq_length_tokens
            ),
        ),
        evidence=evidence,
    )


def subject_table(bench: SubjectBench) -> SubjectTable:
    """Return your functions, with the source that was measured, for a profile."""
    subject, size = bench.subject, bench.subject.size
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
