"""The outcome of a trial, from the accounts of its ranks."""

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import BadInput, MachineLacks
from autotune.trials.messages import JobResult, JobStatus, RankAccount
from autotune.trials.outcomes import (
    Crashed,
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
)
from trainer.formats.errors import HOST_OUT_OF_MEMORY

_MAX_OUT_OF_MEMORY_CHARACTERS = 500
"""Characters of a rank's log that an out of memory quotes, from its end."""
_MAX_CRASH_CHARACTERS = 1000
"""Characters of a rank's log that a crash quotes, from its end."""
_TRAINER_SETTING = re.compile(r"--set train\.(\w+)=([^\s,;]+?)(?=[\s,;]|\.?$)")
"""A setting as messages of the trainer write it."""


def classify(
    ranks: Sequence[RankAccount], *, killed_by_kernel: bool = False
) -> Outcome:
    """Turn the accounts of a trial's ranks into an outcome.

    If ranks failed, it is the outcome of the rank that failed first, as its failure
    makes the others fail. If none did, it has the figures of the first rank.

    Args:
        ranks: The accounts, in the order of the ranks.
        killed_by_kernel: True if the kernel killed a process for memory during the
            trial.

    Raises:
        BadInput: If the job could not use its input, which is no measurement.
        MachineLacks: If the job could not use the device.
    """
    outcomes = [
        _rank_outcome(account, killed_by_kernel=killed_by_kernel) for account in ranks
    ]
    failures = {
        rank: outcome
        for rank, outcome in enumerate(outcomes)
        if not isinstance(outcome, Measured)
    }
    if not failures:
        return outcomes[0]
    # False sorts first, so that a rank which lost its peer comes after all others.
    first_rank = min(
        failures, key=lambda rank: (_lost_its_peer(ranks[rank]), ranks[rank].ended_s)
    )
    failure = failures[first_rank]
    result = ranks[first_rank].result
    if result is not None and result.status is JobStatus.REJECTED:
        raise _rejection(result)
    if len(ranks) == 1 or all(isinstance(outcome, OutOfMemory) for outcome in outcomes):
        return failure
    return replace(
        failure, detail=f"rank {first_rank} of {len(ranks)}: {failure.detail}"
    )


def _rejection(result: JobResult) -> BadInput | MachineLacks:
    """Return the error of a job that could not use its input or device."""
    # Settings in the trainer's message become options of the commands that run it.
    next_step = _TRAINER_SETTING.sub(
        lambda setting: f"--{setting[1].replace('_', '-')} {setting[2]}",
        result.next_step,
    )
    if result.exit_code == MachineLacks.exit_code:
        return MachineLacks(result.detail, next_step=next_step)
    return BadInput(result.detail, next_step=next_step)


def _lost_its_peer(account: RankAccount) -> bool:
    """Return whether a rank failed because another one had failed.

    So did a rank that the fork server killed, as it waited for the other one.
    """
    if account.result is None:
        return account.killed
    return account.result.status is JobStatus.LOST_PEER


def _rank_outcome(account: RankAccount, *, killed_by_kernel: bool) -> Outcome:
    """Return the outcome of one rank.

    A rejection counts as a crash; ``classify`` raises its error if it comes first.
    """
    result = account.result
    if result is None:
        return _outcome_without_result(account, killed_by_kernel=killed_by_kernel)
    if result.status is JobStatus.MEASURED:
        return Measured(figures=result.figures)
    if result.status is JobStatus.OUT_OF_MEMORY:
        return OutOfMemory(detail=result.detail)
    return Crashed(detail=result.detail)


def _outcome_without_result(account: RankAccount, *, killed_by_kernel: bool) -> Outcome:
    """Return the outcome of a rank that ended before it could write its result."""
    # C++ and the allocator write this if they cannot raise an exception.
    if HOST_OUT_OF_MEMORY.search(account.log_tail):
        return OutOfMemory(detail=account.log_tail[-_MAX_OUT_OF_MEMORY_CHARACTERS:])
    was_killed = account.exit_code == -signal.SIGKILL
    if was_killed and killed_by_kernel and not account.killed:
        return HostOutOfMemory(
            detail="the kernel killed the trial because the host ran out of memory"
        )
    quoted_log = account.log_tail[-_MAX_CRASH_CHARACTERS:]
    return Crashed(detail=f"exit code {account.exit_code}: {quoted_log}")
