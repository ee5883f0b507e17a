"""Detection of unusual losses and gradient norms, and the action to take.

Pure, no torch here. A loss or norm is compared with the median of the previous ones, in
units of a robust standard deviation.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.train_config import HealthSettings, Policy
from trainer.health.events import Action, Diagnosis, Kind
from trainer.health.plateau import Plateau
from trainer.health.robust_statistics import level_and_scatter

FLOOR_SHARE = 0.1
"""Smallest unusual excess over the median, as a share of the median: late in a run,
sigma of the loss is tiny."""
ENOUGH_VALUES = 16
"""Values required before one is judged."""
FEWEST_VALUES = 8
"""The same for the shortest windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits above which the device skips an update.

    Infinite if not known yet, or if nothing is to be skipped.
    """

    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = Limits()


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Number of rollbacks, and the current easing of the learning rate.

    The names of the fields are keys of checkpoints.
    """

    rollbacks: int = 0
    without_progress: int = 0
    """Rollbacks since training was last well past the trouble."""
    furthest_trouble_step: int | None = None
    eased_from_step: int | None = None
    eased_share: float = 1.0


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
        self._loss = _Series(
            "loss",
            Kind.SPIKE,
            settings.on_spike,
            settings,
            floor=0.0,
            saved=saved.get("loss", {}),
        )
        self._norm = _Series(
            "gradient norm",
            Kind.EXPLOSION,
            settings.on_explosion,
            settings,
            floor=settings.explosion_ratio * self._max_grad_norm,
            saved=saved.get("grad_norm", {}),
        )
        self._plateau = _restored(
            Plateau,
            saved.get("plateau", {}),
            window_steps=settings.plateau_window_steps,
        )
        self._usual: bool = saved.get("usual", True)
        self._skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)

    def limits(self) -> Limits:
        """Return the limits above which the device skips the coming updates."""
        return Limits(
            loss=self._loss.limit if self._loss.guarded else math.inf,
            grad_norm=self._norm.limit if self._norm.guarded else math.inf,
        )

    def check(
        self, step: int, *, loss: float, grad_norm: float, applied: bool
    ) -> list[Diagnosis]:
        """Return the findings of a step.

        Call it exactly once for each step, in order.

        Args:
            step: Number of the step, counted from 1.
            loss: Mean over all ranks, in nats.
            grad_norm: Norm of the gradient before clipping.
            applied: Whether the device has applied the update, which it does unless a
                value is not finite or exceeds the limits.
        """
        self._forget_old_rollbacks(step)
        values = {"loss": loss, "grad_norm": grad_norm}
        if math.isfinite(loss) and math.isfinite(grad_norm):
            findings = self._check_series(step, values, applied=applied)
        else:
            findings = [self._not_finite(step, values)]
        is_skipped = any(finding.action is Action.SKIP for finding in findings)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        findings = [self._escalated(finding) for finding in findings]
        if applied and math.isfinite(loss):
            findings += self._plateau.check(step, loss)
        return findings

    def _forget_old_rollbacks(self, step: int) -> None:
        """Reset the count of rollbacks once training is past the last trouble."""
        furthest = self.recovery.furthest_trouble_step
        if furthest is not None and step > furthest + self._settings.easing_steps:
            self.recovery.without_progress = 0

    @property
    def calm(self) -> bool:
        """True if a rollback may return to a checkpoint saved now."""
        in_excursion = self._loss.excursion or self._norm.excursion
        return self._usual and not in_excursion and self._skipped_in_a_row == 0

    def learning_rate_share(self, step: int) -> float:
        """Return the factor on the learning rate of the next step, counted from 0.

        Below 1 after a rollback.
        """
        eased_from_step = self.recovery.eased_from_step
        eased_share = self.recovery.eased_share
        if eased_from_step is None or step < eased_from_step:
            return 1.0
        progress = min(1.0, (step - eased_from_step) / self._settings.easing_steps)
        return eased_share + (1 - eased_share) * progress

    def roll_back(
        self, saved: Mapping[str, Any], *, at_step: int, to_step: int
    ) -> None:
        """Return to the history at ``to_step`` after trouble at ``at_step``.

        The learning rate is eased from there.
        """
        self._restore_history(saved)
        self._skipped_in_a_row = 0
        recovery = self.recovery
        recovery.rollbacks += 1
        recovery.without_progress += 1
        recovery.furthest_trouble_step = max(
            recovery.furthest_trouble_step or 0, at_step
        )
        recovery.eased_from_step = to_step
        recovery.eased_share = (
            self._settings.eased_learning_rate_share**recovery.without_progress
        )

    def reset_rollback_count(self) -> None:
        """Reset the count of rollbacks.

        Call it if settings were changed since the run gave up.
        """
        self.recovery.without_progress = 0
        self.recovery.furthest_trouble_step = None

    def to_json(self) -> dict[str, Any]:
        """Return the whole state as JSON values; none of them is infinite."""
        return {
            "loss": self._loss.to_json(),
            "grad_norm": self._norm.to_json(),
            "plateau": dataclasses.asdict(self._plateau),
            "usual": self._usual,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recovery": dataclasses.asdict(self.recovery),
        }

    def _not_finite(self, step: int, values: dict[str, float]) -> Diagnosis:
        """Return the finding on values of a step that are not finite."""
        self._usual = False
        names = {"loss": "loss", "grad_norm": "gradient norm"}
        broken = [
            f"{names[key]} is {value}"
            for key, value in values.items()
            if not math.isfinite(value)
        ]
        return Diagnosis(
            kind=Kind.NON_FINITE,
            action=Action(self._settings.on_non_finite),
            message=f"{' and '.join(broken)} in step {step}; the update was skipped",
            values=values,
        )

    def _check_series(
        self, step: int, values: dict[str, float], *, applied: bool
    ) -> list[Diagnosis]:
        """Return the findings on finite values of a step."""
        pairs = [(self._loss, values["loss"]), (self._norm, values["grad_norm"])]
        above = [series for series, value in pairs if value > series.limit]
        blamed: _Series | None = None
        if not applied and not any(series.guarded for series in above):
            # An older limit caused the skip: that of the series nearest to its limit.
            shares_of_limit = {
                series: series.share_of_limit(value)
                for series, value in pairs
                if series.guarded
            }
            blamed = max(shares_of_limit, key=shares_of_limit.__getitem__, default=None)
        self._usual = not above and blamed is None
        findings = []
        for series, value in pairs:
            is_blamed = series is blamed
            action = Action.SKIP if is_blamed else series.judge(value, applied=applied)
            if action is not None:
                limit = series.limit_text()
                if is_blamed:
                    limit = "the limit of an earlier step"
                update = "applied" if applied else "skipped"
                findings.append(
                    Diagnosis(
                        kind=series.kind,
                        action=action,
                        message=(
                            f"the {series.name} of step {step} is {value:.4g}, above"
                            f" {limit}; the update was {update}"
                        ),
                        values=values | self._limit_values(series),
                    )
                )
            is_usual = series not in above and not is_blamed
            if is_usual or not series.guarded:
                series.add(value)
        return findings

    def _limit_values(self, series: "_Series") -> dict[str, float]:
        """Return the numbers behind the limit of a series."""
        values = {}
        if not math.isnan(series.median):
            values["median"] = series.median
            values["limit"] = series.limit
        if series is self._norm:
            values["clip"] = self._max_grad_norm
        return values

    def _escalated(self, finding: Diagnosis) -> Diagnosis:
        """Return a finding with a stronger action if the milder one did not help."""
        action = finding.action
        message = finding.message
        if (
            action is Action.SKIP
            and self._skipped_in_a_row >= self._settings.patience_steps
        ):
            action = Action.ROLL_BACK
            message += f", as {self._skipped_in_a_row} in a row were"
        if action is not Action.ROLL_BACK:
            return finding
        earlier_rollbacks = self.recovery.without_progress
        max_rollbacks = self._settings.max_rollbacks
        if earlier_rollbacks < max_rollbacks:
            return dataclasses.replace(
                finding, action=action, message=f"{message}; training rolls back"
            )
        if earlier_rollbacks:
            message += f"; {earlier_rollbacks} earlier rollbacks did not help"
        message += (
            f"; training gives up, at train.health.max_rollbacks = {max_rollbacks}"
        )
        return dataclasses.replace(finding, action=Action.GIVE_UP, message=message)


class _Series:
    """Last values of one metric, and the limit above which a value is unusual."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        policy: Policy,
        settings: HealthSettings,
        *,
        floor: float,
        saved: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.kind = kind
        self.guarded = policy != "warn"
        """True if the device skips unusual steps, which it does unless the policy is
        ``warn``."""
        self.excursion: bool = saved.get("excursion", False)
        """True if unusual values were reported and none was usual since; only with the
        policy ``warn``."""
        self._policy = policy
        self._sigmas = settings.spike_sigmas
        self._floor = floor
        """Smallest limit."""
        self._enough_values = max(
            FEWEST_VALUES, min(ENOUGH_VALUES, settings.window_steps)
        )
        self._window: deque[float] = deque(
            saved.get("window", ()), maxlen=settings.window_steps
        )
        self._measure()

    def limit_text(self) -> str:
        """Return the limit as messages show it."""
        return (
            f"{self.limit:.4g}; the median of the last {len(self._window)} steps is"
            f" {self.median:.4g}"
        )

    def share_of_limit(self, value: float) -> float:
        """Return a value as a share of the limit; 1 if the limit is 0."""
        return value / self.limit if self.limit > 0 else 1.0

    def judge(self, value: float, *, applied: bool) -> Action | None:
        """Return the action for a value, or None if it is usual or already reported."""
        if value <= self.limit:
            self.excursion = False
            return None
        match self._policy:
            case "rollback":
                return Action.ROLL_BACK
            case "skip":
                # The device's limit is some steps old and can let through a value above
                # the current one.
                return Action.WARN if applied else Action.SKIP
            case "warn":
                was_reported = self.excursion
                self.excursion = True
                return None if was_reported else Action.WARN

    def add(self, value: float) -> None:
        """Add a value to those that are usual."""
        self._window.append(value)
        self._measure()

    def to_json(self) -> dict[str, Any]:
        return {"window": list(self._window), "excursion": self.excursion}

    def _measure(self) -> None:
        """Derive the median and the limit from the window."""
        self.median = math.nan
        self.limit = math.inf
        if len(self._window) >= self._enough_values:
            self.median, sigma = level_and_scatter(list(self._window))
            room = max(self._sigmas * sigma, FLOOR_SHARE * abs(self.median))
            self.limit = max(self.median + room, self._floor)


StateT = TypeVar("StateT", Recovery, Plateau)


def _restored(kind: type[StateT], saved: Mapping[str, Any], **settings: Any) -> StateT:
    """Return a saved state under the given settings.

    Fields that are not saved get their defaults.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in saved.items() if name in known}
    return kind(**values | settings)
