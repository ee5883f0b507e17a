"""Recognise DataLoader workers that ran out of host memory by how a window ended."""

from autotune.trials.outcomes import Crashed, HostOutOfMemory, Outcome

_DEAD_WORKER_MESSAGES = (
    "killed by signal",
    "exited unexpectedly",
    "Bus error",
    "No space left on device",
    "Cannot allocate memory",
)
"""Messages of torch's DataLoader about workers that were killed or found no shared
memory."""
_ENDED_BY_CODE_MESSAGE = "exited unexpectedly with exit code"
"""Message of torch's DataLoader about a worker that your code ended."""


class WorkersDied(Exception):
    """Raised if DataLoader workers of a window ran out of host memory.

    It is no ``AutotuneError``, because it is always caught: a sweep lowers its limit of
    workers, and a joint search leaves out the settings.
    """


def workers_died(outcome: Outcome) -> bool:
    """Return True if DataLoader workers were killed or found no memory."""
    if isinstance(outcome, HostOutOfMemory):
        return True
    if not isinstance(outcome, Crashed) or "DataLoader" not in outcome.detail:
        return False
    if _ENDED_BY_CODE_MESSAGE in outcome.detail:
        return False
    return any(message in outcome.detail for message in _DEAD_WORKER_MESSAGES)
