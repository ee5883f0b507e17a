"""Rollbacks of a run, and the lower learning rate after them. Pure, no torch here."""

from collections.abc import Mapping
from typing import Any

from trainer.formats.train_config import HealthSettings


class Recovery:
    """Counter of rollbacks, and schedule of the learning rate after the last one."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        """Start from a saved state, which may be empty.

        Args:
            saved: State as ``to_json`` returned it. Values that it lacks are those of
                a new run.
        """
        self.rollbacks: int = saved.get("rollbacks", 0)
        """Rollbacks of the whole run. Never reset, as checkpoints are named by it."""
        self.without_progress: int = saved.get("without_progress", 0)
        """Rollbacks since training was last well past the trouble."""
        self._furthest_trouble_step: int | None = saved.get("furthest_trouble_step")
        """Latest step, counted from 1, that led to a rollback; None before the first
        rollback, and after the count was reset."""
        self._eased_from_step: int | None = saved.get("eased_from_step")
        """Step from which the learning rate is lower, counted from 0; None before the
        first rollback."""
        self._eased_share: float = saved.get("eased_share", 1.0)
        """Factor on the learning rate at that step."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values, under the keys of checkpoints."""
        return {
            "rollbacks": self.rollbacks,
            "without_progress": self.without_progress,
            "furthest_trouble_step": self._furthest_trouble_step,
            "eased_from_step": self._eased_from_step,
            "eased_share": self._eased_share,
        }

    def count_rollback(
        self, settings: HealthSettings, *, at_step: int, to_step: int
    ) -> None:
        """Count a rollback, and ease the learning rate from ``to_step`` on.

        Args:
            settings: Settings of the learning rate after a rollback.
            at_step: Step, counted from 1, that led to the rollback.
            to_step: Number of steps finished at the checkpoint.
        """
        self.rollbacks += 1
        self.without_progress += 1
        furthest = self._furthest_trouble_step
        if furthest is None or at_step > furthest:
            self._furthest_trouble_step = at_step
        self._eased_from_step = to_step
        self._eased_share = settings.eased_learning_rate_share**self.without_progress

    def forget_old_rollbacks(self, settings: HealthSettings, step: int) -> None:
        """Reset the count of rollbacks once training is well past the last trouble."""
        furthest = self._furthest_trouble_step
        if furthest is not None and step > furthest + settings.easing_steps:
            self.without_progress = 0

    def reset_count(self) -> None:
        """Reset the count of rollbacks without progress."""
        self.without_progress = 0
        self._furthest_trouble_step = None

    def learning_rate_share(self, settings: HealthSettings, step: int) -> float:
        """Return the factor on the learning rate of the next step, counted from 0.

        After a rollback it rises linearly, from below 1 to 1.
        """
        if self._eased_from_step is None or step < self._eased_from_step:
            return 1.0
        progress = min(1.0, (step - self._eased_from_step) / settings.easing_steps)
        return self._eased_share + (1 - self._eased_share) * progress
