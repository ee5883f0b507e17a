"""Events of a run: what was saved, what went wrong, the known causes of each kind, and what was done. No torch here."""

import datetime
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from trainer.schema import Table

Level = Literal["info", "warning", "error"]


class EventRow(Table):
    """Something that people may want to know of."""

    step: int
    """Optimizer steps finished when it was noticed, or the step it is about."""
    utc: str
    kind: str
    """``saved``, ``save_failed``, ``not_removed``, ``record_waits``, ``resumed``, ``damaged``, ``rolled_back``,
    ``preflight``, ``stopped``, or what ``trainer.health`` tells: ``non_finite``, ``spike``, ``explosion``, ``plateau``,
    ``rise``, ``starved``, ``straggler``."""
    level: Literal["info", "warning", "error"]
    action: str
    """What was done: ``none``, ``warn``, ``skip``, ``rollback``, ``give_up``."""
    message: str
    causes: list[str] = Field(default_factory=list)
    """Likely ones, the likeliest first."""
    next_step: str = ""
    values: dict[str, float | int | str] = Field(default_factory=dict)
    """Numbers that show it; those that are not finite as text."""
    samples: list[int] = Field(default_factory=list)
    """Numbers in the dataset of the samples of that step, of all ranks."""


def happened(
    step: int,
    kind: str,
    message: str,
    *,
    level: Level = "info",
    action: str = "none",
    causes: Sequence[str] = (),
    next_step: str = "",
    values: Mapping[str, float | int | str] | None = None,
    samples: Sequence[int] = (),
) -> EventRow:
    """An event of this moment; numbers that are not finite become text."""
    return EventRow(
        step=step,
        utc=utc_now(),
        kind=kind,
        level=level,
        action=action,
        message=message,
        causes=list(causes),
        next_step=next_step,
        values={name: _shown(value) for name, value in (values or {}).items()},
        samples=list(samples),
    )


def _shown(value: float | int | str) -> float | int | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Kind(enum.StrEnum):
    """What was found."""

    NON_FINITE = "non_finite"
    SPIKE = "spike"
    EXPLOSION = "explosion"
    PLATEAU = "plateau"
    RISE = "rise"
    STARVED = "starved"
    STRAGGLER = "straggler"


class Action(enum.StrEnum):
    """What is done about it, from the mildest to the strongest."""

    WARN = "warn"
    SKIP = "skip"
    ROLL_BACK = "rollback"
    GIVE_UP = "give_up"


SEVERITY = (Action.WARN, Action.SKIP, Action.ROLL_BACK, Action.GIVE_UP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something the user should know, and what is done about it."""

    kind: Kind
    action: Action
    message: str
    """What happened, with the values that show it."""
    causes: tuple[str, ...]
    """Likely ones, the most likely first."""
    next_step: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is known about a kind of trouble, whatever its values."""

    causes: tuple[str, ...]
    next_step: str


ADVICE: Mapping[Kind, Advice] = {
    Kind.NON_FINITE: Advice(
        causes=(
            "the learning rate is too high, and weights or activations overflowed",
            "a number range is left, by the precision or by gradients that travel in 16 bits",
            "a fault of the device, where it comes once and in no other run",
        ),
        next_step=(
            "If it comes again, lower train.learning_rate or lengthen train.warmup_steps; try train.precision = 'fp32' "
            "and train.parallel.gradient_dtype = 'fp32' to rule out the number range."
        ),
    ),
    Kind.SPIKE: Advice(
        causes=(
            "the learning rate is too high for this place of training",
            "a batch of unusual data: broken text, another language, long repetitions",
            "the optimizer's second moments are stale, which a lower adam_beta2 makes fresher",
        ),
        next_step=(
            "If they come often or the loss does not return, lower train.learning_rate, lengthen train.warmup_steps or "
            "set train.adam_beta2 to 0.98; train.health.on_spike says whether such batches are left out ('skip') or "
            "undone ('rollback')."
        ),
    ),
    Kind.EXPLOSION: Advice(
        causes=(
            "the learning rate is too high, or the warm-up too short",
            "a batch of unusual data",
            "the clip is so low that ordinary gradients lie far above it",
        ),
        next_step=(
            "Lengthen train.warmup_steps or lower train.learning_rate; where ordinary norms lie far above "
            "train.max_grad_norm, raise that. train.health.on_explosion says whether such batches are left out ('skip')"
            " or undone ('rollback')."
        ),
    ),
    Kind.PLATEAU: Advice(
        causes=(
            "the learning rate is too high to go lower, or by the schedule's end too low to move",
            "the model has learned what it can hold, or what this data has",
            "early in a run: only the frequencies of tokens were learned so far, which passes",
        ),
        next_step=(
            "Look at the validation loss (train.evaluation.interval_steps). If it stands still as well, let the rate "
            "fall (train.schedule, train.max_steps), change train.learning_rate, or stop here."
        ),
    ),
    Kind.RISE: Advice(
        causes=(
            "the learning rate is too high, and training comes apart slowly",
            "the data changed: another source, harder or longer samples",
        ),
        next_step=(
            "Go on from a checkpoint before the rise with a lower train.learning_rate; train.health.on_spike = "
            "'rollback' does so by itself where the rise is sudden."
        ),
    ),
    Kind.STARVED: Advice(
        causes=(
            "too few loader processes for the speed of the device",
            "slow storage, such as a shared file system under load",
            "other jobs use the processors of that node",
        ),
        next_step=(
            "Find the number of loader processes with: autotune workers --profile P (it sets train.data.loader_workers)"
            "; on shared storage copy the data to each node's own disk with train.data.stage_to."
        ),
    ),
    Kind.STRAGGLER: Advice(
        causes=(
            "that device slows down because it is hot or its power is capped",
            "others use that GPU or its node's processors",
            "it is a slower card than the rest",
            "a node disturbed by its services or its network",
            "uneven data: with the padded and bucketed layouts some ranks get longer rows",
        ),
        next_step=(
            "Run nvidia-smi -q -d PERFORMANCE on that rank's node; where it stays slow leave the node out (SLURM: "
            "--exclude=NODE). If slow ranks change, try train.layout = 'packed'."
        ),
    ),
}


def finding(kind: Kind, action: Action, message: str, values: Mapping[str, float]) -> Finding:
    """A finding with what is known about its kind."""
    advice = ADVICE[kind]
    return Finding(
        kind=kind,
        action=action,
        message=message,
        causes=advice.causes,
        next_step=advice.next_step,
        values=dict(values),
    )


def strongest(findings: Sequence[Finding]) -> Action | None:
    """The action that rules; None where nothing was found."""
    return max((one.action for one in findings), key=SEVERITY.index, default=None)
