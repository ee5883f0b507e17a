"""Word that a rank leaves before it knows the run, for the first rank to write down. No torch at import.

torchrun ends all ranks as soon as one fails, and the first rank then only sees a signal. Ranks that have not found each
other yet can still reach the store that torchrun keeps for them.
"""

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any

_KEY = "trainer/word"
_TIMEOUT = datetime.timedelta(seconds=5)


def leave_word(environment: Mapping[str, str], exit_code: int, reason: str) -> None:
    """Say why this rank leaves, if there is a torchrun to keep it."""
    with contextlib.suppress(Exception):  # it is only to help: what is wrong is already being said
        _store(environment).set(_key(environment), json.dumps([exit_code, reason]))


def read_word(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return exit code and reason of a rank that left before it knew the run; None if none did."""
    with contextlib.suppress(Exception):
        store = _store(environment)
        if store.check([_key(environment)]):
            exit_code, reason = json.loads(store.get(_key(environment)))
            return int(exit_code), str(reason)
    return None


def _key(environment: Mapping[str, str]) -> str:
    return f"{_KEY}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - torch's own, and untyped
    """Return the store that torchrun's agent keeps beside its ranks."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise LookupError("no torchrun")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # there, though unlisted

    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
