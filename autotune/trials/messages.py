"""Messages between a machine and the processes that run its trials, all of them JSON.

The machine sends requests, the fork server replies, and each rank writes a result. Both
sides run the same version of this project: no message outlives its processes.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

REQUEST_FILE = "trial.json"
"""Name of the file, in a trial's directory, by which ranks under torchrun get it."""
JOINED_FILE = "joined.json"
"""Name of the file that ranks under torchrun write once they have joined."""
END_FILE = "end"
"""Name of the file whose existence ends ranks under torchrun."""


class JobStatus(StrEnum):
    """How a job ended on one rank."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    REJECTED = "rejected"
    """It could not use its input or its device."""
    LOST_PEER = "lost_peer"
    """It failed because another rank was gone."""
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result that a rank writes to its file when its job has ended."""

    status: JobStatus
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures of a job that measured."""
    detail: str = ""
    """Error or stack of a job that ran out of memory, lost a peer or crashed; message
    of a job that was rejected."""
    next_step: str = ""
    """Next step after a rejection."""
    exit_code: int | None = None
    """Exit code of the error that rejected the job."""
    ended_s: float = field(default_factory=time.monotonic)
    """When the job ended, by the monotonic clock."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Self:
        """Return the result that a rank wrote."""
        return cls(**message | {"status": JobStatus(message["status"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """How one rank of a trial ended."""

    result: JobResult | None
    """Result that the rank wrote; None if it ended before."""
    exit_code: int | None
    """Exit code of the process, negative for a signal; None if it is not known."""
    killed: bool
    """True if the fork server killed the process."""
    ended_s: float
    """When the job ended, by the monotonic clock; without a result, when the end of
    the process was noticed."""
    log_tail: str
    """End of the rank's output."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Self:
        """Return the account in a reply."""
        result = message["result"]
        if result is not None:
            result = JobResult.from_json(result)
        return cls(**message | {"result": result})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Function that the fork server calls at its start, instead of loading the trainer.

    Its result is the entry ``preloaded`` of the server's versions.
    """

    module: str
    function: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Request to run a trial."""

    job: str
    measured: dict[str, Any]
    local: dict[str, Any]
    timeout_s: float
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
        model = self.measured.get("config", {}).get("model", {})
        model_type: str | None = model.get("config", {}).get("model_type")
        return model_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """Request to import modules in the fork server, so that trials do not."""

    modules: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReply:
    """Reply to a ``TrialRequest``."""

    timed_out: bool
    killed_by_kernel: bool
    """True if the kernel killed a process for memory during the trial."""
    ranks: Sequence[RankAccount]
    """Accounts of all ranks, in their order."""

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Self:
        """Return the reply that the fork server sent."""
        accounts = [RankAccount.from_json(account) for account in message["ranks"]]
        return cls(**message | {"ranks": accounts})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReply:
    """Reply to an ``ImportRequest``."""

    threads: int
    """Number of threads that the imports started."""


Request = TrialRequest | ImportRequest

# The only field of a request's line names the type of the request.
_REQUEST_TYPES: Mapping[str, type[TrialRequest] | type[ImportRequest]] = {
    "trial": TrialRequest,
    "imports": ImportRequest,
}


def encode(message: object) -> str:
    """Return a message as JSON on one line."""
    return json.dumps(message, default=_fields_of)


def _fields_of(message: Any) -> dict[str, Any]:
    # Not by asdict, which copies: the figures of a trace are many.
    return {item.name: getattr(message, item.name) for item in fields(message)}


def request_line(request: Request) -> str:
    """Return the line that sends a request to the fork server."""
    (name,) = [
        name
        for name, request_type in _REQUEST_TYPES.items()
        if isinstance(request, request_type)
    ]
    return encode({name: request}) + "\n"


def read_request(line: bytes) -> Request:
    """Return the request that a line sends."""
    ((name, request_fields),) = json.loads(line).items()
    return _REQUEST_TYPES[name](**request_fields)


def result_file(directory: Path, rank: int) -> Path:
    """Return the file to which a rank of the trial in ``directory`` writes."""
    return directory / f"rank-{rank}.json"
