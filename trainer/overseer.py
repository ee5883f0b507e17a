"""Looks at every step once its numbers have arrived: what it says about the run's health, and what ranks agreed on.

All ranks read the same numbers of the same step at the same place of their loop, so they decide alike, and need no
further messages to agree. What they tell each other travels with the number of tokens, which they add up in any case.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.checkpoint import TrainingState
from trainer.config import TrainConfig
from trainer.events import SEVERITY, Action, EventRow, Finding, happened, strongest
from trainer.health import HealthMonitor, Vitals
from trainer.parallel import Ranks
from trainer.step import StepResult
from trainer.stopwatch import Mark, mark, to_host
from trainer.stream import Position
from trainer.watch import SIGNALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after a step."""

    stop_reason: str | None
    """Why training is to save and leave; None while it goes on."""
    save_is_due: bool


def tell(*, rank: int, signal_number: int | None, time_is_over: bool, save_is_due: bool) -> list[float]:
    """What a rank tells, as numbers that are added up over ranks."""
    signalled = signal_number is not None
    return [float(signalled), float(signalled and rank), float(signal_number or 0), time_is_over, save_is_due]


def agreed(told: Sequence[float]) -> Agreed:
    """What the sums over all ranks of what ``tell`` gave mean."""
    count, ranks, numbers, time_is_over, save_is_due = (round(one) for one in told)
    reason = None
    if count:
        number, rest = divmod(numbers, count)
        known = not rest and number in SIGNALS
        name = signal.Signals(number).name if known else "signals"
        reason = f"{name} on rank {ranks}" if count == 1 else f"{name} on {count} ranks"
    elif time_is_over:
        reason = "the time (train.stop_after_s, or the SLURM job's) is nearly over"
    return Agreed(stop_reason=reason, save_is_due=bool(save_is_due))


_STEPS_BEHIND = 2
"""On a GPU: while a step's numbers travel the device has the next one, and the one after, to work on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a step came to."""

    vitals: Vitals
    told: Sequence[float]
    """What the ranks told each other in that step, added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Travelling:
    step: int
    numbers: torch.Tensor
    copied: Mark


class VitalsQueue:
    """Steps whose numbers have not been read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._travelling: deque[_Travelling] = deque()

    def add(self, step: int, result: StepResult) -> None:
        """Begin to fetch a step's numbers."""
        fixed = torch.stack([result.loss.double(), result.grad_norm.double(), result.applied.double()])
        numbers = to_host(torch.cat([fixed, result.told]))
        self._travelling.append(_Travelling(step=step, numbers=numbers, copied=mark(self._device)))

    def arrived(self, *, all_of_them: bool = False) -> Iterator[Arrived]:
        """Steps that are old enough, in order; with ``all_of_them`` it waits for the last."""
        left = _STEPS_BEHIND if self._device.type == "cuda" and not all_of_them else 0
        while len(self._travelling) > left:
            one = self._travelling.popleft()
            one.copied.wait()
            loss, grad_norm, applied, *told = one.numbers.tolist()
            vitals = Vitals(step=one.step, loss=loss, grad_norm=grad_norm, applied=bool(applied))
            yield Arrived(vitals=vitals, told=told)

    def forget(self) -> None:
        """Leave out what was not read: those steps are undone."""
        self._travelling.clear()


_REMEMBERED_STEPS = 8
"""Whose samples an event can name: no step's numbers are read later than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be done after a step; the same on every rank."""

    action: Action | None = None
    """The strongest of what was found."""
    at_step: int = 0
    """Where it was found, counted from 1."""
    message: str = ""
    next_step: str = ""
    stop_reason: str | None = None
    """Why to save and leave."""
    save_asked_at: int | None = None
    """The step with which the first rank's clock asked for a save."""


class Overseer:
    """Watches over a run's steps.

    Each rank has one of these, and calls it at the same steps.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, tell_event: Callable[[EventRow], None]) -> None:
        self._config, self._ranks, self._tell_event = config, ranks, tell_event
        self._queue = VitalsQueue(ranks.device)
        self._samples: deque[tuple[int, npt.NDArray[np.int64]]] = deque(maxlen=_REMEMBERED_STEPS)
        self.health = HealthMonitor(config.health, config.max_grad_norm)
        self.skipped_steps = 0

    def add(self, step: int, result: StepResult, samples: npt.NDArray[np.int64]) -> None:
        """A step was handed to the device.

        ``samples`` are the numbers in the dataset of this rank's part of it.
        """
        self._queue.add(step, result)
        self._samples.append((step, samples))

    def look(self, *, all_of_them: bool = False) -> Verdict:
        """Judge the steps that have arrived; with ``all_of_them`` it waits for the last."""
        verdict = Verdict()
        for one in self._queue.arrived(all_of_them=all_of_them):
            verdict = _stronger(verdict, self._judge(one))
        return verdict

    def go_on(self, saved: Mapping[str, Any], skipped_steps: int) -> None:
        """Take up what a checkpoint remembers."""
        self.health = HealthMonitor.from_json(self._config.health, self._config.max_grad_norm, saved)
        self.skipped_steps = skipped_steps

    def roll_back(self, saved: Mapping[str, Any], *, at_step: int, to_step: int) -> None:
        """Forget the steps that are undone."""
        self._queue.forget()
        self._samples.clear()
        self.health.roll_back(saved, at_step=at_step, to_step=to_step)

    def _judge(self, one: Arrived) -> Verdict:
        step = one.vitals.step
        self.skipped_steps += not one.vitals.applied
        findings = self.health.look(one.vitals)
        if findings:
            samples = self._samples_of(step)
            for found in findings:
                self._tell_event(event_of(found, step, samples))
        together = agreed(one.told)
        action = strongest(findings)
        first = next((found for found in findings if found.action is action), None)
        return Verdict(
            action=action,
            at_step=step,
            message=first.message if first else "",
            next_step=first.next_step if first else "",
            stop_reason=together.stop_reason,
            save_asked_at=step if together.save_is_due else None,
        )

    def _samples_of(self, step: int) -> list[int]:
        """Of all ranks; they all find the same at the same step, so all of them come here."""
        own = next((samples for number, samples in self._samples if number == step), np.zeros(0, dtype=np.int64))
        return sorted(np.concatenate(self._ranks.gather(own)).tolist())


def event_of(found: Finding, step: int, samples: Sequence[int] = ()) -> EventRow:
    """A finding as the run record has it."""
    return happened(
        step,
        found.kind.value,
        found.message,
        level="error" if found.action in (Action.ROLL_BACK, Action.GIVE_UP) else "warning",
        action=found.action.value,
        causes=found.causes,
        next_step=found.next_step,
        values=found.values,
        samples=samples,
    )


def rollback_event(
    verdict: Verdict, *, from_step: int, to: TrainingState, name: str, behind: Position, health: HealthMonitor
) -> EventRow:
    """A rollback as the run record has it."""
    share = health.learning_rate_share(to.step)
    return happened(
        to.step,
        "rolled_back",
        f"rolled back from step {from_step} to {name}; rows {to.position.rows:,} to {behind.rows:,} of the data are "
        f"left out, and the learning rate is eased to {share:.3g} of its schedule",
        level="error",
        action="rollback",
        next_step=verdict.next_step,
        values={
            "from_step": from_step,
            "to_step": to.step,
            "first_row_left_out": to.position.rows,
            "first_row_after": behind.rows,
            "learning_rate_share": share,
            "rollbacks": health.rollbacks,
        },
    )


def _stronger(one: Verdict, other: Verdict) -> Verdict:
    """The stronger action of two, and what either asks for."""
    worse = max(one, other, key=lambda verdict: -1 if verdict.action is None else SEVERITY.index(verdict.action))
    return Verdict(
        action=worse.action,
        at_step=worse.at_step,
        message=worse.message,
        next_step=worse.next_step,
        stop_reason=one.stop_reason or other.stop_reason,
        save_asked_at=one.save_asked_at if other.save_asked_at is None else other.save_asked_at,
    )
