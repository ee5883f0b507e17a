"""Failure notes: the cause of a rank's failure, left for rank 0 in torchrun's store.

When a rank fails, torchrun signals all others to end, and rank 0 would know no other
cause than that signal. Both functions do nothing without torchrun, and import torch
only when they are called.
"""

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_STORE_TIMEOUT = datetime.timedelta(seconds=5)
"""Longest wait for torchrun's agent, which may be gone. It delays this rank's exit."""


class FailureNote(NamedTuple):
    """Exit code of a failed rank, and the reason to record in ``exit.json``."""

    exit_code: int
    reason: str


def publish_failure(
    environment: Mapping[str, str], exit_code: int, reason: str
) -> None:
    """Write this rank's failure note, if the store can be reached."""
    # An error here must not hide the failure, which this process reports itself.
    with contextlib.suppress(Exception):
        _store(environment).set(_key(environment), json.dumps([exit_code, reason]))


def read_failure(environment: Mapping[str, str]) -> FailureNote | None:
    """Return the last failure note of this start.

    Returns:
        None if no rank has left one, or if the store cannot be reached.
    """
    # This process is about to end: an error here would only hide the cause.
    with contextlib.suppress(Exception):
        store = _store(environment)
        key = _key(environment)
        if store.check([key]):
            exit_code, reason = json.loads(store.get(key))
            return FailureNote(exit_code=int(exit_code), reason=str(reason))
    return None


def _store(environment: Mapping[str, str]) -> Any:
    """Return the key-value store of torchrun's agent.

    Raises:
        LookupError: If this process was not started by torchrun.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise LookupError("no torchrun")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exists, though not exported

    return TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
    )


def _key(environment: Mapping[str, str]) -> str:
    """Return the key of this start's failure note, as restarts share a store."""
    return f"trainer/failure-note/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
