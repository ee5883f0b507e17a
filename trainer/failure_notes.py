"""Failure notes: the cause of a rank's failure, left for rank 0 in torchrun's store.

When a rank fails, torchrun signals all others to end, which is all that rank 0 would
see otherwise. Both functions do nothing without torchrun, and import torch only when
they are called.
"""

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_STORE_TIMEOUT = datetime.timedelta(seconds=5)
"""Wait for an agent that may be gone, which delays the exit of this rank."""


class FailureNote(NamedTuple):
    """Exit code of a failed rank, and the reason to record in ``exit.json``."""

    exit_code: int
    reason: str


def publish_failure(
    environment: Mapping[str, str], exit_code: int, reason: str
) -> None:
    """Write this rank's failure note."""
    # Optional: the error itself is already being reported.
    with contextlib.suppress(Exception):
        _store(environment).set(_key(environment), json.dumps([exit_code, reason]))


def read_failure(environment: Mapping[str, str]) -> FailureNote | None:
    """Return the failure note of a rank; None if no rank has left one."""
    with contextlib.suppress(Exception):
        store = _store(environment)
        key = _key(environment)
        if store.check([key]):
            exit_code, reason = json.loads(store.get(key))
            return FailureNote(int(exit_code), str(reason))
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
    """Return the key of the failure note of this start, as restarts share a store."""
    return f"trainer/word/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
