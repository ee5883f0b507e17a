"""What loss and gradient say about a run, and what is to be done. Pure, no torch here.

A loss or a norm is held against the median of those before it, in units of their robust scatter. Where values fall, as
those of a young run do, the newer half says what is usual, and they scatter around the line through the medians of both
halves.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import HealthSettings, Policy
from trainer.events import Action, Finding, Kind, finding
from trainer.plateau import Plateau, level_and_scatter

FLOOR_SHARE = 0.1
"""Of the median: less above it is never unusual. Late in a run the loss hardly scatters, and sigmas mean nothing."""
ENOUGH_VALUES, FEWEST_VALUES = 16, 8
"""Values that must be there before one is judged; the lower number is that of the shortest windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a step says about the run."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over all ranks, in nats."""
    grad_norm: float
    """Before clipping."""
    applied: bool
    """Whether the device took the update: a step that was not finite or above the limits it left out already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Above these the device leaves an update out; infinite where nothing is known yet, or nothing is to be skipped."""

    loss: float
    grad_norm: float


NO_LIMITS = Limits(loss=math.inf, grad_norm=math.inf)


class HealthMonitor:
    """Looks at every step once, in order, and says what is unusual."""

    def __init__(self, settings: HealthSettings, max_grad_norm: float) -> None:
        self._settings = settings
        self._clip = max_grad_norm
        self._recovery = _Recovery(settings, {})
        self._look_back({})

    def _look_back(self, saved: Mapping[str, Any]) -> None:
        """Take over all that says what is usual, or start it afresh where nothing is saved."""
        settings = self._settings
        self._loss = _Series(Kind.SPIKE, settings.on_spike, settings, 0.0, saved.get("loss", {}))
        floor = settings.explosion_ratio * self._clip
        self._norm = _Series(Kind.EXPLOSION, settings.on_explosion, settings, floor, saved.get("grad_norm", {}))
        self._plateau = Plateau(settings.plateau_window_steps, saved.get("plateau", {}))
        self._usual: bool = saved.get("usual", True)
        self._skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)

    def limits(self) -> Limits:
        """What the device is to leave out in the steps that come."""
        return Limits(
            loss=self._loss.limit if self._loss.guarded else math.inf,
            grad_norm=self._norm.limit if self._norm.guarded else math.inf,
        )

    def look(self, vitals: Vitals) -> list[Finding]:
        """What a step shows; each step is shown exactly once, in order."""
        self._recovery.reach(vitals.step)
        if math.isfinite(vitals.loss) and math.isfinite(vitals.grad_norm):
            found = self._unusual(vitals)
        else:
            found = [self._non_finite(vitals)]
        skipped = any(one.action is Action.SKIP for one in found)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        found = [self._escalated(one) for one in found]
        if vitals.applied and math.isfinite(vitals.loss):
            found += self._plateau.look(vitals.step, vitals.loss)
        return found

    @property
    def calm(self) -> bool:
        """Whether a checkpoint saved now is a good one to return to."""
        is_open = self._loss.excursion or self._norm.excursion
        return self._usual and not is_open and self._skipped_in_a_row == 0

    @property
    def rollbacks(self) -> int:
        """All so far in this run, with progress or without."""
        return self._recovery.rollbacks

    def learning_rate_share(self, step: int) -> float:
        """What is left of the learning rate in the step, counted from 0, that is about to be taken."""
        return self._recovery.learning_rate_share(step)

    def roll_back(self, saved: Mapping[str, Any], *, at_step: int, to_step: int) -> None:
        """Look back as at the checkpoint; what counts rollbacks and eases the learning rate goes on.

        ``at_step``, counted from 1, is where the trouble was; ``to_step`` the steps finished at the checkpoint.
        """
        self._look_back(saved)
        self._skipped_in_a_row = 0
        self._recovery.roll_back(at_step=at_step, to_step=to_step)

    def forgive(self) -> None:
        """Let rollbacks count afresh, as settings were changed since the run gave up."""
        self._recovery.forgive()

    def to_json(self) -> dict[str, Any]:
        """The whole state, as JSON can write it: nothing in it is infinite."""
        return {
            "loss": self._loss.to_json(),
            "grad_norm": self._norm.to_json(),
            "plateau": self._plateau.to_json(),
            "usual": self._usual,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recovery": self._recovery.to_json(),
        }

    @classmethod
    def from_json(cls, settings: HealthSettings, max_grad_norm: float, saved: Mapping[str, Any]) -> "HealthMonitor":
        """Go on from a saved state; what it lacks starts afresh, so that older checkpoints can be read."""
        monitor = cls(settings, max_grad_norm)
        monitor._look_back(saved)
        monitor._recovery = _Recovery(settings, saved.get("recovery", {}))
        return monitor

    def _non_finite(self, vitals: Vitals) -> Finding:
        self._usual = False
        figures = {"loss": vitals.loss, "grad_norm": vitals.grad_norm}
        names = {"loss": "the loss", "grad_norm": "the gradient's norm"}
        broken = [f"{names[key]} is {value}" for key, value in figures.items() if not math.isfinite(value)]
        message = f"{' and '.join(broken)} in step {vitals.step}; the update was left out"
        return finding(Kind.NON_FINITE, Action(self._settings.on_non_finite), message, figures)

    def _unusual(self, vitals: Vitals) -> list[Finding]:
        pairs = ((self._loss, vitals.loss), (self._norm, vitals.grad_norm))
        above = [series for series, value in pairs if value > series.limit]
        blamed = None if vitals.applied else self._blamed(vitals, above)
        self._usual = not above and blamed is None
        found: list[Finding] = []
        for series, value in pairs:
            action = Action.SKIP if series is blamed else series.judge(value, applied=vitals.applied)
            if action is not None:
                found.append(self._described(series, action, vitals, lagging=series is blamed))
            if not series.guarded or (series not in above and series is not blamed):
                series.add(value)
        return found

    def _blamed(self, vitals: Vitals, above: Sequence["_Series"]) -> "_Series | None":
        """Whose limit left the update out, where none of those that can is exceeded.

        The device works with limits from some steps before. The one that is nearest to being exceeded was, then.
        """
        guarded = [series for series in (self._loss, self._norm) if series.guarded]
        if any(series in above for series in guarded):
            return None
        values = {Kind.SPIKE: vitals.loss, Kind.EXPLOSION: vitals.grad_norm}
        return max(guarded, key=lambda series: series.closeness(values[series.kind]), default=None)

    def _described(self, series: "_Series", action: Action, vitals: Vitals, *, lagging: bool) -> Finding:
        is_loss = series.kind is Kind.SPIKE
        name, value = ("loss", vitals.loss) if is_loss else ("gradient's norm", vitals.grad_norm)
        message = f"the {name} of step {vitals.step} is {value:.4g}"
        if lagging:
            message += ", which a limit of some steps before forbade"
        else:
            message += f", above {series.limit:.4g}; the median of the last {len(series)} is {series.median:.4g}"
        message += "; the update was taken" if vitals.applied else "; the update was left out"
        values = {"loss": vitals.loss, "grad_norm": vitals.grad_norm, **series.bounds()}
        return finding(series.kind, action, message, values if is_loss else {**values, "clip": self._clip})

    def _escalated(self, one: Finding) -> Finding:
        """A finding with the action that remains when skipping, or rolling back, did not help."""
        action, message = one.action, one.message
        if action is Action.SKIP and self._skipped_in_a_row >= self._settings.patience_steps:
            action = Action.ROLL_BACK
            message += f"; {self._skipped_in_a_row} in a row were"
        if action is not Action.ROLL_BACK:
            return one
        if self._recovery.is_exhausted:
            action = Action.GIVE_UP
            before = self._recovery.without_progress
            message += f"; {before} rollbacks before it did not help" if before else ""
            message += (
                f", and train.health.max_rollbacks = {self._settings.max_rollbacks} allows no more: training gives up"
            )
        else:
            message += "; training rolls back"
        return dataclasses.replace(one, action=action, message=message)


class _Series:
    """The last values of one figure, and what is unusual beside them."""

    def __init__(
        self, kind: Kind, policy: Policy, settings: HealthSettings, floor: float, saved: Mapping[str, Any]
    ) -> None:
        self.kind = kind
        self.guarded = policy != "warn"
        """Whether the device is to leave out what is unusual."""
        self.excursion: bool = saved.get("excursion", False)
        """Whether it was said that values are unusual, and none was usual since; only where that is all that is done.
        """
        self._policy = policy
        self._sigmas = settings.spike_sigmas
        self._floor = floor
        self._enough = max(FEWEST_VALUES, min(ENOUGH_VALUES, settings.window_steps))
        self._window: deque[float] = deque(saved.get("window", ()), maxlen=settings.window_steps)
        self._measure()

    def __len__(self) -> int:
        return len(self._window)

    def judge(self, value: float, *, applied: bool) -> Action | None:
        """What is to be done about a value, or None."""
        if value <= self.limit:
            self.excursion = False
            return None
        match self._policy:
            case "rollback":
                return Action.ROLL_BACK
            case "skip":
                # The device's limit is some steps old and can let through what is forbidden now.
                return Action.WARN if applied else Action.SKIP
            case "warn":
                is_known, self.excursion = self.excursion, True
                return None if is_known else Action.WARN

    def add(self, value: float) -> None:
        """Let a value say what is usual."""
        self._window.append(value)
        self._measure()

    def closeness(self, value: float) -> float:
        """How near a value is to the limit: 1 when it is there."""
        return value / self.limit if self.limit > 0 else 1.0

    def bounds(self) -> dict[str, float]:
        """Median and limit, where there are any."""
        return {"median": self.median, "limit": self.limit} if len(self._window) >= self._enough else {}

    def to_json(self) -> dict[str, Any]:
        return {"window": list(self._window), "excursion": self.excursion}

    def _measure(self) -> None:
        self.median, self.limit = math.nan, math.inf
        if len(self._window) >= self._enough:
            self.median, sigma = level_and_scatter(list(self._window))
            room = max(self._sigmas * sigma, FLOOR_SHARE * abs(self.median))
            self.limit = max(self.median + room, self._floor)


class _Recovery:
    """How often training rolled back, whether that helped, and how far the learning rate is eased."""

    def __init__(self, settings: HealthSettings, saved: Mapping[str, Any]) -> None:
        self._settings = settings
        self.rollbacks: int = saved.get("rollbacks", 0)
        self.without_progress: int = saved.get("without_progress", 0)
        self._furthest_trouble_step: int | None = saved.get("furthest_trouble_step")
        self._eased_from_step: int | None = saved.get("eased_from_step")
        self._eased_share: float = saved.get("eased_share", 1.0)

    @property
    def is_exhausted(self) -> bool:
        return self.without_progress >= self._settings.max_rollbacks

    def reach(self, step: int) -> None:
        """Training that gets well past the furthest trouble has made progress."""
        furthest = self._furthest_trouble_step
        if furthest is not None and step > furthest + self._settings.easing_steps:
            self.without_progress = 0

    def forgive(self) -> None:
        """Let rollbacks count afresh: people have changed what led to the last ones."""
        self.without_progress = 0
        self._furthest_trouble_step = None

    def roll_back(self, *, at_step: int, to_step: int) -> None:
        self.rollbacks += 1
        self.without_progress += 1
        self._furthest_trouble_step = max(self._furthest_trouble_step or 0, at_step)
        self._eased_from_step = to_step
        self._eased_share = self._settings.eased_learning_rate_share**self.without_progress

    def learning_rate_share(self, step: int) -> float:
        if self._eased_from_step is None or step < self._eased_from_step:
            return 1.0
        done = min(1.0, (step - self._eased_from_step) / self._settings.easing_steps)
        return self._eased_share + (1 - self._eased_share) * done

    def to_json(self) -> dict[str, Any]:
        return {
            "rollbacks": self.rollbacks,
            "without_progress": self.without_progress,
            "furthest_trouble_step": self._furthest_trouble_step,
            "eased_from_step": self._eased_from_step,
            "eased_share": self._eased_share,
        }
