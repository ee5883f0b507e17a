"""Usual values of a metric, and the limit above which a value is unusual.

Pure, no torch here.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainer.config.train_config import HealthSettings, Policy
from trainer.health.events import Action, Kind
from trainer.health.robust_statistics import level_and_scatter

FLOOR_SHARE = 0.1
"""Smallest unusual excess over the median, as a share of the median: late in a run,
sigma of the loss is tiny."""
ENOUGH_VALUES = 16
"""Values required before one is judged, or as many as a shorter window holds."""
FEWEST_VALUES = 8
"""Values required before one is judged, however short the window."""


class MetricHistory:
    """Window of a metric's last usual values, from which its limit is derived."""

    def __init__(
        self,
        settings: HealthSettings,
        *,
        key: str,
        name: str,
        kind: Kind,
        policy: Policy,
        floor: float,
        saved: Mapping[str, Any],
    ) -> None:
        """Start from a saved history, which may be empty.

        Args:
            settings: Length of the window, and its sigmas up to the limit.
            key: Key of the metric in the values of a finding.
            name: Name of the metric in messages.
            kind: Kind of finding on an unusual value.
            policy: Response to an unusual value.
            floor: Smallest limit.
            saved: History as ``to_json`` returned it.
        """
        self.key = key
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
        self._enough_values = max(
            FEWEST_VALUES, min(ENOUGH_VALUES, settings.window_steps)
        )
        self._window: deque[float] = deque(
            saved.get("window", ()), maxlen=settings.window_steps
        )
        self._derive_limit()

    @property
    def device_limit(self) -> float:
        """Limit above which the device skips an update; infinite if it never does."""
        return self.limit if self.guarded else math.inf

    def limit_text(self) -> str:
        """Return the limit as messages show it."""
        return (
            f"{self.limit:.4g}; the median of the last {len(self._window)} steps is"
            f" {self.median:.4g}"
        )

    def limit_values(self) -> dict[str, float]:
        """Return the numbers behind the limit; none before there are enough values."""
        if math.isnan(self.median):
            return {}
        return {"median": self.median, "limit": self.limit}

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
        self._derive_limit()

    def to_json(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return {"window": list(self._window), "excursion": self.excursion}

    def _derive_limit(self) -> None:
        """Derive the median and the limit from the window."""
        self.median = math.nan
        self.limit = math.inf
        if len(self._window) >= self._enough_values:
            self.median, sigma = level_and_scatter(list(self._window))
            room = max(self._sigmas * sigma, FLOOR_SHARE * abs(self.median))
            self.limit = max(self.median + room, self._floor)
