"""Looks at every step once its numbers have arrived: what it says about the run's health, and what ranks agreed on.

All ranks read the same numbers of the same step at the same place of their loop, so they decide alike. What they tell
each other travels with the number of tokens, which they add up in any case.
"""

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.config.train_config import TrainConfig
from trainer.distributed.ranks import DeviceEvent, Ranks, mark, to_host
from trainer.distributed.step import StepResult
from trainer.health.events import Action, Diagnosis, EventRow
from trainer.health.monitor import HealthMonitor, StepMetrics
from trainer.health.watchdog import SIGNALS


def tell(*, rank: int, signal_number: int | None, time_is_over: bool, save_is_due: bool) -> list[float]:
    """What a rank tells, as numbers that are added up over ranks."""
    signalled = signal_number is not None
    return [float(signalled), float(signalled and rank), float(signal_number or 0), time_is_over, save_is_due]


def agreed(told: Sequence[float]) -> tuple[str | None, bool]:
    """What the sums over all ranks of what ``tell`` gave mean: why to save and leave, if so, and whether to save."""
    count, ranks, numbers, time_is_over, save_is_due = (round(one) for one in told)
    reason = "the time (train.stop_after_s, or the SLURM job's) is nearly over" if time_is_over else None
    if count:
        number, rest = divmod(numbers, count)
        name = signal.Signals(number).name if not rest and number in SIGNALS else "signals"
        reason = f"{name} on rank {ranks}" if count == 1 else f"{name} on {count} ranks"
    return reason, bool(save_is_due)


_STEPS_BEHIND = {"cpu": 0, "cuda": 2}
"""While a step's numbers travel from a GPU, it has the next one, and the one after, to work on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be done after a step; the same on every rank."""

    worst: Diagnosis | None
    """The one with the strongest action."""
    at_step: int
    """Where that was found, counted from 1."""
    stop_reason: str | None
    """Why to save and leave."""
    save_asked_at: int | None
    """The step with which the first rank's clock asked for a save."""

    @property
    def trouble(self) -> Diagnosis | None:
        """What asks for more than going on."""
        asks = self.worst is not None and self.worst.action in (Action.ROLL_BACK, Action.GIVE_UP)
        return self.worst if asks else None


class HealthController:
    """Watches over a run's steps; every rank calls it at the same ones."""

    def __init__(self, config: TrainConfig, ranks: Ranks, tell_event: Callable[[EventRow], None]) -> None:
        self._config, self._ranks, self._tell_event = config, ranks, tell_event
        self._travelling: deque[tuple[int, torch.Tensor, DeviceEvent]] = deque()
        self._samples: dict[int, npt.NDArray[np.int64]] = {}
        self.health = HealthMonitor(config.health, config.max_grad_norm)
        self.skipped_steps = 0

    def add(self, step: int, result: StepResult, samples: npt.NDArray[np.int64]) -> None:
        """Begin to fetch the numbers of a step that was handed to the device.

        ``samples`` are the numbers in the dataset of this rank's part of it.
        """
        fixed = torch.stack([result.loss.double(), result.grad_norm.double(), result.applied.double()])
        numbers = to_host(torch.cat([fixed, result.told]))
        self._travelling.append((step, numbers, mark(self._ranks.device)))
        self._samples[step] = samples

    def look(self, *, all_of_them: bool = False) -> Verdict:
        """Judge the steps whose numbers have arrived; with ``all_of_them`` it waits for the last."""
        found: list[tuple[int, Diagnosis]] = []
        stop_reason: str | None = None
        save_asked_at: int | None = None
        left = 0 if all_of_them else _STEPS_BEHIND[self._ranks.device.type]
        while len(self._travelling) > left:
            step, numbers, copied = self._travelling.popleft()
            copied.wait()
            loss, grad_norm, applied, *told = numbers.tolist()
            self.skipped_steps += not applied
            findings = self.health.look(StepMetrics(step=step, loss=loss, grad_norm=grad_norm, applied=bool(applied)))
            own = self._samples.pop(step)
            # All ranks find the same at the same step, so all of them come here.
            samples = sorted(np.concatenate(self._ranks.all_gather_object(own)).tolist()) if findings else []
            for one in findings:
                self._tell_event(one.event(step, samples))
            found += [(step, one) for one in findings]
            reason, save_is_due = agreed(told)
            stop_reason, save_asked_at = stop_reason or reason, step if save_is_due else save_asked_at
        order = list(Action)
        at_step, worst = max(found, key=lambda one: order.index(one[1].action), default=(0, None))
        return Verdict(worst=worst, at_step=at_step, stop_reason=stop_reason, save_asked_at=save_asked_at)

    def go_on(self, saved: Mapping[str, Any], skipped_steps: int) -> None:
        """Take up what a checkpoint remembers."""
        self.health = HealthMonitor(self._config.health, self._config.max_grad_norm, saved)
        self.skipped_steps = skipped_steps

    def roll_back(self, saved: Mapping[str, Any], *, at_step: int, to_step: int) -> None:
        """Forget the steps that are undone."""
        self._travelling.clear()
        self._samples.clear()
        self.health.roll_back(saved, at_step=at_step, to_step=to_step)
