"""Messages between a machine and the processes that run its trials, all of them JSON.

The machine sends requests, the fork server replies, and each rank writes a result. Both
sides run the same version of this project: no message outlives its processes.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from autotune.trials.values import config_of

# Names of the files by which a machine and its ranks under torchrun communicate.
REQUEST_FILE = "trial.json"
"""File in a trial's directory from which the first rank reads the trial."""
JOINED_FILE = "joined.json"
"""File that the first rank writes once all ranks have joined."""
END_FILE = "end"
"""File whose existence ends the ranks; it is empty."""


class JobStatus(StrEnum):
    """Way in which a job ended on one rank."""

    MEASURED = "measured"
    """The job completed, and has figures."""
    OUT_OF_MEMORY = "out_of_memory"
    """The job ran out of memory, or exceeded its memory budget."""
    REJECTED = "rejected"
    """The job could not use its input or its device."""
    LOST_PEER = "lost_peer"
    """The job failed because another rank was gone."""
    CRASHED = "crashed"
    """The job failed in any other way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result that a rank writes to its file when its job has ended."""

    status: JobStatus
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures of a job that completed; empty for others."""
    detail: str = ""
    """Error or stack of a job that ran out of memory, lost a peer or crashed; message
    of a job that was rejected."""
    next_step: str = ""
    """Next step after a rejection; empty for other jobs."""
    exit_code: int | None = None
    """Exit code of the error that rejected the job; None for other jobs."""
    ended_s: float = field(default_factory=time.monotonic)
    """Time at which the job ended, by the monotonic clock."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Self:
        """Return the result that a rank wrote."""
        status = JobStatus(message["status"])
        return cls(**{**message, "status": status})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """Account of a rank that has ended: its result, its process and its log."""

    result: JobResult | None
    """Result that the rank wrote; None if it ended before."""
    exit_code: int | None
    """Exit code of the process, negative for a signal; None if it is not known."""
    killed: bool
    """True if the fork server killed the process."""
    ended_s: float
    """Time at which the job ended, by the monotonic clock; without a result, the time
    at which the end of the process was noticed."""
    log_tail: str
    """End of the rank's output."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Self:
        """Return the account in a reply."""
        result = message["result"]
        if result is not None:
            result = JobResult.from_json(result)
        return cls(**{**message, "result": result})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Function that the fork server calls at its start, instead of loading the trainer.

    Its result is the entry ``preloaded`` of the server's versions.
    """

    module: str
    """Name of the function's module."""
    function: str
    """Name of the function in its module."""
    options: dict[str, Any]
    """Keyword arguments of the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Request to run a trial."""

    job: str
    """``Trial.job``."""
    measured: dict[str, Any]
    """``Trial.measured``."""
    local: dict[str, Any]
    """``Trial.local``."""
    timeout_s: float
    """Time limit of the trial."""
    directory: str
    """Directory of this trial alone, for results and logs of its ranks."""

    @property
    def local_ranks(self) -> int:
        """Number of processes of the trial."""
        ranks: int = self.measured.get("local_ranks", 1)
        return ranks

    @property
    def model_type(self) -> str | None:
        """Type of the model in transformers; None if the job has no such model."""
        value: Any = config_of(self.measured)
        # An argument of your function may have one of these names, too.
        for key in ("model", "config", "model_type"):
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """Request to import modules in the fork server, so that trials do not."""

    modules: Sequence[str]
    """Names of the modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReply:
    """Reply to a ``RunRequest``."""

    timed_out: bool
    """True if the fork server ended the trial at its time limit."""
    killed_by_kernel: bool
    """True if the kernel killed a process for memory during the trial."""
    ranks: Sequence[RankAccount]
    """Accounts of all ranks, in their order."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Self:
        """Return the reply that the fork server sent."""
        accounts = [RankAccount.from_json(account) for account in message["ranks"]]
        return cls(**{**message, "ranks": accounts})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReply:
    """Reply to an ``ImportRequest``."""

    threads: int
    """Number of threads that the imports started."""


Request = RunRequest | ImportRequest
Reply = RunReply | ImportReply


def encode(message: object) -> str:
    """Return a message as JSON on one line."""
    return json.dumps(message, default=_values_by_field)


def _values_by_field(message: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, which JSON does not know.

    ``asdict`` would copy all values, and the figures of a trace are many.
    """
    names = [message_field.name for message_field in fields(message)]
    return {name: getattr(message, name) for name in names}


def request_line(request: Request) -> str:
    """Return the line that sends a request to the fork server.

    The line is an object with one key, which names the type of the request.
    """
    kind = "imports" if isinstance(request, ImportRequest) else "trial"
    return encode({kind: request}) + "\n"


def read_request(line: bytes) -> Request:
    """Return the request that a line of ``request_line`` sends."""
    message = json.loads(line)
    if "imports" in message:
        return ImportRequest(**message["imports"])
    return RunRequest(**message["trial"])


def result_file(directory: Path, rank: int) -> Path:
    """Return the file to which a rank of the trial in ``directory`` writes."""
    return directory / f"rank-{rank}.json"
