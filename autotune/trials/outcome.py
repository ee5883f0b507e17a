"""What became of a trial. Out of memory, crash, time-out are kinds of outcome, not scores; only one moves a bound."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The job did what it was asked to, and these are its figures."""

    figures: dict[str, Any]
    kind: Literal["measured"] = field(default="measured", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(_Failure):
    """The allocator refused: the only outcome that says that something does not fit."""

    kind: Literal["out_of_memory"] = field(default="out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutOfMemory(_Failure):
    """The kernel killed the job for the host's memory; says nothing about the budget."""

    kind: Literal["host_out_of_memory"] = field(default="host_out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(_Failure):
    """The job did not end in its time and was killed."""

    kind: Literal["timed_out"] = field(default="timed_out", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(_Failure):
    """The job failed in any other way."""

    kind: Literal["crashed"] = field(default="crashed", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contaminated(_Failure):
    """Somebody else used the device, or the hardware slowed down: the figures are void."""

    kind: Literal["contaminated"] = field(default="contaminated", init=False)


Outcome = Measured | OutOfMemory | HostOutOfMemory | TimedOut | Crashed | Contaminated
_KINDS = {kind.__dataclass_fields__["kind"].default: kind for kind in get_args(Outcome)}
_WORDS = {"measured": "ran", "host_out_of_memory": "killed by the system"}


def outcome_from_json(value: dict[str, Any]) -> Outcome:
    """Read what ``dataclasses.asdict`` made of an outcome, as the ledger keeps it.

    Raises:
        ValueError: If the kind is unknown or its field is missing.
    """
    kind = value.get("kind")
    name, of = ("figures", dict) if kind == "measured" else ("detail", str)
    if kind in _KINDS and isinstance(value.get(name), of):
        found: Outcome = _KINDS[kind](**{name: value[name]})
        return found
    raise ValueError(f"not an outcome: {value!r}")


def describe(outcome: Outcome) -> str:
    """An outcome in a few words, for tables and progress."""
    return _WORDS.get(outcome.kind, outcome.kind.replace("_", " "))
