"""Rollbacks of a run, and the lower learning rate after them. Pure, no torch here."""

from dataclasses import dataclass

from trainer.config.train_config import HealthSettings


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Counter of rollbacks, and schedule of the learning rate after the last one.

    The names of the fields are keys of checkpoints.
    """

    rollbacks: int = 0
    """Rollbacks of the whole run. Never reset, as checkpoints are named by it."""
    without_progress: int = 0
    """Rollbacks since training was last well past the trouble."""
    furthest_trouble_step: int | None = None
    """Latest step, counted from 1, that led to a rollback; None before the first
    rollback, and after the count was reset."""
    eased_from_step: int | None = None
    """Step from which the learning rate is lower, counted from 0; None if it never
    was."""
    eased_share: float = 1.0
    """Factor on the learning rate at that step."""

    def count_rollback(
        self, settings: HealthSettings, *, at_step: int, to_step: int
    ) -> None:
        """Count a rollback, and ease the learning rate from ``to_step`` on."""
        self.rollbacks += 1
        self.without_progress += 1
        self.furthest_trouble_step = max(self.furthest_trouble_step or 0, at_step)
        self.eased_from_step = to_step
        self.eased_share = settings.eased_learning_rate_share**self.without_progress

    def forget_old_rollbacks(self, settings: HealthSettings, step: int) -> None:
        """Reset the count of rollbacks once training is well past the last trouble."""
        furthest = self.furthest_trouble_step
        if furthest is not None and step > furthest + settings.easing_steps:
            self.without_progress = 0

    def reset_count(self) -> None:
        """Reset the count of rollbacks without progress."""
        self.without_progress = 0
        self.furthest_trouble_step = None

    def learning_rate_share(self, settings: HealthSettings, step: int) -> float:
        """Return the factor on the learning rate of the next step, counted from 0.

        After a rollback it rises linearly, from below 1 to 1.
        """
        if self.eased_from_step is None or step < self.eased_from_step:
            return 1.0
        progress = min(1.0, (step - self.eased_from_step) / settings.easing_steps)
        return self.eased_share + (1 - self.eased_share) * progress
