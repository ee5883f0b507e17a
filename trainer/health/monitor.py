"""Detection of unusual losses and gradient norms, and the action to take.

Pure, no torch here. A loss or norm is compared with the median of the previous ones, in
units of a robust standard deviation.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.formats.train_config import HealthSettings
from trainer.health.findings import Action, Finding, Kind
from trainer.health.metric_history import MetricHistory
from trainer.health.plateau import PlateauDetector
from trainer.health.recovery import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits above which the device skips an update.

    A limit is infinite if it is not known yet, or if its policy is ``warn``.
    """

    loss: float = math.inf
    """Limit of the loss, in nats."""
    grad_norm: float = math.inf
    """Limit of the gradient norm before clipping."""


NO_LIMITS = Limits()
"""Limits under which every finite loss and gradient norm is applied."""


class HealthMonitor:
    """Monitor that checks every step once, in order, and reports unusual ones."""

    def __init__(
        self,
        settings: HealthSettings,
        max_grad_norm: float,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Start from a saved state.

        Args:
            settings: Settings of the health checks.
            max_grad_norm: Norm to which gradients are clipped.
            saved: State as ``to_json`` returned it. Values that it lacks, as older
                checkpoints do, are those of a new run; None is a new run.
        """
        self._settings = settings
        self._max_grad_norm = max_grad_norm
        saved = saved or {}
        self.recovery = Recovery(saved.get("recovery", {}))
        """Rollbacks of the run."""
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
            min_limit=0.0,
            saved=saved.get("loss", {}),
        )
        self._grad_norm = MetricHistory(
            settings,
            key="grad_norm",
            name="gradient norm",
            kind=Kind.EXPLOSION,
            policy=settings.on_explosion,
            min_limit=settings.explosion_ratio * self._max_grad_norm,
            saved=saved.get("grad_norm", {}),
        )
        self._metrics = (self._loss, self._grad_norm)
        self._plateau_detector = PlateauDetector(
            saved.get("plateau", {}), window_steps=settings.plateau_window_steps
        )
        self._last_step_was_usual: bool = saved.get("usual", True)
        """True if both numbers of the last step were finite and within their limits,
        those of the device too."""
        self._skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)
        """Consecutive steps, up to the last one, that ``skip`` policies skipped."""

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
        values = {self._loss.key: loss, self._grad_norm.key: grad_norm}
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
            findings += self._plateau_detector.check(step, loss)
        return findings

    @property
    def is_rollback_target(self) -> bool:
        """True if a rollback may return to a checkpoint saved now."""
        in_excursion = self._loss.in_excursion or self._grad_norm.in_excursion
        skips_steps = self._skipped_in_a_row > 0
        return self._last_step_was_usual and not in_excursion and not skips_steps

    def learning_rate_share(self, step: int) -> float:
        """Return the factor on the learning rate of the next step, counted from 0.

        See ``Recovery.learning_rate_share``.
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
            "plateau": self._plateau_detector.to_json(),
            "usual": self._last_step_was_usual,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recovery": self.recovery.to_json(),
        }

    def _not_finite(self, step: int, values: dict[str, float]) -> Finding:
        """Return the finding on values of a step that are not finite."""
        self._last_step_was_usual = False
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
        unusual = [
            metric for metric in self._metrics if values[metric.key] > metric.limit
        ]
        blamed: MetricHistory | None = None
        if not applied and not any(metric.guarded for metric in unusual):
            blamed = self._blame_older_limit(values)
        self._last_step_was_usual = not unusual and blamed is None
        findings: list[Finding] = []
        for metric in self._metrics:
            value = values[metric.key]
            is_blamed = metric is blamed
            action = Action.SKIP if is_blamed else metric.judge(value, applied=applied)
            if action is not None:
                limit = metric.limit_text()
                if is_blamed:
                    limit = "the limit of an earlier step"
                findings.append(
                    self._limit_exceeded(
                        step, metric, action, values, limit=limit, applied=applied
                    )
                )
            is_usual = metric not in unusual and not is_blamed
            # With the policy ``warn``, a lasting change becomes usual.
            if is_usual or not metric.guarded:
                metric.add(value)
        return findings

    def _limit_exceeded(
        self,
        step: int,
        metric: MetricHistory,
        action: Action,
        values: dict[str, float],
        *,
        limit: str,
        applied: bool,
    ) -> Finding:
        """Return the finding on a step in which a metric exceeded a limit.

        ``limit`` describes the limit in the message.
        """
        update = "applied" if applied else "skipped"
        limit_values = metric.limit_values()
        if metric is self._grad_norm:
            limit_values["clip"] = self._max_grad_norm
        return Finding(
            kind=metric.kind,
            action=action,
            message=(
                f"the {metric.name} of step {step} is {values[metric.key]:.4g}, above"
                f" {limit}; the update was {update}"
            ),
            values=values | limit_values,
        )

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
