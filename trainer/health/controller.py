"""Health checks of every step after its numbers have reached the host, and agreement of all ranks on stops and saves.

All ranks read the same numbers of the same step at the same point of their loop, so
they decide alike. Their requests are summed in the same all-reduce as the number of
tokens, which every step needs anyway.
"""

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.distributed.ranks import DeviceEvent, Ranks, mark, to_host
from trainer.distributed.step import StepResult
from trainer.health.events import Action, Diagnosis, EventRow
from trainer.health.monitor import HealthMonitor
from trainer.health.watchdog import SIGNALS


def encode_requests(
    *, rank: int, signal_number: int | None, time_is_over: bool, save_is_due: bool
) -> list[float]:
    """Return a rank's requests as numbers to be summed over ranks."""
    signalled = signal_number is not None
    return [
        float(signalled),
        float(signalled and rank),
        float(signal_number or 0),
        time_is_over,
        save_is_due,
    ]


def decode_requests(told: Sequence[float]) -> tuple[str | None, bool]:
    """Decode the sums over all ranks of ``encode_requests``: return the reason to save and exit, if any, and whether to save."""
    count, ranks, numbers, time_is_over, save_is_due = (round(one) for one in told)
    reason = (
        "the time limit (train.stop_after_s, or the SLURM job's) is near"
        if time_is_over
        else None
    )
    if count:
        number, rest = divmod(numbers, count)
        name = (
            signal.Signals(number).name if not rest and number in SIGNALS else "signals"
        )
        reason = f"{name} on rank {ranks}" if count == 1 else f"{name} on {count} ranks"
    return reason, bool(save_is_due)


_STEPS_BEHIND = {"cpu": 0, "cuda": 2}
"""Number of steps before a step's numbers are read, so that a GPU has work while they
are copied to the host."""
_MICRO_BATCHES_READ_TOGETHER = {"cpu": 1, "cuda": 8}
"""Micro-batches whose steps are read at once, so that the host waits rarely but still
reacts within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthDecision:
    """Decision after a step; the same on every rank."""

    worst: Diagnosis | None
    """Finding with the strongest action, if any."""
    at_step: int
    """Step of that finding, counted from 1."""
    stop_reason: str | None
    """Reason to save and exit, if any."""
    save_requested_at: int | None
    """Step at which the clock of rank 0 requested a save, if any."""

    @property
    def trouble(self) -> Diagnosis | None:
        """Finding that requires a rollback or giving up, if any."""
        asks = self.worst is not None and self.worst.action in (
            Action.ROLL_BACK,
            Action.GIVE_UP,
        )
        return self.worst if asks else None


class HealthController:
    """Controller of a run's health; every rank must call it at the same steps."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        report_event: Callable[[EventRow], None],
    ) -> None:
        self._config, self._ranks, self._tell_event = config, ranks, report_event
        self._in_flight: deque[tuple[int, torch.Tensor, DeviceEvent]] = deque()
        self._samples: dict[int, npt.NDArray[np.int64]] = {}
        self.health = HealthMonitor(config.health, config.max_grad_norm)
        self.skipped_steps = 0
        in_step = gradient_accumulation_steps(config, ranks.world_size)
        self._together = max(
            1, _MICRO_BATCHES_READ_TOGETHER[ranks.device.type] // in_step
        )

    def add(
        self, step: int, result: StepResult, samples: npt.NDArray[np.int64]
    ) -> None:
        """Start to copy a submitted step's numbers to the host.

        ``samples`` are indices of this rank's samples.
        """
        fixed = (
            one.reshape(1) for one in (result.loss, result.grad_norm, result.applied)
        )
        numbers = to_host(torch.cat([*fixed, result.sums]))  # in fp64, as the sums
        self._in_flight.append((step, numbers, mark(self._ranks.device)))
        self._samples[step] = samples

    def check(self, *, wait_for_all: bool = False) -> HealthDecision:
        """Check the steps whose numbers have arrived and return the verdict.

        ``wait_for_all`` waits for all steps.
        """
        found: list[tuple[int, Diagnosis]] = []
        stop_reason: str | None = None
        save_requested_at: int | None = None
        left = 0 if wait_for_all else _STEPS_BEHIND[self._ranks.device.type]
        ready = len(self._in_flight) - left
        ready = 0 if ready < self._together and not wait_for_all else ready
        if ready > 0:
            self._in_flight[ready - 1][2].wait()
        for _ in range(ready):
            step, numbers, _copied = self._in_flight.popleft()
            loss, grad_norm, applied, *told = numbers.tolist()
            self.skipped_steps += not applied
            findings = self.health.check(
                step, loss=loss, grad_norm=grad_norm, applied=bool(applied)
            )
            own = self._samples.pop(step)
            # All ranks reach the same decision at the same step, so all of them come
            # here.
            samples = (
                sorted(np.concatenate(self._ranks.all_gather_object(own)).tolist())
                if findings
                else []
            )
            for one in findings:
                self._tell_event(one.event(step, samples))
            found += [(step, one) for one in findings]
            reason, save_is_due = decode_requests(told)
            stop_reason, save_requested_at = (
                stop_reason or reason,
                step if save_is_due else save_requested_at,
            )
        at_step, worst = max(
            found, key=lambda one: list(Action).index(one[1].action), default=(0, None)
        )
        return HealthDecision(
            worst=worst,
            at_step=at_step,
            stop_reason=stop_reason,
            save_requested_at=save_requested_at,
        )

    def restore(self, saved: Mapping[str, Any], skipped_steps: int) -> None:
        """Restore the state from a checkpoint."""
        self.health = HealthMonitor(
            self._config.health, self._config.max_grad_norm, saved
        )
        self.skipped_steps = skipped_steps

    def roll_back(
        self, saved: Mapping[str, Any], *, at_step: int, to_step: int
    ) -> None:
        """Discard pending steps and restore the history of a checkpoint.

        See ``HealthMonitor.roll_back``.
        """
        self._in_flight.clear()
        self._samples.clear()
        self.health.roll_back(saved, at_step=at_step, to_step=to_step)
