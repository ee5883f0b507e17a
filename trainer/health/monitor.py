"""Detection of unusual losses and gradient norms, and the action to take.

Pure, no torch here. A loss or norm is compared with the median of the previous ones, in
units of a robust standard deviation.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.train_config import HealthSettings
from trainer.health.events import Action, Finding, Kind
from trainer.health.metric_history import MetricHistory
from trainer.health.plateau import Plateau
from trainer.health.recovery import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits above which the device skips an update.

    Infinite if not known yet, or if nothing is to be skipped.
    """

    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = Limits()


class HealthMonitor:
    """Monitor that checks every step once, in order, and reports unusual ones."""

    def __init__(
        self,
        settings: HealthSettings,
        max_grad_norm: float,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Start from a saved state.

        Fields that it lacks get their defaults, so that older checkpoints can be read.
        """
        self._settings = settings
        self._max_grad_norm = max_grad_norm
        saved = saved or {}
        self.recovery = _restored(Recovery, saved.get("recovery", {}))
        self._restore_history(saved)

    def _restore_history(self, saved: Mapping[str, Any]) -> None:
        """Restore the history of usual values, or start it empty if none is saved."""
        settings = self._settings
        self._loss = MetricHistory(
            settings,
            key="loss",
            name="loss",
            kind=Kind.SPIKE,
            policy=settings.on_spike,
            floor=0.0,
            saved=saved.get("loss", {}),
        )
        self._grad_norm = MetricHistory(
            settings,
            key="grad_norm",
            name="gradient norm",
            kind=Kind.EXPLOSION,
            policy=settings.on_explosion,
            floor=settings.explosion_ratio * self._max_grad_norm,
            saved=saved.get("grad_norm", {}),
        )
        self._metrics = (self._loss, self._grad_norm)
        self._plateau = _restored(
            Plateau,
            saved.get("plateau", {}),
            window_steps=settings.plateau_window_steps,
        )
        # True if nothing about the last step was unusual.
        self._usual: bool = saved.get("usual", True)
        self._skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)

    def limits(self) -> Limits:
        """Return the limits above which the device skips the coming updates."""
        return Limits(
            loss=self._loss.device_limit, grad_norm=self._grad_norm.device_limit
        )

    def check(
        self, step: int, *, loss: float, grad_norm: float, applied: bool
    ) -> list[Finding]:
        """Return the findings of a step.

        Call it exactly once for each step, in order.

        Args:
            step: Number of the step, counted from 1.
            loss: Mean over all ranks, in nats.
            grad_norm: Norm of the gradient before clipping.
            applied: Whether the device has applied the update, which it does unless a
                value is not finite or exceeds the limits.
        """
        self.recovery.forget_old_rollbacks(self._settings, step)
        values = {"loss": loss, "grad_norm": grad_norm}
        if math.isfinite(loss) and math.isfinite(grad_norm):
            findings = self._check_finite(step, values, applied=applied)
        else:
            findings = [self._not_finite(step, values)]
        if any(finding.action is Action.SKIP for finding in findings):
            self._skipped_in_a_row += 1
        else:
            self._skipped_in_a_row = 0
        findings = [self._escalated(finding) for finding in findings]
        if applied and math.isfinite(loss):
            findings += self._plateau.check(step, loss)
        return findings

    @property
    def calm(self) -> bool:
        """True if a rollback may return to a checkpoint saved now."""
        in_excursion = self._loss.excursion or self._grad_norm.excursion
        return self._usual and not in_excursion and self._skipped_in_a_row == 0

    def learning_rate_share(self, step: int) -> float:
        """Return the factor on the learning rate of the next step, counted from 0.

        Below 1 after a rollback.
        """
        return self.recovery.learning_rate_share(self._settings, step)

    def roll_back(
        self, saved: Mapping[str, Any], *, at_step: int, to_step: int
    ) -> None:
        """Return to the history at ``to_step`` after trouble at ``at_step``.

        The learning rate is eased from there. The count of rollbacks is not part of
        that history.
        """
        self._restore_history(saved)
        self._skipped_in_a_row = 0
        self.recovery.count_rollback(self._settings, at_step=at_step, to_step=to_step)

    def reset_rollback_count(self) -> None:
        """Reset the count of rollbacks.

        Call it if settings were changed since the run gave up.
        """
        self.recovery.reset_count()

    def to_json(self) -> dict[str, Any]:
        """Return the whole state as JSON values; none of them is infinite."""
        return {
            "loss": self._loss.to_json(),
            "grad_norm": self._grad_norm.to_json(),
            "plateau": dataclasses.asdict(self._plateau),
            "usual": self._usual,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recovery": dataclasses.asdict(self.recovery),
        }

    def _not_finite(self, step: int, values: dict[str, float]) -> Finding:
        """Return the finding on values of a step that are not finite."""
        self._usual = False
        broken = [
            f"{metric.name} is {values[metric.key]}"
            for metric in self._metrics
            if not math.isfinite(values[metric.key])
        ]
        return Finding(
            kind=Kind.NON_FINITE,
            action=Action(self._settings.on_non_finite),
            message=f"{' and '.join(broken)} in step {step}; the update was skipped",
            values=values,
        )

    def _check_finite(
        self, step: int, values: dict[str, float], *, applied: bool
    ) -> list[Finding]:
        """Return the findings on finite values of a step, and add usual ones."""
        above = [
            metric for metric in self._metrics if values[metric.key] > metric.limit
        ]
        blamed = None
        if not applied and not any(metric.guarded for metric in above):
            blamed = self._blame_older_limit(values)
        self._usual = not above and blamed is None
        update = "applied" if applied else "skipped"
        findings = []
        for metric in self._metrics:
            value = values[metric.key]
            is_blamed = metric is blamed
            action = Action.SKIP if is_blamed else metric.judge(value, applied=applied)
            if action is not None:
                limit = metric.limit_text()
                if is_blamed:
                    limit = "the limit of an earlier step"
                message = (
                    f"the {metric.name} of step {step} is {value:.4g}, above {limit};"
                    f" the update was {update}"
                )
                findings.append(
                    Finding(
                        kind=metric.kind,
                        action=action,
                        message=message,
                        values=values | self._limit_values(metric),
                    )
                )
            is_usual = metric not in above and not is_blamed
            # With the policy ``warn``, a lasting change becomes usual.
            if is_usual or not metric.guarded:
                metric.add(value)
        return findings

    def _blame_older_limit(self, values: dict[str, float]) -> MetricHistory | None:
        """Return the metric that made the device skip a step of usual values.

        The limits of the device are some steps old. The metric that is nearest to its
        present limit is blamed, of those that the device checks.
        """
        guarded = [metric for metric in self._metrics if metric.guarded]
        if not guarded:
            return None
        return max(
            guarded, key=lambda metric: metric.share_of_limit(values[metric.key])
        )

    def _limit_values(self, metric: MetricHistory) -> dict[str, float]:
        """Return the numbers behind the limit of a metric."""
        limit_values = metric.limit_values()
        if metric is self._grad_norm:
            limit_values["clip"] = self._max_grad_norm
        return limit_values

    def _escalated(self, finding: Finding) -> Finding:
        """Return a finding with a stronger action if the milder one did not help."""
        skipped = self._skipped_in_a_row
        action = finding.action
        message = finding.message
        if action is Action.SKIP and skipped >= self._settings.patience_steps:
            action = Action.ROLL_BACK
            message += f", as {skipped} in a row were"
        if action is not Action.ROLL_BACK:
            return finding
        earlier_rollbacks = self.recovery.without_progress
        max_rollbacks = self._settings.max_rollbacks
        if earlier_rollbacks < max_rollbacks:
            message += "; training rolls back"
            return dataclasses.replace(finding, action=action, message=message)
        if earlier_rollbacks:
            message += f"; {earlier_rollbacks} earlier rollbacks did not help"
        message += (
            f"; training gives up, at train.health.max_rollbacks = {max_rollbacks}"
        )
        return dataclasses.replace(finding, action=Action.GIVE_UP, message=message)


StateT = TypeVar("StateT", Recovery, Plateau)


def _restored(kind: type[StateT], saved: Mapping[str, Any], **settings: Any) -> StateT:
    """Return a saved state under the given settings.

    Fields that are not saved get their defaults.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in saved.items() if name in known}
    return kind(**values | settings)
