"""Losses that are made bad on purpose, and settings with which a spike is noticed."""

from collections.abc import Collection

import pytest

from trainer.data.position import Position
from trainer.distributed.step import TrainStep
from trainer.formats.train_config import HealthSettings
from trainer.model.masked_lm import MaskedLM

EASING_STEPS = 10
"""Steps after a rollback until the learning rate is that of the schedule again."""


def health_of(**changes) -> HealthSettings:
    """Return settings with which a spike is noticed after 16 steps."""
    return HealthSettings(window_steps=16, easing_steps=EASING_STEPS, **changes)


class BadSteps:
    """Multiplies the losses of some tries of a step, and notes all tries.

    Tries are counted from 1. A step that is taken again after a rollback is another
    try, so the numbers of tries are those of steps only until the first rollback.

    Args:
        monkeypatch: Its end undoes the change of losses.
        bad_tries: Tries whose losses are multiplied.
        factor: Factor of these losses.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        bad_tries: Collection[int],
        factor: float = 100.0,
    ) -> None:
        self.tries = 0
        """Number of tries so far."""
        self.positions_after: list[Position] = []
        """Position in the data after each try."""
        self.learning_rates: list[float] = []
        """Learning rate of each try."""
        run = TrainStep.run
        forward = MaskedLM.forward

        def note_try_and_run(step, batches, lr, **options):
            self.tries += 1
            self.positions_after.append(batches[-1].after)
            self.learning_rates.append(lr)
            return run(step, batches, lr, **options)

        def multiply_loss(module, batch):
            loss = forward(module, batch)
            return loss * factor if self.tries in bad_tries else loss

        monkeypatch.setattr(TrainStep, "run", note_try_and_run)
        monkeypatch.setattr(MaskedLM, "forward", multiply_loss)
