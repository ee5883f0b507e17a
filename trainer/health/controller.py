"""Health checks of every step, and agreement of all ranks on stops and saves.

A step is checked once its numbers have reached the host. All ranks read the same
numbers of the same step at the same point of their loop, so they decide alike.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.distributed.step import StepResult
from trainer.formats.events import EventRow
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps
from trainer.health.findings import Action, Finding
from trainer.health.monitor import HealthMonitor
from trainer.health.requests import decode_requests
from trainer.runtime.device_events import DeviceEvent, mark, to_host
from trainer.runtime.ranks import Ranks

_STEPS_BEHIND = {"cpu": 0, "cuda": 2}
"""Number of steps before a step's numbers are read, so that a GPU has work while they
are copied to the host."""
_MICRO_BATCHES_READ_TOGETHER = {"cpu": 1, "cuda": 8}
"""Micro-batches whose steps are read at once, so that the host waits rarely but still
reacts within seconds."""
_ACTIONS_BY_STRENGTH = list(Action)
"""Actions from the mildest to the strongest, the order in which ``Action`` declares
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthDecision:
    """Decision on the steps that were checked; the same on every rank."""

    worst: Finding | None
    """Finding with the strongest action, if any."""
    at_step: int
    """Step of that finding, counted from 1; 0 without one."""
    stop_reason: str | None
    """Reason to save and exit, if any."""
    save_requested_at: int | None
    """Step at which the clock of rank 0 requested a save, if any."""

    @property
    def trouble(self) -> Finding | None:
        """Finding that requires a rollback or giving up, if any."""
        if self.worst is None:
            return None
        if self.worst.action in (Action.ROLL_BACK, Action.GIVE_UP):
            return self.worst
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepNumbers:
    """Numbers of a step on the host; fields are as in ``StepResult``."""

    loss: float
    grad_norm: float
    applied: bool
    request_sums: list[float]

    @staticmethod
    def pack(result: StepResult) -> torch.Tensor:
        """Return the numbers in the order of the fields, for one copy to the host."""
        single_numbers = [
            number.reshape(1)
            for number in (result.loss, result.grad_norm, result.applied)
        ]
        # The sums are fp64, so all numbers become fp64.
        return torch.cat([*single_numbers, result.sums])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "_StepNumbers":
        """Return the numbers that ``pack`` put into a tensor."""
        loss, grad_norm, applied, *request_sums = packed.tolist()
        return cls(
            loss=loss,
            grad_norm=grad_norm,
            applied=bool(applied),
            request_sums=request_sums,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingStep:
    """Submitted step whose numbers are on their way to the host."""

    step: int
    packed_numbers: torch.Tensor
    """Numbers as ``_StepNumbers.pack`` returns them."""
    copied: DeviceEvent
    samples: npt.NDArray[np.int64]
    """Indices of this rank's samples."""


class HealthController:
    """Controller of a run's health; every rank must call it at the same steps.

    Args:
        config: Configuration of the training.
        ranks: This process's rank.
        report_event: Callback that receives each finding as an event.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        report_event: Callable[[EventRow], None],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._report_event = report_event
        self._pending: deque[_PendingStep] = deque()
        self.monitor = HealthMonitor(config.health, config.max_grad_norm)
        """Monitor of the steps that were checked."""
        self.skipped_steps = 0
        """Steps of the whole run that were checked and whose update was skipped."""
        device_type = ranks.device.type
        micro_batches = gradient_accumulation_steps(config, ranks.world_size)
        self._steps_behind = _STEPS_BEHIND[device_type]
        self._steps_read_together = max(
            1, _MICRO_BATCHES_READ_TOGETHER[device_type] // micro_batches
        )

    def add(
        self, step: int, result: StepResult, samples: npt.NDArray[np.int64]
    ) -> None:
        """Start to copy a submitted step's numbers to the host.

        ``samples`` are indices of this rank's samples.
        """
        packed_numbers = to_host(_StepNumbers.pack(result))
        self._pending.append(
            _PendingStep(
                step=step,
                packed_numbers=packed_numbers,
                copied=mark(self._ranks.device),
                samples=samples,
            )
        )

    def check(self, *, wait_for_all: bool = False) -> HealthDecision:
        """Check the steps whose numbers have arrived and return the decision.

        ``wait_for_all`` waits for the numbers of all steps and checks them too.
        """
        worst: Finding | None = None
        at_step = 0
        stop_reason: str | None = None
        save_requested_at: int | None = None
        for pending in self._take_arrived(wait_for_all=wait_for_all):
            numbers = _StepNumbers.unpack(pending.packed_numbers)
            for finding in self._check_step(pending, numbers):
                if worst is None or _is_stronger(finding, worst):
                    worst = finding
                    at_step = pending.step
            requests = decode_requests(numbers.request_sums)
            if stop_reason is None:
                stop_reason = requests.stop_reason
            if requests.save_is_due:
                save_requested_at = pending.step
        return HealthDecision(
            worst=worst,
            at_step=at_step,
            stop_reason=stop_reason,
            save_requested_at=save_requested_at,
        )

    def _take_arrived(self, *, wait_for_all: bool) -> list[_PendingStep]:
        """Take the steps to check now, after waiting for their numbers.

        Unless ``wait_for_all``, the result is empty while too few steps are pending to
        be worth a wait.
        """
        count = len(self._pending)
        if not wait_for_all:
            count -= self._steps_behind
            if count < self._steps_read_together:
                return []
        arrived = [self._pending.popleft() for _ in range(count)]
        if arrived:
            arrived[-1].copied.wait()
        return arrived

    def _check_step(
        self, pending: _PendingStep, numbers: _StepNumbers
    ) -> list[Finding]:
        """Check a step: report its findings, and return them."""
        if not numbers.applied:
            self.skipped_steps += 1
        findings = self.monitor.check(
            pending.step,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            applied=numbers.applied,
        )
        self._report(findings, pending)
        return findings

    def _report(self, findings: Sequence[Finding], pending: _PendingStep) -> None:
        """Report findings with the samples of all ranks."""
        if not findings:
            return
        # All ranks have the same findings at the same step, so all of them gather.
        by_rank = self._ranks.all_gather_object(pending.samples)
        samples = sorted(np.concatenate(by_rank).tolist())
        for finding in findings:
            self._report_event(finding.event(pending.step, samples))

    def restore(self, saved: Mapping[str, Any], skipped_steps: int) -> None:
        """Restore the state from a checkpoint.

        Args:
            saved: State of the monitor, as ``HealthMonitor.to_json`` returned it.
            skipped_steps: Number of skipped steps in the checkpoint.
        """
        self.monitor = HealthMonitor(
            self._config.health, self._config.max_grad_norm, saved
        )
        self.skipped_steps = skipped_steps

    def roll_back(
        self, saved: Mapping[str, Any], *, at_step: int, to_step: int
    ) -> None:
        """Discard pending steps and restore the history of a checkpoint.

        See ``HealthMonitor.roll_back``.
        """
        self._pending.clear()
        self.monitor.roll_back(saved, at_step=at_step, to_step=to_step)


def _is_stronger(finding: Finding, other: Finding) -> bool:
    """Return whether a finding's action is stronger than another's."""
    strength = _ACTIONS_BY_STRENGTH.index(finding.action)
    return strength > _ACTIONS_BY_STRENGTH.index(other.action)
