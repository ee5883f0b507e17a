"""Events of a run, such as saves and failures, with known causes, actions and next steps. No torch here."""

import datetime
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from trainer.config.tables import StrictTable


class EventRow(StrictTable):
    """Event of a run, as a line of ``events.jsonl``."""

    step: int
    """Step that the event is about, or number of steps finished when it occurred."""
    utc: str
    kind: str
    """Kind of event: ``saved``, ``save_failed``, ``not_removed``, ``record_waits``, ``resumed``, ``corrupt``,
    ``rolled_back``, ``preflight``, ``stopped``, or a ``Kind``."""
    level: Literal["info", "warning", "error"] = "info"
    action: str = "none"
    """Action taken: ``none``, ``warn``, ``skip``, ``rollback`` or ``give_up``."""
    message: str
    causes: list[str] = Field(default_factory=list)
    """Likely causes, most likely first."""
    next_step: str = ""
    values: dict[str, float | int | str] = Field(default_factory=dict)
    """Numbers behind the message; non-finite ones as text."""
    samples: list[int] = Field(default_factory=list)
    """Dataset indices of the step's samples, over all ranks."""


def happened(
    step: int,
    kind: str,
    message: str,
    *,
    values: Mapping[str, float | int | str] | None = None,
    **more: Any,  # noqa: ANN401 - as the row has them
) -> EventRow:
    """Return an event with the current time; ``more`` are other fields of the row. Non-finite numbers become text."""
    shown = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (values or {}).items()
    }
    return EventRow(step=step, utc=utc_now(), kind=kind, message=message, values=shown, **more)


def utc_now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Kind(enum.StrEnum):
    """Kind of finding."""

    NON_FINITE = "non_finite"
    SPIKE = "spike"
    EXPLOSION = "explosion"
    PLATEAU = "plateau"
    RISE = "rise"
    STARVED = "starved"
    STRAGGLER = "straggler"


class Action(enum.StrEnum):
    """Action on a finding, from the mildest to the strongest."""

    WARN = "warn"
    SKIP = "skip"
    ROLL_BACK = "rollback"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Finding about a run's health, and the action taken."""

    kind: Kind
    action: Action
    message: str
    """Description of the finding, with the values behind it."""
    values: dict[str, float]

    @property
    def causes(self) -> tuple[str, ...]:
        """Likely causes, most likely first."""
        return ADVICE[self.kind][0]

    @property
    def next_step(self) -> str:
        """Next step for this kind of finding."""
        return ADVICE[self.kind][1]

    def event(self, step: int, samples: Sequence[int] = ()) -> EventRow:
        """Return the event for the run record."""
        return happened(
            step,
            self.kind.value,
            self.message,
            level="error" if self.action in (Action.ROLL_BACK, Action.GIVE_UP) else "warning",
            action=self.action.value,
            causes=list(self.causes),
            next_step=self.next_step,
            values=self.values,
            samples=list(samples),
        )


ADVICE: Mapping[Kind, tuple[tuple[str, ...], str]] = {
    Kind.NON_FINITE: (
        (
            "the learning rate is too high, and weights or activations overflowed",
            "a number range is left, by the precision or by gradients that travel in 16 bits",
            "a fault of the device, where it comes once and in no other run",
        ),
        "If it comes again, lower train.learning_rate or lengthen train.warmup_steps; try train.precision = 'fp32' "
        "and train.parallel.gradient_dtype = 'fp32' to rule out the number range.",
    ),
    Kind.SPIKE: (
        (
            "the learning rate is too high for this place of training",
            "a batch of unusual data: broken text, another language, long repetitions",
            "the optimizer's second moments are stale, which a lower adam_beta2 makes fresher",
        ),
        "If they come often or the loss does not return, lower train.learning_rate, lengthen train.warmup_steps or "
        "set train.adam_beta2 to 0.98; train.health.on_spike says whether such batches are left out ('skip') or "
        "undone ('rollback').",
    ),
    Kind.EXPLOSION: (
        (
            "the learning rate is too high, or the warm-up too short",
            "a batch of unusual data",
            "the clip is so low that ordinary gradients lie far above it",
        ),
        "Lengthen train.warmup_steps or lower train.learning_rate; where ordinary norms lie far above "
        "train.max_grad_norm, raise that. train.health.on_explosion says whether such batches are left out ('skip')"
        " or undone ('rollback').",
    ),
    Kind.PLATEAU: (
        (
            "the learning rate is too high to go lower, or by the schedule's end too low to move",
            "the model has learned what it can hold, or what this data has",
            "early in a run: only the frequencies of tokens were learned so far, which passes",
        ),
        "Look at the validation loss (train.evaluation.interval_steps). If it stands still as well, let the rate "
        "fall (train.schedule, train.max_steps), change train.learning_rate, or stop here.",
    ),
    Kind.RISE: (
        (
            "the learning rate is too high, and training comes apart slowly",
            "the data changed: another source, harder or longer samples",
        ),
        "Go on from a checkpoint before the rise with a lower train.learning_rate; train.health.on_spike = "
        "'rollback' does so by itself where the rise is sudden.",
    ),
    Kind.STARVED: (
        (
            "too few loader processes for the speed of the device",
            "slow storage, such as a shared file system under load",
            "other jobs use the processors of that node",
        ),
        "Find the number of loader processes with: autotune workers P (it sets train.data.num_workers)"
        "; on shared storage copy the data to each node's own disk with train.data.stage_to.",
    ),
    Kind.STRAGGLER: (
        (
            "that device slows down because it is hot or its power is capped",
            "others use that GPU or its node's processors",
            "it is a slower card than the rest",
            "a node disturbed by its services or its network",
            "uneven data: with other layouts than packed some ranks get longer rows",
        ),
        "Run nvidia-smi -q -d PERFORMANCE on that rank's node; where it stays slow leave the node out (SLURM: "
        "--exclude=NODE). If slow ranks change, try train.layout = 'packed'.",
    ),
}
"""Likely causes, most likely first, and next step, by kind of finding."""
