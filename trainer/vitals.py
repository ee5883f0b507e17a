"""Loss, norm and what ranks told each other, of every step, on their way from the device to the host.

All ranks read the same numbers of the same step at the same place of their loop, so they decide alike, and need no
further messages to agree.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer.health import Vitals
from trainer.step import StepResult
from trainer.stopwatch import Mark, mark, to_host

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
    """Steps whose numbers have not been read.

    Args:
        device: Where steps are computed.
    """

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
