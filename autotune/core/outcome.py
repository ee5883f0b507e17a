"""What became of a trial. Out of memory, crash, time-out are kinds of outcome, not scores; only one moves a bound."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The job did what it was asked to, and these are its figures."""

    figures: dict[str, Any]
    kind: Literal["measured"] = field(default="measured", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The allocator refused: the only outcome that says that something does not fit."""

    detail: str
    kind: Literal["out_of_memory"] = field(default="out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutOfMemory:
    """The kernel killed the job for the host's memory; says nothing about the budget."""

    detail: str
    kind: Literal["host_out_of_memory"] = field(default="host_out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The job did not end in its time and was killed."""

    detail: str
    kind: Literal["timed_out"] = field(default="timed_out", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The job failed in any other way."""

    detail: str
    kind: Literal["crashed"] = field(default="crashed", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contaminated:
    """Somebody else used the device, or the hardware slowed down: the figures are void."""

    detail: str
    kind: Literal["contaminated"] = field(default="contaminated", init=False)


Outcome = Measured | OutOfMemory | HostOutOfMemory | TimedOut | Crashed | Contaminated

_FAILURES = {kind.__dataclass_fields__["kind"].default: kind for kind in (
    OutOfMemory, HostOutOfMemory, TimedOut, Crashed, Contaminated,
)}  # fmt: skip


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """The form in which the ledger keeps an outcome."""
    return asdict(outcome)


def outcome_from_json(value: dict[str, Any]) -> Outcome:
    """Read an outcome back.

    Raises:
        ValueError: If the kind is unknown or its field is missing.
    """
    kind = value.get("kind")
    if kind == "measured" and isinstance(value.get("figures"), dict):
        return Measured(figures=value["figures"])
    if kind in _FAILURES and isinstance(value.get("detail"), str):
        return _FAILURES[kind](detail=value["detail"])
    raise ValueError(f"not an outcome: {value!r}")


def describe(outcome: Outcome) -> str:
    """An outcome in a few words, for tables and progress."""
    match outcome:
        case Measured():
            return "ran"
        case OutOfMemory():
            return "out of memory"
        case HostOutOfMemory():
            return "killed by the system"
        case TimedOut():
            return "timed out"
        case Crashed():
            return "crashed"
        case Contaminated():
            return "contaminated"
